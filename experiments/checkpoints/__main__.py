"""How long does a checkpoint take to load, and how much memory? On Linux.

`python -m experiments.checkpoints --size t5_1_1_small` writes random weights in each
format, then restores them in a process of its own, sharded over 1 and 8 devices.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import zlib

import flax.traverse_util
import jax
import numpy as np
import rich.console
import rich.table

from specjax.checkpoints import leaves, orbax, t5x
from specjax.models import t5

RESULTS = pathlib.Path(__file__).with_name('results.jsonl')
OPEN = {'t5x': t5x.open_weights, 'orbax': orbax.open_weights}
GB = 1e9


def random_weights(size: str) -> leaves.Weights:
  """Weights that are drawn when they are read."""
  config = t5.T5Config.from_size(size)

  def leaf(name: str, shape: tuple[int, ...]) -> leaves.Leaf:
    def read(index: leaves.Index) -> np.ndarray:
      rng = np.random.default_rng(zlib.crc32(name.encode()))
      return rng.standard_normal(shape, np.float32)[index]

    return leaves.Leaf(shape, np.dtype(np.float32), read)

  shapes = leaves.expected_shapes(config)
  return leaves.Weights(config, {n: leaf(n, s) for n, s in shapes.items()}, {})


def write(kind: str, size: str, path: str) -> None:
  weights = random_weights(size)
  if kind == 't5x':
    t5x.write(path, weights)
    return
  flat = {name: leaves.read_whole(leaf) for name, leaf in weights.leaves.items()}
  orbax.save(path, flax.traverse_util.unflatten_dict(flat, sep='/'), weights.config)


def restore(kind: str, path: str) -> int:
  """Restores in float32, each leaf cut along its longest axis; returns the bytes."""
  weights = OPEN[kind](path)
  mesh = jax.make_mesh((len(jax.devices()),), ('model',))

  def sharding(shape: tuple[int, ...]) -> jax.sharding.NamedSharding:
    spec: list[str | None] = [None] * len(shape)
    axis = int(np.argmax(shape))
    if shape[axis] % mesh.size == 0:
      spec[axis] = 'model'
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

  shardings = {name: sharding(leaf.shape) for name, leaf in weights.leaves.items()}
  params = jax.block_until_ready(leaves.restore(weights, shardings=shardings))
  return sum(
    shard.data.nbytes
    for leaf in jax.tree.leaves(params)
    for shard in leaf.addressable_shards
  )


def status(field: str) -> int:
  """A number of bytes from /proc/self/status."""
  text = pathlib.Path('/proc/self/status').read_text()
  return int(text.partition(f'{field}:')[2].split()[0]) * 1024


def child(action: str, kind: str, size: str, path: str) -> None:
  """Does one thing and prints what it took, as JSON."""
  jax.devices()
  before = status('VmRSS')
  begin, begin_cpu = time.perf_counter(), time.process_time()
  held = restore(kind, path) if action == 'restore' else write(kind, size, path)
  seconds = time.perf_counter() - begin
  cpu = time.process_time() - begin_cpu
  peak = status('VmHWM') - before
  print(json.dumps({'seconds': seconds, 'cpu': cpu, 'peak': peak, 'held': held}))


def measure(*args: str, devices: int = 1) -> dict:
  flags = f'--xla_force_host_platform_device_count={devices}'
  done = subprocess.run(
    [sys.executable, '-m', 'experiments.checkpoints', '--child', *args],
    env={**os.environ, 'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'},
    stdout=subprocess.PIPE,
    check=True,
  )
  return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--size', default='t5_1_1_small', help='a published size')
  parser.add_argument('--child', nargs=4, help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.child:
    child(*options.child)
    return
  table = rich.table.Table(title=options.size)
  columns = ('format', 'action', 'devices', 's', 'CPU s')
  for column in (*columns, 'shards GB', 'peak GB', 'bar GB'):
    table.add_column(column, justify='right')
  records = []
  for kind in OPEN:
    with tempfile.TemporaryDirectory() as folder:
      path = f'{folder}/checkpoint_0'
      runs = [('write', 1), ('restore', 1), ('restore', 8)]
      for action, devices in runs:
        result = measure(action, kind, options.size, path, devices=devices)
        held = result['held']
        record = {
          'size': options.size,
          'format': kind,
          'action': action,
          'devices': devices,
          'seconds': round(result['seconds'], 2),
          'cpu_seconds': round(result['cpu'], 2),
          'peak_gb': round(result['peak'] / GB, 2),
          'shards_gb': held and round(held / GB, 2),
          'bar_gb': held and round(1.2 * held / GB + 1, 2),
        }
        records.append(record)
        names = ('format', 'action', 'devices', 'seconds', 'cpu_seconds')
        cells = [record[name] for name in (*names, 'shards_gb', 'peak_gb', 'bar_gb')]
        table.add_row(*('' if cell is None else str(cell) for cell in cells))
  rich.console.Console().print(table)
  with RESULTS.open('a') as file:
    file.writelines(json.dumps(record) + '\n' for record in records)


if __name__ == '__main__':
  main()
