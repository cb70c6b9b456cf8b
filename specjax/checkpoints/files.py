"""Files on a disk or in a bucket, through TensorStore: one way for both."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tensorstore as ts

BUCKET = 'gs://'
# TensorStore's own 32 would be silent for a quarter of an hour without a network.
_RETRIES = {'max_retries': 5, 'initial_delay': '500ms', 'max_delay': '8s'}


def resolve(path: str | os.PathLike) -> str:
  """An absolute path or a bucket's address, without a slash at its end.

  Relative paths, `~` and links are resolved: TensorStore accepts none of them.
  """
  text = os.fspath(path)
  if text.startswith(BUCKET):
    return text.rstrip('/')
  return str(Path(text).expanduser().resolve())


def kvstore(path: str) -> dict[str, Any]:
  """TensorStore's key-value store of the folder at a resolved path."""
  if path.startswith(BUCKET):
    bucket, _, prefix = path.removeprefix(BUCKET).partition('/')
    return {
      'driver': 'gcs',
      'bucket': bucket,
      'path': f'{prefix}/' if prefix else '',
      'gcs_request_retries': _RETRIES,
    }
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
    raise _unreadable(path, error) from error
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
    raise _unreadable(path, error) from error


def exists(path: str) -> bool:
  """Whether a file, not a folder, is at a resolved path.

  Raises:
    ValueError: a bucket that can not be read.
  """
  folder, _, name = path.rpartition('/')
  try:
    return _open(folder).read(name, byte_range=slice(0, 0)).result().state == 'value'
  except (ValueError, OSError) as error:
    if path.startswith(BUCKET):
      raise _unreadable(path, error) from error
    return False


def names(path: str) -> list[str]:
  """Names of the files and folders in a folder, sorted; none if it is not there.

  Raises:
    ValueError: a bucket that can not be read.
  """
  try:
    keys = _open(path).list().result()
  except (ValueError, OSError) as error:
    raise _unreadable(path, error) from error
  return sorted({key.decode().partition('/')[0] for key in keys})


def _open(folder: str) -> ts.KvStore:
  return ts.KvStore.open(kvstore(folder)).result()


def _unreadable(path: str, error: Exception) -> ValueError:
  reason = str(error).partition('\n')[0]
  remedy = '; check the address, the network and your access'
  return ValueError(f'cannot read {path} ({reason})' + remedy * path.startswith(BUCKET))
