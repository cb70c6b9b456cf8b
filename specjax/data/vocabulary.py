"""The vocabulary that belongs to a checkpoint: named, or found beside it."""

import json
import tempfile
from pathlib import Path
from typing import Any

from specjax.checkpoints import files, formats
from specjax.data import text
from specjax.data.text import Vocabulary

NAMES = ('vocab.model', 'spiece.model', 'sentencepiece.model')
BYTES = 'bytes'
_BYTES_TOKENIZER = 'ByT5Tokenizer'
_EXTRA_IDS = 100
_BYTES_EXTRA_IDS = 125


def find(place: str, given: str | Path | None = None) -> Vocabulary | None:
  """Reads a checkpoint's vocabulary.

  The number of sentinels is that of pair.json or of Hugging Face's
  tokenizer_config.json, else 100 (T5) or 125 (ByT5); a SentencePiece model that
  holds its sentinels itself (mT5) gets none beside them.

  Args:
    place: the checkpoint, resolved (`files.resolve`).
    given: a SentencePiece file or 'bytes'; None: what pair.json names, one of
      NAMES, or the bytes of ByT5, beside the checkpoint.

  Returns:
    The vocabulary; None if there is none.

  Raises:
    ValueError: it can not be read.
  """
  path = locate(place, given)
  if path is None:
    return None
  folder = folder_of(place)
  manifest = read_manifest(folder)
  tokenizer = _read_json(f'{folder}/tokenizer_config.json')
  extra_ids = manifest.get('extra_ids', tokenizer.get('extra_ids'))
  if path == BYTES:
    default = _EXTRA_IDS if manifest else _BYTES_EXTRA_IDS
    return text.byte_vocabulary(default if extra_ids is None else extra_ids)
  return _sentencepiece(path, _EXTRA_IDS if extra_ids is None else extra_ids)


def locate(place: str, given: str | Path | None = None) -> str | None:
  """The path of what `find` reads, or 'bytes'; None if there is none."""
  folder = folder_of(place)
  tokenizer = _read_json(f'{folder}/tokenizer_config.json')
  name = given or read_manifest(folder).get('vocabulary') or _beside(folder, tokenizer)
  if not name or str(name) == BYTES:
    return BYTES if name else None
  return files.resolve(name if given else f'{folder}/{name}')


def folder_of(place: str) -> str:
  """The folder in which a checkpoint's vocabulary lies.

  A file's is its folder; that of T5X's checkpoint_N is the one of all steps.
  """
  folder, _, name = place.rpartition('/')
  if files.exists(place):
    return folder
  is_step = formats.STEP.fullmatch(name)
  return folder if is_step and not _beside(place, {}) else place


def read_manifest(folder: str) -> dict[str, Any]:
  """What a pair's folder says of itself in pair.json; empty without one.

  Raises:
    ValueError: the file is no JSON object.
  """
  return _read_json(f'{folder}/pair.json')


def _beside(folder: str, tokenizer: dict[str, Any]) -> str | None:
  for name in NAMES:
    if files.exists(f'{folder}/{name}'):
      return name
  classes = (
    tokenizer.get('tokenizer_class'),
    _read_json(f'{folder}/config.json').get('tokenizer_class'),
  )
  return BYTES if _BYTES_TOKENIZER in classes else None


def _sentencepiece(path: str, extra_ids: int) -> Vocabulary:
  if path.startswith(files.BUCKET):
    # SentencePiece reads a file of the disk.
    with tempfile.TemporaryDirectory() as folder:
      copy = Path(folder) / path.rpartition('/')[2]
      copy.write_bytes(files.read(path))
      return _sentencepiece(str(copy), extra_ids)
  bare = text.sentencepiece_vocabulary(path, 0)
  last = range(max(0, bare.size - 4 * _EXTRA_IDS), bare.size)
  if any('extra_id_' in bare.piece(token) for token in last):
    return bare
  return text.sentencepiece_vocabulary(path, extra_ids)


def _read_json(path: str) -> dict[str, Any]:
  """An object; empty without the file."""
  if not files.exists(path):
    return {}
  try:
    found = json.loads(files.read(path))
  except ValueError as error:
    raise ValueError(f'model: {path} is not valid JSON ({error})') from error
  if not isinstance(found, dict):
    raise ValueError(f'model: {path} is not valid JSON (no object)')
  return found
