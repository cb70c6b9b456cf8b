"""One process of the experiment: runs the sections of a worker, one after the other.

XLA's flags hold for a process, and a process that has opened the device keeps its
memory: hence processes that follow each other. After every section the results are
in the file, whatever happens next.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from experiments.xxl_one_gpu import measure, pair
from experiments.xxl_one_gpu.files import write_json


def machine() -> dict[str, Any]:
  """What JAX says of the device."""
  device = jax.devices()[0]
  stats = device.memory_stats() or {}
  return {
    'platform': device.platform,
    'kind': device.device_kind,
    'memory_limit_bytes': stats.get('bytes_limit'),
    'jax': jax.__version__,
    'jaxlib': jax.lib.__version__,
    'runtime': ' '.join(device.client.platform_version.split()),
  }


def run(
  sections: dict[str, Callable],
  bench: pair.Bench,
  path: Path,
  stop_at: float,
  clock: Callable[[], float] = time.time,
) -> dict[str, Any]:
  """Runs sections until the time is over.

  Args:
    sections: `(bench, sections found) -> numbers`, by name.
    bench: the pair.
    path: what is found is written here after each section.
    stop_at: no section starts after this time of `clock`.
    clock: seconds; replace it in tests.

  Returns:
    `machine`, and `sections`: for each name its status ('done', 'failed', 'not run'),
    and its numbers or the reason.
  """
  waiting = {'status': 'not run', 'reason': 'the time was over before'}
  found: dict[str, Any] = dict.fromkeys(sections, waiting)
  record = {'machine': machine(), 'sections': found}
  for name, section in sections.items():
    if clock() >= stop_at:
      break
    found[name] = {'status': 'not run', 'reason': 'the time was over during it'}
    write_json(path, record)
    start = clock()
    try:
      done = {key: part for key, part in found.items() if part['status'] == 'done'}
      found[name] = {'status': 'done', **section(bench, done)}
    except Exception as error:  # the sections after it may well work
      reason = f'{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}'
      found[name] = {'status': 'failed', 'reason': reason}
    found[name] |= {'seconds': clock() - start, 'peak_bytes': pair.peak_bytes()}
    write_json(path, record)
  return record


def main(options: argparse.Namespace, path: Path) -> None:
  size = pair.sizes(options.target, options.draft, gamma=options.gamma)
  bench = pair.Bench(size, options.temperature)
  run(measure.sections(options.worker, size), bench, path, options.stop_at)
