"""Files on a disk or in a bucket, through TensorStore: one way for both."""

import os
from collections.abc import Iterable
from pathlib import Path

import tensorstore as ts

BUCKET = 'gs://'


def resolve(path: str | os.PathLike) -> str:
  """An absolute path or a bucket's address, without a slash at its end.

  Relative paths, `~` and links are resolved: TensorStore accepts none of them.
  """
  text = os.fspath(path)
  if text.startswith(BUCKET):
    return text.rstrip('/')
  return str(Path(text).expanduser().resolve())


def kvstore(path: str) -> dict[str, str]:
  """TensorStore's key-value store of the folder at a resolved path."""
  if path.startswith(BUCKET):
    bucket, _, prefix = path.removeprefix(BUCKET).partition('/')
    return {'driver': 'gcs', 'bucket': bucket, 'path': f'{prefix}/' if prefix else ''}
  return {'driver': 'file', 'path': f'{path}/'}


def read(path: str, start: int = 0, stop: int | None = None) -> bytes:
  """Bytes `[start, stop)` of the file at a resolved path.

  Raises:
    ValueError: there is no such file, it can not be read, or it is shorter.
  """
  folder, _, name = path.rpartition('/')
  try:
    result = _open(folder).read(name, byte_range=slice(start, stop)).result()
  except (ValueError, OSError) as error:
    raise ValueError(f'cannot read {path} ({_first_line(error)})') from error
  if result.state != 'value':
    raise ValueError(f'cannot read {path} (no such file); check the path')
  return result.value


def read_many(path: str, ranges: Iterable[tuple[int, int]]) -> list[bytes]:
  """Several `[start, stop)` of the file at a resolved path, at the same time.

  Raises:
    ValueError: as for `read`.
  """
  folder, _, name = path.rpartition('/')
  store = _open(folder)
  with ts.Batch() as batch:  # joins ranges that lie close together
    results = [
      store.read(name, byte_range=slice(*each), batch=batch) for each in ranges
    ]
  try:
    return [result.result().value for result in results]
  except (ValueError, OSError) as error:
    raise ValueError(f'cannot read {path} ({_first_line(error)})') from error


def exists(path: str) -> bool:
  """Whether a file, not a folder, is at a resolved path."""
  folder, _, name = path.rpartition('/')
  try:
    return _open(folder).read(name, byte_range=slice(0, 0)).result().state == 'value'
  except (ValueError, OSError):
    return False


def names(path: str) -> list[str]:
  """Names of the files and folders in a folder, sorted; none if it is not there."""
  keys = _open(path).list().result()
  return sorted({key.decode().partition('/')[0] for key in keys})


def _open(folder: str) -> ts.KvStore:
  return ts.KvStore.open(kvstore(folder)).result()


def _first_line(error: Exception) -> str:
  return str(error).partition('\n')[0]
