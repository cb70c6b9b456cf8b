"""Weights that are read when they are asked for: leaf by leaf, shard by shard.

Every format of this package opens to the same `Weights`: T5X's names, unrolled
layers, and for each leaf a function that reads any block of it. `restore` then
puts each device's block on it, so that a host never holds more than one leaf's
blocks beside what its devices hold.
"""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import t5

Index = tuple[slice, ...]


class Leaf(NamedTuple):
  """One parameter in a file.

  Attributes:
    shape: of the whole, as the network declares it.
    dtype: as it is stored.
    read: `(index) -> array`; index has one slice of step 1 per axis, and the result
      is that block in the stored dtype. Reads little more than the block.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[Index], np.ndarray]

  @property
  def nbytes(self) -> int:
    return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Weights(NamedTuple):
  """A T5 in a file or folder; nothing but names and shapes has been read.

  Attributes:
    config: the network's shape.
    leaves: by T5X's names joined by '/', one leaf per layer.
    notes: what the file says of itself, as JSON types.
  """

  config: t5.T5Config
  leaves: Mapping[str, Leaf]
  notes: Mapping[str, Any]


def array_leaf(array: np.ndarray) -> Leaf:
  """A leaf that is in memory."""
  return Leaf(array.shape, array.dtype, lambda index: array[index])


def read_whole(leaf: Leaf) -> np.ndarray:
  """All of a leaf, in the stored dtype."""
  return leaf.read(tuple(slice(0, size) for size in leaf.shape))


@functools.cache
def expected_shapes(config: t5.T5Config) -> Mapping[str, tuple[int, ...]]:
  """Parameter names joined by '/' and their shapes; computes nothing, once."""
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  variables = jax.eval_shape(
    t5.Transformer(config).init, jax.random.key(0), tokens, tokens
  )
  leaves = flax.traverse_util.flatten_dict(variables['params'], sep='/')
  return types.MappingProxyType(
    {name: tuple(leaf.shape) for name, leaf in leaves.items()}
  )


def check_shapes(
  where: Any, shapes: Mapping[str, tuple[int, ...]], config: t5.T5Config
) -> None:
  """Compares what a file holds with what its network declares.

  Args:
    where: the file, for messages.
    shapes: of every leaf, by T5X's name.
    config: the network's shape.

  Raises:
    ValueError: a parameter is missing, surplus, or of another shape.
  """
  expected = expected_shapes(config)
  remedy = 'the weights and their configuration do not belong together'
  for name, shape in expected.items():
    if name not in shapes:
      raise ValueError(f'weights: {where} lacks {name} {shape}; {remedy}')
    if tuple(shapes[name]) != shape:
      raise ValueError(
        f'weights: {where}: {name} has shape {tuple(shapes[name])}, expected {shape}; '
        f'{remedy}'
      )
  for name in shapes:
    if name not in expected:
      raise ValueError(f'weights: {where} has a surplus tensor {name}; {remedy}')


def restore(
  weights: Weights,
  *,
  dtype: str = 'float32',
  shardings: Mapping[str, jax.sharding.Sharding] | None = None,
) -> dict[str, Any]:
  """Reads parameters onto devices, each device's block straight onto it.

  Args:
    weights: what a format's `open_weights` returned.
    dtype: of the parameters, 'float32' or 'bfloat16'.
    shardings: one per leaf, by name; None puts all on the default device.

  Returns:
    Nested dictionaries of `jax.Array`s under T5X's names.

  Raises:
    ValueError: a value is not finite, or a block can not be read; the message
      names the parameter.
  """
  default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  params = {
    name: jax.make_array_from_callback(
      leaf.shape,
      default if shardings is None else shardings[name],
      functools.partial(_read_block, name, leaf, jnp.dtype(dtype)),
    )
    for name, leaf in weights.leaves.items()
  }
  return flax.traverse_util.unflatten_dict(params, sep='/')


def _read_block(name: str, leaf: Leaf, dtype: np.dtype, index: Any) -> np.ndarray:
  bounds = tuple(
    slice(*each.indices(size)[:2]) for each, size in zip(index, leaf.shape, strict=True)
  )
  values = leaf.read(bounds)
  check_finite(name, values)
  return values.astype(dtype)


def check_finite(name: str, values: np.ndarray) -> None:
  """Raises ValueError that names the parameter if a value is inf or NaN."""
  # NumPy has no isfinite for bfloat16 without a copy; a sum shows either.
  if not np.isfinite(np.sum(values, dtype=np.float64)):
    raise ValueError(
      f'weights: {name} has values that are not finite; train or export the weights '
      'again'
    )
