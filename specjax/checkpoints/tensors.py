"""Safetensors files by parts: read block by block, written tensor by tensor.

The format: eight bytes (little-endian) with the length of a JSON header, the header
(of each tensor its dtype, shape and place; under `__metadata__` strings), then the
tensors, row-major, without gaps.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from specjax.checkpoints import files
from specjax.checkpoints.leaves import Index, Leaf, check_finite, read_whole

DTYPES = {
  'F32': np.dtype(np.float32),
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F16': np.dtype(np.float16),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # the format's own limit
_AGAIN = 'fetch or export the file again'


def open_file(path: str) -> tuple[dict[str, Leaf], dict[str, str]]:
  """Reads the header of a safetensors file.

  Args:
    path: resolved (`files.resolve`).

  Returns:
    Every tensor as a leaf, by its name and in the file's order, and the metadata.

  Raises:
    ValueError: no file, a damaged or cut one, or a dtype that no T5 has.
  """
  size = int.from_bytes(_read_head(path, 0, 8), 'little')
  if size > _MAX_HEADER:
    raise ValueError(f'weights: {path} is no safetensors file, or damaged; {_AGAIN}')
  start = 8 + size
  try:
    header = json.loads(_read_head(path, 8, start))
    metadata = header.pop('__metadata__', None) or {}
    tensors = {}
    end = 0
    ordered = sorted(header.items(), key=lambda item: item[1]['data_offsets'])
    for name, entry in ordered:
      first, last = entry['data_offsets']
      if entry['dtype'] not in DTYPES:
        raise ValueError(
          f'{name} has dtype {entry["dtype"]}, expected one of {", ".join(DTYPES)}'
        )
      leaf = _leaf(path, start + first, tuple(entry['shape']), DTYPES[entry['dtype']])
      if first != end or last - first != leaf.nbytes:
        raise ValueError(f'the place of {name} does not fit its shape')
      tensors[name], end = leaf, last
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    reason = f'{type(error).__name__}: {error}'.removeprefix('ValueError: ')
    raise ValueError(f'weights: {path} is damaged ({reason}); {_AGAIN}') from error
  if tensors and not _has(path, start + end - 1):
    # A copy that was cut short: it is said what is missing.
    last = start - 1
    for name, leaf in tensors.items():
      last += leaf.nbytes
      if not _has(path, last):
        raise ValueError(
          f'weights: {path} is damaged or cut: it ends in {name}; {_AGAIN}'
        )
  return tensors, metadata


def write_file(
  path: Path, tensors: Mapping[str, Leaf], metadata: Mapping[str, str]
) -> None:
  """Writes a file tensor by tensor, or continues one that was interrupted.

  What is there already and equal to its leaf is not written again.

  Args:
    path: where; an unfinished file of the same header is continued, any other file
      is replaced.
    tensors: by name, in the order of the file.
    metadata: strings.

  Raises:
    ValueError: the file can not be written, or a leaf not read.
  """
  header = _header(tensors, metadata)
  try:
    continues = path.exists() and _starts_with(path, header)
    with path.open('r+b' if continues else 'w+b') as file:
      if not continues:
        file.write(header)
      position = len(header)
      for name, leaf in tensors.items():
        values = read_whole(leaf)
        check_finite(name, values)
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        file.seek(position)
        there = np.frombuffer(file.read(len(data)) if continues else b'', np.uint8)
        if not np.array_equal(there, data):
          file.seek(position)
          file.write(data.data)
        position += len(data)
      file.truncate(position)
      file.flush()
      os.fsync(file.fileno())
  except OSError as error:
    raise ValueError(
      f'cannot write {path} ({error.strerror}); choose a folder that is writable and '
      'has room'
    ) from error


def write_header(
  path: Path, tensors: Mapping[str, Leaf], metadata: Mapping[str, str]
) -> None:
  """Replaces a file's metadata with strings of the same lengths."""
  with path.open('r+b') as file:
    file.write(_header(tensors, metadata))


def cast(leaf: Leaf, dtype: np.dtype) -> Leaf:
  """The leaf in another dtype; rounds to nearest even."""
  if leaf.dtype == dtype:
    return leaf
  return Leaf(leaf.shape, dtype, lambda index: leaf.read(index).astype(dtype))


def transpose(leaf: Leaf) -> Leaf:
  """The leaf with its two axes exchanged."""
  return Leaf(leaf.shape[::-1], leaf.dtype, lambda index: leaf.read(index[::-1]).T)


def _header(tensors: Mapping[str, Leaf], metadata: Mapping[str, str]) -> bytes:
  header: dict = {'__metadata__': dict(metadata)}
  end = 0
  for name, leaf in tensors.items():
    start, end = end, end + leaf.nbytes
    header[name] = {
      'dtype': _NAMES[leaf.dtype],
      'shape': list(leaf.shape),
      'data_offsets': [start, end],
    }
  text = json.dumps(header, separators=(',', ':'), ensure_ascii=False).encode()
  text += b' ' * (-len(text) % 8)
  return len(text).to_bytes(8, 'little') + text


def _starts_with(path: Path, header: bytes) -> bool:
  with path.open('rb') as file:
    return file.read(len(header)) == header


def _read_head(path: str, start: int, stop: int) -> bytes:
  try:
    return files.read(path, start, stop)
  except ValueError as error:
    if not files.exists(path):
      raise
    raise ValueError(f'weights: {path} is damaged or cut; {_AGAIN}') from error


def _has(path: str, position: int) -> bool:
  try:
    files.read(path, position, position + 1)
  except ValueError:
    return False
  return True


def _leaf(path: str, start: int, shape: tuple[int, ...], dtype: np.dtype) -> Leaf:
  def read(index: Index) -> np.ndarray:
    return _read_block(path, start, shape, dtype, index)

  return Leaf(shape, dtype, read)


def _read_block(
  path: str, start: int, shape: tuple[int, ...], dtype: np.dtype, index: Index
) -> np.ndarray:
  """Reads the block's rows, or where it has part of their columns, those alone."""
  sizes = tuple(each.stop - each.start for each in index)
  row = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
  first, last = (index[0].start, index[0].stop) if index else (0, 1)
  if sizes[1:] == shape[1:]:
    data = files.read(path, start + first * row, start + last * row)
  else:
    columns = index[1]
    data = b''.join(
      files.read_many(
        path,
        [
          (
            start + number * row + columns.start * dtype.itemsize,
            start + number * row + columns.stop * dtype.itemsize,
          )
          for number in range(first, last)
        ],
      )
    )
  return np.frombuffer(data, dtype).reshape(sizes)
