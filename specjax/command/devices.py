"""The devices and processes of a run, as the command line asks for them."""

import dataclasses
import sys
from collections.abc import Sequence

import jax

from specjax.config import RunConfig
from specjax.parallel import distributed
from specjax.parallel.mesh import describe, make_mesh


def start(
  config: RunConfig, texts: Sequence[str] | None
) -> tuple[RunConfig, jax.sharding.Mesh | None]:
  """Joins the other processes, makes the mesh and says so on stderr.

  Args:
    config: what the command line asks for.
    texts: what will be decoded, the same in every process; None: a demonstration.

  Returns:
    The configuration for this process, which writes only if it is the first, and
    the mesh; None for one device.

  Raises:
    ValueError: the processes or the devices are not there.
  """
  parallel = config.parallel
  if parallel.joins:
    if texts is None:
      raise ValueError('input: missing; several processes decode --input or --prompt')
    distributed.initialize(
      parallel.coordinator_address,
      parallel.num_processes,
      parallel.process_id,
      timeout=parallel.join_seconds,
    )
    alike = dataclasses.replace(
      config,
      io=dataclasses.replace(config.io, output=None),
      parallel=dataclasses.replace(parallel, process_id=None),
    )
    distributed.check_equal('input or options', (alike, texts))
  elif parallel.mesh_data * parallel.mesh_model == 1:
    return config, None
  mesh = make_mesh(parallel.mesh_data, parallel.mesh_model)
  if not distributed.is_main():
    io = dataclasses.replace(config.io, output=None)
    return dataclasses.replace(config, io=io), mesh
  how = 'split too' if parallel.shard_draft else 'whole on every device'
  print(f'{describe(mesh)}; the draft is {how}', file=sys.stderr)
  remedy = None
  if config.io.stream:
    remedy = 'leave out --stream to share texts out'
  elif config.io.batch_size == 1:
    remedy = 'raise --batch_size to share texts out'
  elif texts is None or len(texts) == 1:
    remedy = 'give more texts, or --mesh_data 1'
  if parallel.mesh_data > 1 and remedy is not None:
    print(
      f'one text at a time: the {parallel.mesh_data} groups of the data axis all '
      f'decode the same; {remedy}',
      file=sys.stderr,
    )
  return config, mesh
