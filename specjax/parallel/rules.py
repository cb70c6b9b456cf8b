"""Logical axes onto mesh axes: one table says how everything is sharded.

Parameters, caches and rows name their axes as T5X does (`t5x/partitioning.py`,
`standard_logical_axis_rules`); a table of rules maps each name to a mesh axis, or
to None for whole copies. A pair has two tables on one mesh, since a draft is mostly
too small to be worth the communication that splitting it takes.
"""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.core.types import PyTree

DATA = 'data'  # mesh axis: rows of a batch
MODEL = 'model'  # mesh axis: heads, feed-forward width and vocabulary

Rules = tuple[tuple[str, str | None], ...]

# Each kernel is split along its wide axis: what a column split computes in parts,
# the row split after it sums, one all-reduce for each block of a layer.
TENSOR_PARALLEL: Rules = (
  ('batch', DATA),
  ('vocab', MODEL),
  ('embed', None),
  ('mlp', MODEL),
  ('heads', MODEL),
  ('kv', None),
  ('joined_kv', MODEL),
  ('relpos_buckets', None),
  ('length', None),
)
REPLICATED: Rules = tuple(
  (name, axis if name == 'batch' else None) for name, axis in TENSOR_PARALLEL
)


def shardings(tree: PyTree, axes: PyTree, mesh: Mesh, rules: Rules) -> PyTree:
  """How a tree of arrays lies on a mesh.

  Args:
    tree: anything with shapes for leaves; nothing is computed.
    axes: the same tree with a tuple for each leaf, one logical axis name or None
      per axis.
    mesh: with the axes that the rules name.
    rules: logical axis -> mesh axis.

  Returns:
    The tree with a `NamedSharding` for each leaf. A batch of one row is whole on
    every device.

  Raises:
    ValueError: an axis has no rule, or its size is not divided by its mesh axis; the
      message names the axis, the sizes and the remedy.
  """
  table = dict(rules)
  sizes: dict[str, list[int]] = {}  # by mesh axis, of what must be divided

  def mesh_axis(name: str | None, size: int, where: str) -> str | None:
    if name is None:
      return None
    if name not in table:
      raise ValueError(
        f'rules: {where} has the axis {name!r}, which no rule names; add '
        f'({name!r}, None) to keep it whole'
      )
    axis = table[name]
    if axis is None or mesh.shape[axis] == 1 or (name == 'batch' and size == 1):
      return None
    sizes.setdefault(axis, []).append(size)
    return axis

  def spec(path: Any, leaf: Any, names: tuple[str | None, ...]) -> PartitionSpec:
    where = jax.tree_util.keystr(path, simple=True, separator='/')
    return PartitionSpec(
      *(
        mesh_axis(name, size, where)
        for name, size in zip(names, leaf.shape, strict=True)
      )
    )

  specs = jax.tree_util.tree_map_with_path(spec, tree, axes)

  failures = []

  def place(path: Any, leaf: Any, names: tuple, spec: PartitionSpec) -> NamedSharding:
    for name, size, axis in zip(names, leaf.shape, spec, strict=True):
      if axis is not None and size % mesh.shape[axis]:
        where = jax.tree_util.keystr(path, simple=True, separator='/')
        failures.append((name, size, where, axis))
    return NamedSharding(mesh, spec)

  placed = jax.tree_util.tree_map_with_path(place, tree, axes, specs)
  if failures:
    # Joined axes are multiples of the heads, which says more.
    name, size, where, axis = min(failures, key=lambda failure: failure[0] != 'heads')
    raise ValueError(_indivisible(name, size, where, axis, mesh, sizes[axis]))
  return placed


def constrain(tree: PyTree, axes: PyTree, mesh: Mesh, rules: Rules) -> PyTree:
  """Fixes, inside `jit`, how a tree lies on a mesh; arguments of `shardings`."""
  return jax.lax.with_sharding_constraint(tree, shardings(tree, axes, mesh, rules))


def row_axes(tree: PyTree) -> PyTree:
  """Logical axes of arrays whose first axis is the batch and the others whole."""
  return jax.tree.map(lambda leaf: ('batch', *(None,) * (leaf.ndim - 1)), tree)


def _indivisible(
  name: str, size: int, where: str, axis: str, mesh: Mesh, sizes: list[int]
) -> str:
  """The message for an axis that a mesh axis does not divide."""
  count = mesh.shape[axis]
  if name == 'batch':
    return (
      f'batch: {size} rows do not divide among {axis}={count}; give a multiple of '
      f'{count}, padding with rows without a budget, or one row'
    )
  common = math.gcd(*sizes)
  good = [str(n) for n in range(1, mesh.size + 1) if common % n == 0]
  pad = f', or pad the vocabulary to a multiple of {count}' if name == 'vocab' else ''
  return (
    f'mesh: the axis {name} of {where} has size {size}, which {axis}={count} does not '
    f'divide; give --mesh_{axis} {" or ".join(good)}{pad}'
  )
