"""Slices of TPUs that programs are compiled for without having one.

libtpu brings XLA's TPU compiler to any x86-64 Linux. A topology names chips that
need not be there; what is compiled for it runs on a slice of that shape.
"""

import importlib.util
import math
import os
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from specjax.config import suggest
from specjax.parallel import rules

GIB = 2**30
# libtpu otherwise asks which TPU it is on, warns, and lets one process in at a time.
_COMPILER_ONLY = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_ACCELERATOR_TYPE': 'v4-8',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_WORKER_ID': '0',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}
INSTALL = "pip install 'specjax[aot]' (libtpu, on x86-64 Linux)"


class Chip(NamedTuple):
  """Published figures of one chip.

  Attributes:
    name: as Google writes it.
    hbm_bytes: main memory that programs may use.
    hbm_bandwidth: bytes a second.
    bf16_flops: a second; a multiply-add is two.
    int8_ops: a second.
    link_bandwidth: bytes a second over one link, one way.
  """

  name: str
  hbm_bytes: int
  hbm_bandwidth: float
  bf16_flops: float
  int8_ops: float
  link_bandwidth: float


# Memory, bandwidth and peaks: the table 'Key specifications' in
#   https://cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e
# (v5p: 95 of 96 GiB, since the system keeps one). Links: the table of interconnects
# in https://jax-ml.github.io/scaling-book/tpus, which splits what those pages give
# for a chip among its 4 (v5e, v6e) or 6 links.
V4 = Chip('v4', 32 * GIB, 1.2e12, 275e12, 275e12, 4.5e10)
V5E = Chip('v5e', 16 * GIB, 8.19e11, 197e12, 393e12, 4.5e10)
V5P = Chip('v5p', 95 * GIB, 2.765e12, 459e12, 918e12, 9e10)
V6E = Chip('v6e', 32 * GIB, 1.638e12, 918e12, 1836e12, 9e10)


class Topology(NamedTuple):
  """A slice.

  Attributes:
    name: generation and chips along each axis of the interconnect.
    chip: its chips.
    size: chips, each of them one device.
    options: what libtpu is told beside the name.
  """

  name: str
  chip: Chip
  size: int
  options: dict[str, Any]


def _topology(name: str, chip: Chip, host: tuple[int, int, int]) -> Topology:
  size = math.prod(int(count) for count in name.partition(':')[2].split('x'))
  options: dict[str, Any] = {'chips_per_host_bounds': host}
  if chip in (V4, V5P):
    # The two cores of a chip work as one device, as on a Cloud TPU.
    options['chip_config_name'] = 'megacore'
  return Topology(name, chip, size, options)


_ONE, _FOUR, _EIGHT = (1, 1, 1), (2, 2, 1), (2, 4, 1)  # chips of a host
TOPOLOGIES = {
  topology.name: topology
  for topology in (
    _topology('v4:1x1x1', V4, _ONE),
    _topology('v4:2x2x1', V4, _FOUR),
    _topology('v4:2x2x2', V4, _FOUR),
    _topology('v4:2x2x4', V4, _FOUR),
    _topology('v5e:1x1', V5E, _ONE),
    _topology('v5e:2x2', V5E, _FOUR),
    _topology('v5e:2x4', V5E, _EIGHT),
    _topology('v5e:4x4', V5E, _FOUR),
    _topology('v5p:1x1x1', V5P, _ONE),
    _topology('v5p:2x2x1', V5P, _FOUR),
    _topology('v5p:2x2x2', V5P, _FOUR),
    _topology('v5p:2x2x4', V5P, _FOUR),
    _topology('v6e:1x1', V6E, _ONE),
    _topology('v6e:2x2', V6E, _FOUR),
    _topology('v6e:2x4', V6E, _EIGHT),
    _topology('v6e:4x4', V6E, _FOUR),
  )
}
# Accelerator types count TensorCores on v4 and v5p, and chips on v5e and v6e.
ALIASES = {
  'v4': 'v4:1x1x1',
  'v4-8': 'v4:2x2x1',
  'v4-16': 'v4:2x2x2',
  'v4-32': 'v4:2x2x4',
  'v5e-1': 'v5e:1x1',
  'v5e-4': 'v5e:2x2',
  'v5e-8': 'v5e:2x4',
  'v5e-16': 'v5e:4x4',
  'v5p-8': 'v5p:2x2x1',
  'v5p-16': 'v5p:2x2x2',
  'v5p-32': 'v5p:2x2x4',
  'v6e-1': 'v6e:1x1',
  'v6e-4': 'v6e:2x2',
  'v6e-8': 'v6e:2x4',
  'v6e-16': 'v6e:4x4',
}


def find(name: str) -> Topology:
  """The topology of a name, or of a Cloud TPU's accelerator type.

  Raises:
    ValueError: neither; the message lists the known ones.

  Example:
    >>> find('v5p-8').name, find('v4:1x1x1').size
    ('v5p:2x2x1', 1)
  """
  short = name.replace('v5litepod', 'v5e')  # Cloud's name for it
  topology = TOPOLOGIES.get(ALIASES.get(short, short))
  if topology is None:
    known = ', '.join([*TOPOLOGIES, *ALIASES])
    near = suggest(name, [*TOPOLOGIES, *ALIASES])
    hint = f' {near}' if near.startswith('did you') else ''
    raise ValueError(f'topology: {name!r} is unknown;{hint} known: {known}')
  return topology


def has_compiler() -> bool:
  """Whether libtpu is installed."""
  return importlib.util.find_spec('libtpu') is not None


def make_mesh(topology: Topology, data: int, model: int) -> Mesh:
  """A mesh with the axes 'data' and 'model' over all chips of a topology.

  Raises:
    ValueError: `data * model` is not the number of chips, or there is no compiler.
  """
  if data < 1 or model < 1 or data * model != topology.size:
    raise ValueError(
      f'mesh: {data},{model} on {topology.name}, which has {topology.size} '
      f'chip{"s" * (topology.size > 1)}; give two sizes (data,model) whose product is '
      f'{topology.size}'
    )
  if not has_compiler():
    raise ValueError(
      f'topology: {topology.name} needs the TPU compiler, which is not there; {INSTALL}'
    )
  for name, value in _COMPILER_ONLY.items():
    os.environ.setdefault(name, value)
  description = topologies.get_topology_desc(
    platform='tpu', topology_name=topology.name, **topology.options
  )
  return jax.make_mesh(
    (data, model),
    (rules.DATA, rules.MODEL),
    axis_types=(AxisType.Auto, AxisType.Auto),
    devices=description.devices,
  )
