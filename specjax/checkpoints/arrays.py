"""Zarr arrays as leaves: what T5X and Orbax write, read block by block."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from specjax.checkpoints.leaves import Index, Leaf

AGAIN = 'copy the checkpoint again, all of its files'
DTYPES = ('float32', 'bfloat16', 'float16', 'float64')

# Decoded chunks that are kept for the next block: neighbouring shards and the
# layers of a stack lie in the same chunks. T5X's chunks have up to 64 MiB.
_CACHE_BYTES = 2**28


def open_arrays(where: str, stores: Mapping[str, dict[str, Any]]) -> dict[str, Leaf]:
  """Opens arrays, all at once: from a bucket each takes a round trip.

  Args:
    where: the checkpoint, for messages.
    stores: TensorStore's key-value store of each array, by the parameter's name.

  Returns:
    Leaves by name. Reading one whose chunk is missing or damaged raises
    ValueError that names the parameter.

  Raises:
    ValueError: an array has no `.zarray`, a damaged one, or holds no floats.
  """
  context = ts.Context({'cache_pool': {'total_bytes_limit': _CACHE_BYTES}})

  def start(name: str, store: dict[str, Any]) -> ts.Future:
    # A missing chunk is an error, not zeros.
    spec = {'driver': 'zarr', 'kvstore': store, 'fill_missing_data_reads': False}
    try:
      return ts.open(spec, context=context, open=True, read=True)
    except ValueError as error:
      raise _unreadable(where, name, error) from error

  futures = {name: start(name, store) for name, store in stores.items()}
  return {name: _leaf(where, name, future) for name, future in futures.items()}


def float_dtype(where: str, name: str, stored: str) -> np.dtype:
  """The dtype that values of a parameter have; old files call bfloat16 uint16."""
  dtype = 'bfloat16' if stored == 'uint16' else stored
  if dtype not in DTYPES:
    raise ValueError(
      f'weights: {where}: {name} has dtype {stored}, expected one of '
      f'{", ".join(DTYPES)}; export the weights as float32'
    )
  return jnp.dtype(dtype)


def _leaf(where: str, name: str, future: ts.Future) -> Leaf:
  try:
    array = future.result()
  except (ValueError, OSError) as error:
    raise _unreadable(where, name, error) from error
  dtype = float_dtype(where, name, array.dtype.name)

  def read(index: Index) -> np.ndarray:
    try:
      return array[index].read().result().view(dtype)
    except (ValueError, OSError) as error:
      raise _unreadable(where, name, error) from error

  return Leaf(tuple(array.shape), dtype, read)


def _unreadable(where: str, name: str, error: Exception) -> ValueError:
  reason = str(error).partition('\n')[0].partition(' [')[0]
  return ValueError(f'weights: {where}: cannot read {name} ({reason}); {AGAIN}')
