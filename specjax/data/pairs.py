"""Files of examples: sources with their targets, and plain text.

  .tsv     source<TAB>target, one example a line
  .jsonl   {"source": ..., "target": ...} ('inputs', 'targets' are taken too)
  others   plain text, one document a line

Empty lines are passed over. UTF-8, with or without a byte-order mark, LF or CRLF;
`.gz` and `.xz` are unpacked.
"""

import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKED = ('.gz', '.xz')
KINDS = ('.tsv', '.jsonl')
_OPEN: dict[str, Any] = {'.gz': gzip.open, '.xz': lzma.open}
_NAMES = (('source', 'target'), ('inputs', 'targets'))


def kind(path: str | Path) -> str:
  """The suffix that says how a file is read, that of packing aside."""
  path = Path(path)
  return (path.with_suffix('') if path.suffix in PACKED else path).suffix


def read_pairs(path: str | Path) -> list[tuple[str, str]]:
  """All (source, target) texts of a file of `KINDS`.

  Raises:
    ValueError: the file is missing, damaged or empty, or a line is no example; the
      message names the file and the line.
  """
  parse = _parse_tsv if kind(path) == '.tsv' else _parse_json
  pairs = []
  for number, line in _lines(path):
    pair = parse(line)
    if isinstance(pair, str):
      raise ValueError(f'{path}, line {number}: {pair}')
    if not pair[0].strip():
      raise ValueError(f'{path}, line {number}: the source is empty; give it some text')
    pairs.append(pair)
  if not pairs:
    raise ValueError(f'{path} is empty; give one example a line')
  return pairs


def read_documents(path: str | Path) -> list[str]:
  """The documents of a text file, one a line.

  Raises:
    ValueError: the file is missing, damaged, or has no text.
  """
  documents = [line for _, line in _lines(path) if line.strip()]
  if not documents:
    raise ValueError(f'{path} is empty; give one document a line')
  return documents


def sha256(path: str | Path) -> str:
  """Hash of a file, to say what a model was trained on."""
  with Path(path).expanduser().open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _parse_tsv(line: str) -> tuple[str, str] | str:
  fields = line.split('\t')
  if len(fields) != 2:
    return (
      f'{len(fields) - 1} tabs; expected source<TAB>target, with no other tab in them'
    )
  return fields[0], fields[1]


def _parse_json(line: str) -> tuple[str, str] | str:
  try:
    found = json.loads(line)
  except ValueError as error:
    return f'no JSON ({error}); is the file complete?'
  for names in _NAMES:
    if isinstance(found, dict) and all(isinstance(found.get(n), str) for n in names):
      return found[names[0]], found[names[1]]
  return 'expected an object with the texts "source" and "target"'


def _lines(path: str | Path) -> Iterator[tuple[int, str]]:
  """Lines with their numbers; empty ones are passed over."""
  place = Path(path).expanduser()
  number = 0
  try:
    with _OPEN.get(place.suffix, open)(place, 'rb') as file:
      for number, data in enumerate(file, 1):
        line = data.rstrip(b'\r\n')
        if number == 1:
          line = line.removeprefix(b'\xef\xbb\xbf')
        if line:
          yield number, line.decode('utf-8')
  except UnicodeDecodeError as error:
    raise ValueError(
      f'{path}, line {number}: byte 0x{error.object[error.start]:02x} at column '
      f'{error.start + 1} is not UTF-8; save the file as UTF-8'
    ) from error
  except FileNotFoundError as error:
    raise ValueError(f'data: no file {path}; check the path') from error
  except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
    reason = getattr(error, 'strerror', None) or error
    raise ValueError(
      f'data: cannot read {path} beyond line {number} ({reason}); fetch or make the '
      'file again'
    ) from error
