"""Any checkpoint of a T5: which format it has, and its weights."""

import importlib
import os
import re
from types import ModuleType

from specjax.checkpoints import files, hf, store
from specjax.checkpoints.leaves import Weights

SPECJAX_SUFFIX = '.safetensors'
_TARGET = 'target.safetensors'
_ORBAX = ('_CHECKPOINT_METADATA', '_METADATA', 'manifest.ocdbt')
STEP = re.compile(r'checkpoint_(\d+)')
LOOKED_FOR = (
  f'a *{SPECJAX_SUFFIX} file or a folder with {_TARGET} (specjax), a folder with '
  f'{hf.CONFIG} and {hf.SINGLE} or {hf.INDEX} (Hugging Face), with a file checkpoint '
  f'or folders checkpoint_N (T5X), or with {" or ".join(_ORBAX)} (Orbax)'
)


def open_weights(path: str | os.PathLike) -> Weights:
  """Opens a checkpoint of any format that this package reads.

  Args:
    path: a file or folder, local or `gs://`. Of a folder with several T5X
      checkpoints the newest that is complete; of a pair's folder, the target.

  Returns:
    The weights; nothing but names and shapes has been read.

  Raises:
    ValueError: there is none (the message says what was looked for), or it is
      damaged.
  """
  place = files.resolve(path)
  if files.exists(place):
    return _open_file(place)
  found = files.names(place)
  if not found:
    raise ValueError(
      f'weights: nothing is at {place}; give the path of a checkpoint: {LOOKED_FOR}'
    )
  if hf.CONFIG in found:
    return hf.open_weights(place)
  if _TARGET in found:
    return store.open_weights(f'{place}/{_TARGET}')
  if 'checkpoint' in found or any(map(STEP.fullmatch, found)):
    return _module('t5x').open_weights(place)
  if {*_ORBAX} & {*found}:
    return _module('orbax').open_weights(place)
  hint = (
    '; pytorch_model.bin must first be saved as safetensors: '
    'model.save_pretrained(folder)' * any('pytorch_model' in name for name in found)
  )
  raise ValueError(
    f'weights: {place} holds no checkpoint; looked for {LOOKED_FOR}{hint}'
  )


def _open_file(place: str) -> Weights:
  if not place.endswith(SPECJAX_SUFFIX):
    return _module('t5x').open_weights(place)
  folder, _, name = place.rpartition('/')
  if name == hf.SINGLE and files.exists(f'{folder}/{hf.CONFIG}'):
    return hf.open_weights(folder)
  return store.open_weights(place)


def _module(name: str) -> ModuleType:
  """A format's module; TensorStore's drivers and Orbax load when they are needed."""
  return importlib.import_module(f'specjax.checkpoints.{name}')
