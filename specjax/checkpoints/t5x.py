"""T5X's native checkpoints, read and written without T5X.

A checkpoint is a folder, `checkpoint_<step>`: the file `checkpoint`, msgpack by
Flax, has `{version, optimizer: {state, target}}`, and each parameter in `target`
is either an array or a TensorStore specification of a Zarr folder beside the
file. The oldest layout is that file alone. Versions 1 and 2 store bfloat16 as
uint16, version 3 as itself; a file without a version is the `optimizer` alone.

Both of T5X's layouts of layers open, to unrolled names (see `layouts`).
"""

import os
import posixpath
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.serialization
import flax.traverse_util
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from specjax.checkpoints import arrays, files, inline, layouts
from specjax.checkpoints.leaves import Leaf, Weights, check_shapes, read_whole
from specjax.models import t5

VERSION = 3

_FILE = 'checkpoint'
_STEP = re.compile(r'checkpoint_(\d+)')
# What T5X's Orbax files of one folder per array hold for a parameter.
_PLACEHOLDER = 'PLACEHOLDER://'
_CHUNK_BYTES = 2**26


def open_weights(
  path: str | os.PathLike, *, config: t5.T5Config | None = None
) -> Weights:
  """Opens a T5X checkpoint; reads names and shapes, no weights.

  Args:
    path: `checkpoint_<step>`, a folder of such (the newest that is complete is
      taken), or the file `checkpoint` or another of the one-file layout. A local
      path (absolute, relative, `~`, a link) or `gs://...`.
    config: the network's shape, with which the file must agree; None infers it
      (see `layouts.infer_config` for what shapes can not tell).

  Returns:
    `Weights` under unrolled names. Notes: `path` (of the msgpack file), `version`,
    `step`, `layout` ('unrolled' or 'scanned') and `skipped`, newer folders that
    have no file `checkpoint`: T5X writes it last.

  Raises:
    ValueError: no T5X checkpoint, a cut or damaged file, an array without its
      metadata, an unknown version, or parameters that are not a T5's; one line
      that names the parameter.
  """
  file, skipped = _find(files.resolve(path))
  if files.read(file, 0, 1)[:1] == b'm':
    raise ValueError(
      f"weights: {file} is TensorFlow's; convert it with T5X's "
      'scripts/convert_tf_checkpoint first'
    )
  tree = inline.read_tree(file)
  if not isinstance(tree, dict):
    raise ValueError(f'weights: {file} is no T5X checkpoint; {arrays.AGAIN}')
  version = tree.get('version', 0)
  if version not in range(VERSION + 1):
    raise ValueError(
      f'weights: {file} has version {version!r}, known are 0 to {VERSION}; write it '
      "with T5X's native Checkpointer"
    )
  optimizer = tree.get('optimizer') if version else tree
  optimizer = optimizer if isinstance(optimizer, dict) else {}
  target = optimizer.get('target')
  if not isinstance(target, dict) or not target:
    raise ValueError(
      f'weights: {file} has no parameters (optimizer/target is empty); give a '
      "checkpoint of T5X's whose model is a T5"
    )
  leaves, layout = layouts.unroll(file, _open_leaves(file, target))
  shapes = {name: leaf.shape for name, leaf in leaves.items()}
  config = config or layouts.infer_config(shapes, file)
  check_shapes(file, shapes, config)
  step = (optimizer.get('state') or {}).get('step')
  if isinstance(step, inline.Span):
    step = inline.read_scalar(file, step)
  notes = {
    'path': file,
    'version': version,
    'step': step if isinstance(step, int) else None,
    'layout': layout,
    'skipped': skipped,
  }
  return Weights(config, leaves, notes)


def write(
  path: str | os.PathLike,
  weights: Weights,
  *,
  step: int = 0,
  dtype: str | None = None,
  continues: bool = False,
) -> None:
  """Writes a checkpoint that T5X's `Checkpointer` restores, all or nothing.

  Version 3, unrolled, without an optimizer's state: for evaluation, or for
  training that starts its optimizer anew. One leaf is in memory at a time.

  Args:
    path: the folder to make, as T5X names it `.../checkpoint_<step>`; its parent
      exists. A bucket can not rename, so there the file `checkpoint`, without
      which T5X and this package ignore the folder, comes last.
    weights: what to write.
    step: >= 0.
    dtype: 'float32', 'bfloat16' (rounds to nearest even), or None for the dtype
      of each leaf.
    continues: write at `path` itself, where an interrupted call may have left
      leaves: those that are equal are kept. The file `checkpoint` comes last.

  Raises:
    ValueError: the place is taken or can not be written, the weights do not fit
      their configuration, or a leaf can not be read.
  """
  place = files.resolve(path)
  if dtype not in (None, *t5.config.DTYPES):
    raise ValueError(f"dtype={dtype!r}: weights are 'float32' or 'bfloat16'")
  if step < 0:
    raise ValueError(f'step: {step}; give 0 or more')
  shapes = {name: leaf.shape for name, leaf in weights.leaves.items()}
  check_shapes(place, shapes, weights.config)
  if continues:
    _write_files(place, weights, step, dtype)
    return
  if files.exists(place) or files.names(place) or Path(place).exists():
    raise ValueError(f'weights: {place} exists; choose another place, or delete it')
  if place.startswith(files.BUCKET):
    try:
      _write_files(place, weights, step, dtype)
    except BaseException:
      store = ts.KvStore.open(files.kvstore(place)).result()
      store.delete_range(ts.KvStore.KeyRange()).result()
      raise
    return
  temporary = Path(f'{place}.tmp-{os.getpid()}')
  try:
    temporary.mkdir()
    _write_files(str(temporary), weights, step, dtype)
    temporary.rename(place)
  except OSError as error:
    raise ValueError(
      f'weights: cannot write {place} ({error.strerror}); choose a folder that '
      'exists and is writable'
    ) from error
  finally:
    shutil.rmtree(temporary, ignore_errors=True)


def _write_files(folder: str, weights: Weights, step: int, dtype: str | None) -> None:
  target = {}
  for name, leaf in weights.leaves.items():
    values = read_whole(leaf)
    if dtype is not None:
      values = values.astype(jnp.dtype(dtype))
    key = f'target/{name}'.replace('/', '.')
    spec = {
      'driver': 'zarr',
      'dtype': values.dtype.name,
      'metadata': {
        'chunks': _chunks(values),
        'compressor': {'id': 'gzip', 'level': 1},
        'shape': list(values.shape),
      },
    }
    place = {
      **spec,
      'kvstore': files.kvstore(f'{folder}/{key}'),
      # Zeros are written like other values: no file would mean a lost one.
      'store_data_equal_to_fill_value': True,
      'fill_missing_data_reads': False,
    }
    try:
      array = ts.open(place, create=True, open=True).result()
      if not _holds(array, values):
        array.write(values).result()
    except (ValueError, OSError) as error:
      reason = str(error).partition('\n')[0].partition(' [')[0]
      raise ValueError(f'weights: cannot write {name} ({reason})') from error
    # T5X joins the path with the folder that the file lies in.
    target[name] = {**spec, 'kvstore': {'driver': 'file', 'path': f'{key}/'}}
  tree = {
    'version': VERSION,
    'optimizer': {
      'state': {'step': np.int32(step)},
      'target': flax.traverse_util.unflatten_dict(target, sep='/'),
    },
  }
  store = ts.KvStore.open(files.kvstore(folder)).result()
  store.write(_FILE, flax.serialization.msgpack_serialize(tree)).result()


def _holds(array: ts.TensorStore, values: np.ndarray) -> bool:
  try:
    return np.array_equal(array.read().result(), values)
  except ValueError:  # a chunk is missing or damaged
    return False


def _chunks(values: np.ndarray) -> list[int]:
  """Halves the longest axis until a chunk has at most 64 MiB, as T5X's have."""
  chunks = list(values.shape)
  while int(np.prod(chunks, dtype=np.int64)) * values.itemsize > _CHUNK_BYTES:
    axis = int(np.argmax(chunks))
    chunks[axis] = -(-chunks[axis] // 2)
  return chunks


def _find(path: str) -> tuple[str, list[str]]:
  """The msgpack file, and names of newer folders that are not complete."""
  if files.exists(path):
    return path, []
  if files.exists(f'{path}/{_FILE}'):
    return f'{path}/{_FILE}', []
  found = [match for name in files.names(path) if (match := _STEP.fullmatch(name))]
  skipped: list[str] = []
  for match in sorted(found, key=lambda match: int(match[1]), reverse=True):
    for file in (f'{path}/{match[0]}/{_FILE}', f'{path}/{match[0]}'):
      if files.exists(file):
        return file, skipped
    skipped.append(match[0])
  incomplete = f' ({", ".join(skipped)}: incomplete)' if skipped else ''
  raise ValueError(
    f'weights: {path} holds no T5X checkpoint{incomplete}; give a folder '
    'checkpoint_<step> with a file checkpoint in it, or the folder of such'
  )


def _open_leaves(file: str, target: Mapping[str, Any]) -> dict[str, Leaf]:
  folder = posixpath.dirname(file)
  leaves: dict[str, Leaf] = {}
  stores = {}
  for keys, value in flax.traverse_util.flatten_dict(target, is_leaf=_is_spec).items():
    name = '/'.join(keys)
    if isinstance(value, inline.Span) and value.shape:
      leaves[name] = inline.span_leaf(file, name, value)
    elif isinstance(value, str) and value.startswith(_PLACEHOLDER):
      stores[name] = files.kvstore(f'{folder}/{value.removeprefix(_PLACEHOLDER)}')
    elif _is_spec(keys, value) and value['driver'] == 'zarr':
      stores[name] = files.kvstore(posixpath.join(folder, _spec_path(value)))
    else:
      raise ValueError(
        f'weights: {file}: {name} is neither an array nor a Zarr specification; '
        "write the checkpoint with T5X's native Checkpointer"
      )
  leaves.update(arrays.open_arrays(file, stores))
  return leaves


def _is_spec(_: Any, node: Any) -> bool:
  return (
    isinstance(node, dict)
    and 'driver' in node
    and isinstance(node.get('kvstore'), dict)
  )


def _spec_path(spec: Mapping[str, Any]) -> str:
  """Where an array lies; before TensorStore 0.1.14 beside the key-value store."""
  return str(spec['kvstore'].get('path') or spec.get('path') or '').rstrip('/')
