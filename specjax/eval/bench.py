"""Ours, T5X and Hugging Face on the same weights: `python -m specjax.eval.bench`.

  python -m specjax.eval.bench                           the embedded pair
  python -m specjax.eval.bench --size t5_1_1_small --source_length 512
  python -m specjax.eval.bench --model TARGET --draft_model DRAFT --output bench.json

One process, every system in turns (A B C A B C ...) after one call each that compiles,
greedy, encoders included. Ratios are taken within a turn. Tokens are compared: where a
system decodes anything else, its first difference is shown with the logits' gap, and
the exit code is 1 unless all are near-ties. Systems that can not run are listed with
what they need. docs/performance.md says how to read it.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import rich.box
import rich.console
import rich.progress
import rich.table

from specjax.checkpoints import store
from specjax.config import DTYPES
from specjax.config_files import load_config
from specjax.eval import cases, race, systems
from specjax.eval.cases import Case
from specjax.eval.race import Result
from specjax.eval.systems import Maker

DIFFERENT = 1
USAGE_ERROR = 2
CLOCKS = {'wall': time.perf_counter, 'cpu': time.process_time}
_PACKAGES = ('jax', 'jaxlib', 'flax', 'numpy', 'torch', 'transformers')


def to_dict(result: Result, case: Case, settings: Mapping[str, Any]) -> dict[str, Any]:
  """All of a benchmark as JSON types."""
  return {
    'settings': dict(settings),
    'notes': list(case.notes),
    'environment': environment(),
    'systems': [row.to_dict() for row in result.rows],
    'not_run': result.absent,
    'comparisons': [
      {
        'ours': each.ours,
        'theirs': each.theirs,
        'speedup': each.speedup.median,
        'speedup_quartiles': [each.speedup.low, each.speedup.high],
        'speedup_per_call': each.per_call,
      }
      for each in result.comparisons()
    ],
  }


def environment() -> dict[str, Any]:
  """Versions, hardware, and how busy the machine is."""
  versions = {}
  for package in _PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[package] = importlib.metadata.version(package)
  return {
    'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
    'device': jax.devices()[0].device_kind,
    'machine': platform.machine(),
    'cores': systems.num_cores(),
    'load': _load(),
    'versions': versions,
  }


def _load() -> float | None:
  """Processes that ran or waited for a core in the last minute; None: unknown."""
  return os.getloadavg()[0] if hasattr(os, 'getloadavg') else None


def print_result(result: Result, console: rich.console.Console) -> None:
  """The table, the comparisons, what differs and what did not run."""
  table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
  table.add_column('system', no_wrap=True)
  reference = result.rows[0]
  for header in (
    'ms/token',
    'tokens/s',
    f'x {reference.name}',
    'quartiles',
    'tok/call',
  ):
    table.add_column(header, justify='right')
  table.add_column('tokens')
  for row in result.rows:
    figures = row.to_dict()
    speed = race.speedup(row, reference)
    calls = row.tokens_per_call
    table.add_row(
      row.name,
      f'{figures["ms_per_token"]:.2f}',
      f'{figures["tokens_per_second"]:.0f}',
      _figure(speed.median),
      f'{_figure(speed.low)}-{_figure(speed.high)}',
      '' if calls is None else f'{calls:.2f}',
      _verdict(row),
    )
  console.print(table)
  for each in result.comparisons():
    speed = each.speedup
    verdict = 'faster' if speed.median > 1 else 'SLOWER'
    line = (
      f'{each.ours} / {each.theirs}: {speed.median:.2f}x as fast '
      f'({speed.low:.2f}-{speed.high:.2f}): ours is {verdict}'
    )
    if each.per_call is not None and not math.isclose(
      each.per_call, speed.median, rel_tol=0.01
    ):
      line += f'; for each call of the target {each.per_call:.2f}x'
    console.print(line, highlight=False)
  for row in result.rows:
    if row.differences:
      # What is no tie is told first.
      worst = max(row.differences, key=lambda each: (not each.is_tie, each.gap))
      console.print(
        f'{row.name} differs from {reference.name} in {len(row.differences)} of the '
        f'rows: {worst}',
        highlight=False,
      )
  for name, reason in result.absent.items():
    console.print(f'not run: {name}: {reason}', highlight=False, markup=False)


def _figure(ratio: float) -> str:
  return f'{ratio:.2f}' if ratio >= 0.1 else f'{ratio:.3f}'


def _verdict(row: race.Row) -> str:
  if not row.differences:
    return 'equal'
  return 'DIFFERENT' if row.is_fault else 'near-ties'


class _Parser(argparse.ArgumentParser):
  def error(self, message: str) -> NoReturn:
    raise ValueError(f'{message}; see {self.prog} --help')


def _parser() -> argparse.ArgumentParser:
  parser = _Parser(
    prog='python -m specjax.eval.bench',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = parser.add_argument
  add(
    '--config',
    metavar='FILE',
    help='as for specjax.run: its pair, dtype, gamma, max_new_tokens, batch_size and '
    'seed become the defaults',
  )
  add(
    '--model',
    metavar='NAME',
    default='embedded',
    help="'embedded', a pair's folder, or a checkpoint of any format",
  )
  add(
    '--draft_model',
    metavar='NAME',
    help="a checkpoint, a published size (random weights), or 'none'; by default the "
    "pair's own, or the first layers of a --size",
  )
  add(
    '--size',
    help='instead of --model: a published size with random weights, such as '
    't5_1_1_small',
  )
  add('--dtype', choices=DTYPES, default='float32', help='of weights and activations')
  add('--source_length', type=int, default=64, help='encoder positions')
  add('--max_new_tokens', type=int, default=64, help='most tokens of an output')
  add('--batch_size', type=int, default=1, help='sources decoded together')
  add(
    '--num_batches',
    type=int,
    help='decoded one after the other; 4 of the embedded texts, 1 of random ids',
  )
  add(
    '--gamma',
    '--num_speculative_tokens',
    type=int,
    default=4,
    help='tokens drafted a round',
  )
  add('--turns', type=int, default=5, help='warm runs of each system')
  add(
    '--clock',
    choices=CLOCKS,
    default='wall',
    help="'cpu': seconds of all cores, for a machine that others load; then give the "
    'process one core (taskset -c 0), since threads that wait for each other count',
  )
  add('--seed', type=int, default=0, help='of random weights and sources')
  add(
    '--systems',
    help='some of them, between commas: ' + ', '.join(systems.SYSTEMS),
  )
  add('--output', metavar='FILE', help='JSON')
  return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
  """Arguments -> options: those of `--config` first, then the others.

  Raises:
    ValueError: an unknown option, a bad value or an unknown configuration.
  """
  parser = _parser()
  options = parser.parse_args(argv)
  if options.config is None:
    return options
  config = load_config(options.config)
  speculation = config.speculation.within(config.sampling.max_new_tokens)
  if speculation.is_auto:
    raise ValueError(
      f"num_speculative_tokens: 'auto' in {options.config}; the benchmark compares "
      'fixed gammas, so name a configuration with an integer'
    )
  parser.set_defaults(
    model=config.pair.model,
    draft_model=config.pair.draft_model,
    dtype=config.pair.dtype,
    gamma=speculation.num_speculative_tokens,
    max_new_tokens=config.sampling.max_new_tokens,
    batch_size=config.io.batch_size,
    seed=config.sampling.seed,
  )
  return parser.parse_args(argv)


def choose(names: str | None) -> dict[str, Maker]:
  """The systems of a list between commas; None: all.

  Raises:
    ValueError: there is no such system.
  """
  if names is None:
    return systems.SYSTEMS
  chosen = [name.strip() for name in names.split(',')]
  for name in chosen:
    if name not in systems.SYSTEMS:
      raise ValueError(
        f'systems: {name!r} is unknown; choose from {", ".join(systems.SYSTEMS)}'
      )
  return {name: make for name, make in systems.SYSTEMS.items() if name in chosen}


@contextlib.contextmanager
def _progress(console: rich.console.Console) -> Iterator[Callable[[str, int], None]]:
  """A bar that lasts as long as the race; yields what `race.race` calls."""
  with rich.progress.Progress(console=console, transient=True) as bar:
    task = bar.add_task('loading', total=None)
    runs = 0

    def on_run(name: str, total: int) -> None:
      nonlocal runs
      bar.update(task, description=name, total=total, completed=runs)
      runs += 1

    yield on_run


def main(argv: Sequence[str] | None = None) -> int:
  """Measures and prints; returns the exit code."""
  console = rich.console.Console()
  try:
    options = parse(argv)
    makers = choose(options.systems)
    if options.turns < 1:
      raise ValueError(f'turns: {options.turns}; give 1 or more')
    output = options.output and Path(options.output).expanduser()
    if output and not output.parent.is_dir():
      raise ValueError(f'output: there is no folder {output.parent}; make it first')
    case = cases.make_case(
      options.model,
      size=options.size,
      draft=options.draft_model,
      dtype=options.dtype,
      source_length=options.source_length,
      max_new_tokens=options.max_new_tokens,
      batch_size=options.batch_size,
      num_batches=options.num_batches,
      num_draft=options.gamma,
      seed=options.seed,
    )
    for note in case.notes:
      console.print(note, highlight=False, markup=False)
    console.print(
      f'{case.dtype}, {len(case.batches)} x {case.batch_size} sources of '
      f'{options.source_length} ids, up to {options.max_new_tokens} new tokens, gamma '
      f'{options.gamma}, {options.turns} turns, {options.clock} clock, '
      f'{systems.num_cores()} cores',
      highlight=False,
    )
    with _progress(console) as on_run:
      result = race.race(case, makers, options.turns, on_run, CLOCKS[options.clock])
    print_result(result, console)
    if output:
      settings = {
        **vars(options),
        'num_batches': len(case.batches),
        'systems': list(makers),
      }
      del settings['output']
      data = json.dumps(to_dict(result, case, settings), indent=1) + '\n'
      store.write_atomically(output, data.encode())
  except ValueError as error:
    print('specjax:', ' '.join(str(error).split()), file=sys.stderr)
    return USAGE_ERROR
  return DIFFERENT if any(row.is_fault for row in result.rows) else 0


if __name__ == '__main__':
  sys.exit(main())
