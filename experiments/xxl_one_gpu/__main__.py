"""T5-XXL with T5-small on one GPU: `python -m experiments.xxl_one_gpu --output DIR`.

Weights are random and drawn on the device: nothing is downloaded. Writes results.json
and results.md, anew after every section; what does not fit into --minutes is named.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.console
import rich.markdown
import rich.progress

from experiments.xxl_one_gpu import files

# Workers in the order of importance, and what each adds to XLA_FLAGS. By default XLA
# captures fusions and matrix products in CUDA graphs, and leaves loops to the host.
COMMAND_BUFFER = '--xla_gpu_enable_command_buffer='
WORKERS = {
  'main': '',
  'exactness': '',
  'buffers_while': f'{COMMAND_BUFFER}+WHILE,+CONDITIONAL',
  'buffers_off': COMMAND_BUFFER,
  'int8': '',
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
  parser = argparse.ArgumentParser('python -m experiments.xxl_one_gpu', None, __doc__)
  parser.add_argument(
    '--target', default='t5_1_1_xxl', help="a T5Config size or 'tiny'"
  )
  parser.add_argument('--draft', default='t5_1_1_small')
  parser.add_argument('--output', type=Path, required=True, help='a folder')
  parser.add_argument('--minutes', type=float, default=8.0, help='for everything')
  parser.add_argument('--gamma', type=int, default=7, help='drafts of the whole loop')
  parser.add_argument('--temperature', type=float, default=0.0)
  parser.add_argument(
    '--workers', nargs='+', choices=list(WORKERS), default=list(WORKERS)
  )
  parser.add_argument('--worker', choices=list(WORKERS), help=argparse.SUPPRESS)
  parser.add_argument('--stop_at', type=float, default=0.0, help=argparse.SUPPRESS)
  options = parser.parse_args(argv)
  if options.gamma < 1 or options.minutes <= 0:
    parser.error('--gamma is 1 or more, --minutes more than 0')
  return options


def driver() -> str | None:
  """The NVIDIA driver's version; None where there is none."""
  command = ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader']
  try:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
  except (OSError, subprocess.TimeoutExpired):
    return None
  return answer.stdout.partition('\n')[0].strip() or None


def last_words(log: Path) -> str:
  """The line of a worker's log that says why it died."""
  lines = log.read_text(errors='replace').splitlines()
  telling = [line for line in lines if 'in XLA_FLAGS' in line or 'Error' in line]
  return (telling or lines or ['it said nothing'])[0 if telling else -1][:300]


def read(path: Path) -> dict[str, Any] | None:
  return json.loads(path.read_text()) if path.exists() else None


def environment(worker: str, output: Path) -> dict[str, str]:
  """A worker's: its flags for XLA, and a cache of what was compiled and tuned."""
  flags = f'{os.environ.get("XLA_FLAGS", "")} {WORKERS[worker]}'.strip()
  cache = {'JAX_COMPILATION_CACHE_DIR': str(output.resolve() / 'compiled')}
  root = str(Path(__file__).parents[2])
  path = os.pathsep.join([root, *filter(None, [os.environ.get('PYTHONPATH')])])
  return {**cache, **os.environ, 'XLA_FLAGS': flags, 'PYTHONPATH': path}


def run_worker(options, worker: str, stop_at: float, names: list[str], on_change):
  """Runs one process and passes on what it has found so far, until `stop_at`."""
  part, log = (options.output / f'{worker}.{kind}' for kind in ('part', 'log'))
  part.unlink(missing_ok=True)
  command = [sys.executable, '-m', 'experiments.xxl_one_gpu', '--worker', worker]
  for name in ('target', 'draft', 'output', 'gamma', 'temperature'):
    command += [f'--{name}', str(getattr(options, name))]
  with log.open('w') as stream:
    process = subprocess.Popen(
      [*command, '--stop_at', str(stop_at)],
      env=environment(worker, options.output),
      stdout=stream,
      stderr=stream,
    )
    try:
      while process.poll() is None and time.time() < stop_at:
        time.sleep(0.2)
        if found := read(part):
          on_change(found)
    finally:
      ended = process.poll()
      process.kill()
      process.wait()
  waiting = {'status': 'not run', 'reason': 'the time was over before'}
  found = read(part) or {'sections': dict.fromkeys(names, waiting)}
  if ended:  # it died by itself
    reason = {'status': 'failed', 'reason': last_words(log)}
    for name, section in found['sections'].items():
      if section['status'] == 'not run':
        found['sections'][name] = reason
  part.unlink(missing_ok=True)
  on_change(found)


def run(options: argparse.Namespace) -> dict[str, Any]:
  """Runs the workers one after the other; returns what results.json holds."""
  from experiments.xxl_one_gpu import measure, pair  # import JAX, start no backend

  stop_at = time.time() + 60 * options.minutes
  size = pair.sizes(options.target, options.draft, gamma=options.gamma)
  arguments = {name: getattr(options, name) for name in ('target', 'draft', 'minutes')}
  arguments |= {'gamma': options.gamma, 'temperature': options.temperature}
  results: dict[str, Any] = {
    'arguments': arguments,
    'machine': {'driver': driver(), 'cpus': os.cpu_count()},
    'size': dataclasses.asdict(size),
    'workers': {},
  }
  names = {w: list(measure.sections(w, size)) for w in options.workers}
  console = rich.console.Console(stderr=True, highlight=False)
  options.output.mkdir(parents=True, exist_ok=True)
  with rich.progress.Progress(console=console) as progress:
    task = progress.add_task('', total=sum(map(len, names.values())))
    for worker in options.workers:

      def change(found, worker=worker):
        before = results['workers'].get(worker)
        results['machine'] |= found.get('machine', {})
        record = {'xla_flags': WORKERS[worker], 'sections': found['sections']}
        if record == before:
          return
        results['workers'][worker] = record
        files.write_json(options.output / 'results.json', results)
        files.write_text(options.output / 'results.md', files.markdown(results))
        finished = {
          f'{w} {name}': part
          for w, each in results['workers'].items()
          for name, part in each['sections'].items()
          if 'seconds' in part
        }
        latest = list(finished)[-1:] or [f'{worker} starts']
        progress.update(task, completed=len(finished), description=latest[0])

      run_worker(options, worker, stop_at, names[worker], change)
  return results


def main(argv: Sequence[str] | None = None) -> int:
  options = parse(argv)
  if options.worker:
    from experiments.xxl_one_gpu import worker  # JAX starts here

    worker.main(options, options.output / f'{options.worker}.part')
    return 0
  try:
    results = run(options)
  except (ValueError, OSError) as error:
    print(f'xxl_one_gpu: {error}', file=sys.stderr)
    return 2
  rich.console.Console().print(rich.markdown.Markdown(files.markdown(results)))
  return 0


if __name__ == '__main__':
  sys.exit(main())
