"""Flax's msgpack files: nested names, with arrays that stay in the file.

A file of the old layout holds all of a model, its optimizer included. Only where
each array begins is kept, so that a block of one reads little more than itself.
"""

import io
import math
from typing import Any, BinaryIO, NamedTuple

import msgpack
import numpy as np

from specjax.checkpoints import files
from specjax.checkpoints.arrays import AGAIN, float_dtype
from specjax.checkpoints.leaves import Index, Leaf

# Flax's extension types of arrays and of NumPy's scalars, and its mark of arrays
# over 1 GiB, which it cuts.
_ARRAYS = (1, 3)
_CUT = '__msgpack_chunked_array__'


class Span(NamedTuple):
  """Where the values of an array are in the file.

  Attributes:
    shape: of the array.
    dtype: its name.
    pieces: (offset, size) in bytes, in the order of the values.
  """

  shape: tuple[int, ...]
  dtype: str
  pieces: tuple[tuple[int, int], ...]


def read_tree(path: str) -> Any:
  """Reads a msgpack file that Flax wrote, all but the arrays.

  Args:
    path: resolved, of the file.

  Returns:
    Nested dictionaries; arrays and NumPy's scalars are `Span`s.

  Raises:
    ValueError: the file is missing, cut or no msgpack; the message names the
      entry at which reading ended.
  """
  if path.startswith(files.BUCKET):
    return _scan(path, io.BytesIO(files.read(path)))
  try:
    with open(path, 'rb') as stream:
      return _scan(path, stream)
  except OSError as error:
    raise ValueError(f'weights: cannot read {path} ({error.strerror})') from error


def span_leaf(path: str, name: str, span: Span) -> Leaf:
  """The leaf of an array in a msgpack file.

  Args:
    path: resolved, of the file.
    name: of the parameter, for messages.
    span: where it is; at least one axis.

  Raises:
    ValueError: it holds no floats.
  """
  dtype = float_dtype(path, name, span.dtype)
  row_bytes = math.prod(span.shape[1:]) * dtype.itemsize

  def read(index: Index) -> np.ndarray:
    rows, *rest = index
    data = _read_bytes(path, span, rows.start * row_bytes, rows.stop * row_bytes)
    block = np.frombuffer(data, dtype).reshape(-1, *span.shape[1:])
    return block[(slice(None), *rest)]

  return Leaf(span.shape, dtype, read)


def read_scalar(path: str, span: Span) -> int | float:
  """Reads a number, e.g. the step."""
  data = _read_bytes(path, span, 0, np.dtype(span.dtype).itemsize)
  return np.frombuffer(data, span.dtype)[0].item()


def _read_bytes(path: str, span: Span, start: int, stop: int) -> bytes:
  parts = []
  begin = 0
  for offset, size in span.pieces:
    first, last = max(start - begin, 0), min(stop - begin, size)
    if first < last:
      parts.append(files.read(path, offset + first, offset + last))
    begin += size
  return b''.join(parts)


def _scan(path: str, stream: BinaryIO) -> Any:
  unpacker = msgpack.Unpacker(
    stream, read_size=2**20, max_buffer_size=0, strict_map_key=False
  )

  def visit(name: str) -> Any:
    try:
      size = unpacker.read_map_header()
    except msgpack.FormatError:
      raise
    except ValueError:  # Not a map.
      value = unpacker.unpack()
      if isinstance(value, msgpack.ExtType) and value.code in _ARRAYS:
        return _span(value.data, unpacker.tell())
      return value
    node: dict[str, Any] = {}
    for _ in range(size):
      key = unpacker.unpack()
      reached.append(f'{name}/{key}' if name else str(key))
      node[key] = visit(reached[-1])
    return _join(node) if _CUT in node else node

  reached = ['its beginning']
  try:
    return visit('')
  except (ValueError, TypeError, msgpack.UnpackException, msgpack.OutOfData) as error:
    raise ValueError(
      f'weights: {path} is damaged or cut at {reached[-1]}; {AGAIN}'
    ) from error


def _span(data: bytes, stop: int) -> Span:
  """Reads the head of a packed (shape, dtype, values); the values come last."""
  head = msgpack.Unpacker()
  head.feed(data[:1024])
  head.read_array_header()
  shape, dtype = tuple(head.unpack()), head.unpack()
  size = math.prod(shape) * np.dtype(dtype).itemsize
  return Span(shape, dtype, ((stop - size, size),))


def _join(node: dict[str, Any]) -> Span:
  """The pieces of an array that Flax cut, as one."""
  shape, pieces = node['shape'], node['chunks']
  in_order = [pieces[str(number)] for number in range(len(pieces))]
  return Span(
    tuple(shape[str(axis)] for axis in range(len(shape))),
    in_order[0].dtype,
    tuple(piece for span in in_order for piece in span.pieces),
  )
