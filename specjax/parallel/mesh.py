"""Meshes of devices, and rows of a batch on them."""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.core.types import PyTree
from specjax.parallel import rules


def make_mesh(data: int, model: int, devices: list[jax.Device] | None = None) -> Mesh:
  """A mesh with the axes 'data' and 'model'.

  Args:
    data: rows of a batch are split among so many groups of devices.
    model: each group has so many devices, which split the target among them.
    devices: `data * model` of them or more, from which the first are taken; all by
      default.

  Returns:
    The mesh; its axes are `AxisType.Auto`: the compiler propagates shardings from
    what is fixed.

  Raises:
    ValueError: too few devices, or some process would have none in the mesh.
  """
  for name, size in (('data', data), ('model', model)):
    if size < 1:
      raise ValueError(f'mesh_{name}: {size}; give 1 or more')
  devices = jax.devices() if devices is None else list(devices)
  size = data * model
  if size > len(devices):
    remedy = f'give sizes whose product is at most {len(devices)}'
    if devices[0].platform == 'cpu':
      remedy += f', or set XLA_FLAGS=--xla_force_host_platform_device_count={size}'
    raise ValueError(
      f'mesh: data={data} times model={model} takes {size} devices and there are '
      f'{len(devices)}; {remedy}'
    )
  chosen = devices[:size]
  if {device.process_index for device in chosen} != set(range(jax.process_count())):
    raise ValueError(
      f'mesh: data={data} times model={model} leaves some of the '
      f'{jax.process_count()} processes without a device; give sizes whose product is '
      f'{len(devices)}'
    )
  return jax.make_mesh(
    (data, model),
    (rules.DATA, rules.MODEL),
    axis_types=(AxisType.Auto, AxisType.Auto),
    devices=chosen,
  )


def describe(mesh: Mesh) -> str:
  """One line for people: axes, devices, processes."""
  sizes = ' x '.join(f'{name} {size}' for name, size in mesh.shape.items())
  kind = mesh.devices.flat[0].device_kind
  processes = jax.process_count()
  return (
    f'mesh: {sizes} on {mesh.size} {kind} devices, {processes} '
    f'process{"es" * (processes > 1)}'
  )


def padded_rows(num_rows: int, mesh: Mesh | None) -> int:
  """`num_rows`, rounded up to a multiple of the data axis; one row stays one."""
  multiple = 1 if mesh is None or num_rows == 1 else mesh.shape[rules.DATA]
  return math.ceil(num_rows / multiple) * multiple


def place_rows(tree: PyTree, mesh: Mesh) -> PyTree:
  """Puts the rows of a batch on the devices of their share of 'data'.

  Args:
    tree: arrays or typed keys with the batch for their first axis, the same in
      every process; each process transfers only its devices' rows.
    mesh: from `make_mesh`.

  Returns:
    Global arrays. One row is copied to every device.
  """

  def put(leaf):
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      data = put(jax.random.key_data(leaf))
      return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    leaf = np.asarray(leaf)
    sharding = rules.shardings(leaf, rules.row_axes(leaf), mesh, rules.REPLICATED)
    return jax.make_array_from_process_local_data(sharding, leaf, leaf.shape)

  return jax.tree.map(put, tree)


def place(tree: PyTree, shardings: PyTree) -> PyTree:
  """Puts arrays on a mesh, each device's block straight onto it.

  Args:
    tree: NumPy or JAX arrays, the same in every process.
    shardings: one for each, or for subtrees.

  Returns:
    Global arrays; those that lie as asked already are returned as they are.
  """

  def put(sharding, subtree):
    return jax.tree.map(lambda leaf: put_leaf(leaf, sharding), subtree)

  def put_leaf(leaf, sharding):
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
      return leaf
    if isinstance(leaf, jax.Array) and jax.process_count() == 1:
      return jax.device_put(leaf, sharding)  # from device to device
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

  return jax.tree.map(put, shardings, tree)


def everywhere(mesh: Mesh) -> NamedSharding:
  """Whole on every device."""
  return NamedSharding(mesh, PartitionSpec())
