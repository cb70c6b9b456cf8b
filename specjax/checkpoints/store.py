"""specjax's own weights: one safetensors file that says what it holds.

Tensors have T5X's parameter names joined by '/'; the header's metadata holds
the `T5Config` and free-form notes as JSON, and a hash of the tensors. Files are
written beside their place and renamed, so that a reader never sees half of one.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.traverse_util
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from specjax.checkpoints import files, tensors
from specjax.checkpoints.leaves import Weights, check_finite, check_shapes, read_whole
from specjax.models import t5

FORMAT = 'specjax.t5.1'
_DTYPES = {
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F32': np.dtype(np.float32),
}


class Checkpoint(NamedTuple):
  """A T5 read from a file.

  Attributes:
    config: the network's shape.
    params: nested dictionaries of NumPy arrays under T5X's names.
    notes: what `save` was given: how the weights came about.
  """

  config: t5.T5Config
  params: dict[str, Any]
  notes: dict[str, Any]


def save(
  path: str | Path,
  params: Mapping[str, Any],
  config: t5.T5Config,
  *,
  dtype: str = 'bfloat16',
  notes: Mapping[str, Any] | None = None,
) -> None:
  """Writes a T5 to one file, all of it or nothing.

  Args:
    path: the file to make or replace; its folder exists.
    params: nested dictionaries under T5X's names, as `config` asks for.
    config: the network's shape.
    dtype: 'bfloat16' (rounds to nearest even) or 'float32'.
    notes: anything JSON can hold.

  Raises:
    ValueError: `params` do not fit `config`, or the folder can not be written.
  """
  path = Path(path).expanduser()
  if dtype not in ('bfloat16', 'float32'):
    raise ValueError(f"dtype={dtype!r}: weights are 'bfloat16' or 'float32'")
  leaves = {
    name: np.asarray(leaf, np.float32).astype(jnp.dtype(dtype))
    for name, leaf in flax.traverse_util.flatten_dict(dict(params), sep='/').items()
  }
  _check_leaves(path, leaves, config)
  metadata = {
    'format': FORMAT,
    'config': json.dumps(config.to_dict()),
    'notes': json.dumps(dict(notes or {})),
    'sha256': digest(sorted(leaves.items())),
  }
  write_atomically(path, safetensors.numpy.save(leaves, metadata))


def load(path: str | Path, *, dtype: str = 'float32') -> Checkpoint:
  """Reads a T5 that `save` wrote and checks every tensor of it.

  Args:
    path: the file; relative, `~` and links are fine.
    dtype: of the returned arrays, 'float32' or 'bfloat16'.

  Returns:
    The `Checkpoint`.

  Raises:
    ValueError: no file, a damaged or cut file, a parameter missing, surplus, of
      another shape or not finite; one line names the file and the parameter.
  """
  path = Path(path).expanduser()
  try:
    data = path.read_bytes()
  except OSError as error:
    raise ValueError(
      f'weights: cannot read {path} ({error.strerror}); check the path'
    ) from error
  metadata, leaves = _parse(path, data)
  config, notes = _describe(path, metadata)
  _check_leaves(path, leaves, config)
  if digest(sorted(leaves.items())) != metadata.get('sha256'):
    raise ValueError(
      f'weights: the tensors of {path} are not those that were saved (hash '
      'differs); fetch or export the file again'
    )
  params = flax.traverse_util.unflatten_dict(
    {name: leaf.astype(jnp.dtype(dtype)) for name, leaf in leaves.items()}, sep='/'
  )
  return Checkpoint(config, params, notes)


def open_weights(path: str | os.PathLike) -> Weights:
  """Opens a file without reading its tensors (the hash is not compared).

  Args:
    path: local or `gs://`.

  Returns:
    The weights; blocks are read by byte ranges.

  Raises:
    ValueError: as for `load`, except for what only the values can tell.
  """
  place = files.resolve(path)
  leaves, metadata = tensors.open_file(place)
  _check_format(place, metadata)
  config, notes = _describe(place, metadata)
  check_shapes(place, {name: leaf.shape for name, leaf in leaves.items()}, config)
  return Weights(config, leaves, notes)


def write(path: str | Path, weights: Weights) -> None:
  """Writes weights tensor by tensor, each in its own dtype.

  Args:
    path: the file; one that was interrupted is continued, any other is replaced.
    weights: in float32 or bfloat16.

  Raises:
    ValueError: the file can not be written.
  """
  path = Path(path).expanduser()
  leaves = dict(sorted(weights.leaves.items()))
  metadata = {
    'format': FORMAT,
    'config': json.dumps(weights.config.to_dict()),
    'notes': json.dumps(dict(weights.notes)),
    'sha256': '0' * 64,
  }
  tensors.write_file(path, leaves, metadata)
  # The hash is known at the end, and has its place in the header.
  written, _ = tensors.open_file(str(path))
  metadata['sha256'] = digest(
    (name, read_whole(leaf)) for name, leaf in written.items()
  )
  tensors.write_header(path, leaves, metadata)


def write_atomically(path: Path, data: bytes) -> None:
  """Writes a file beside its place, then renames it.

  Raises:
    ValueError: the place can not be written.
  """
  temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
  try:
    temporary.write_bytes(data)
    os.replace(temporary, path)
  except OSError as error:
    temporary.unlink(missing_ok=True)
    raise ValueError(
      f'cannot write {path} ({error.strerror}); choose a folder that exists and is '
      'writable'
    ) from error


def _parse(path: Path, data: bytes) -> tuple[dict[str, str], dict[str, np.ndarray]]:
  """Splits a safetensors file into metadata and arrays (views of `data`)."""
  again = 'fetch or export the file again'
  try:
    # The library's check: header, offsets and size agree.
    tensors = safetensors.deserialize(data)
  except safetensors.SafetensorError as error:
    raise ValueError(f'weights: {path} is damaged or cut ({error}); {again}') from error
  header_size = int.from_bytes(data[:8], 'little')
  metadata = json.loads(data[8 : 8 + header_size]).get('__metadata__') or {}
  _check_format(path, metadata)
  leaves = {}
  for name, tensor in tensors:
    if tensor['dtype'] not in _DTYPES:
      raise ValueError(
        f'weights: {path}: {name} has dtype {tensor["dtype"]}, expected one of '
        f'{", ".join(_DTYPES)}; {again}'
      )
    array = np.frombuffer(tensor['data'], _DTYPES[tensor['dtype']])
    leaves[name] = array.reshape(tensor['shape'])
  return metadata, leaves


def _check_leaves(
  path: Path, leaves: Mapping[str, np.ndarray], config: t5.T5Config
) -> None:
  check_shapes(path, {name: leaf.shape for name, leaf in leaves.items()}, config)
  for name, leaf in leaves.items():
    check_finite(f'{path}: {name}', leaf)


def digest(leaves: Iterable[tuple[str, np.ndarray]]) -> str:
  """SHA-256 of parameters in the order of their names; hexadecimal."""
  found = hashlib.sha256()
  for name, leaf in leaves:
    found.update(name.encode())
    found.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
  return found.hexdigest()


def _check_format(path: str | Path, metadata: Mapping[str, str]) -> None:
  if metadata.get('format') != FORMAT:
    raise ValueError(
      f'weights: {path} is no {FORMAT} file (format {metadata.get("format")!r}); '
      'convert other checkpoints with specjax.checkpoints.convert first'
    )


def _describe(
  path: str | Path, metadata: Mapping[str, str]
) -> tuple[t5.T5Config, dict[str, Any]]:
  try:
    config = t5.T5Config.from_dict(json.loads(metadata['config']))
    return config, json.loads(metadata['notes'])
  except (KeyError, ValueError, TypeError) as error:
    raise ValueError(
      f'weights: {path} holds no valid configuration ({error}); fetch or export '
      'the file again'
    ) from error
