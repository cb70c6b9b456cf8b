"""Text in, ids out: source files, vocabularies, padding and length buckets.

Ids follow seqio: 0 pads (and starts the decoder), 1 ends a text, the extra ids
(sentinels) come after the vocabulary's own. Every source ends with EOS.
"""

import bisect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import sentencepiece

PAD_ID = 0
EOS_ID = 1
UNK_ID = 2
BYTE_OFFSET = 3

Ids = Sequence[int] | np.ndarray

# Few shapes, so that new text seldom compiles anything.
LENGTH_BUCKETS = (16, 32, 64, 128, 256, 512)


class Vocabulary(NamedTuple):
  """A reversible map between text and ids.

  Attributes:
    size: number of ids, extra ids included; the embedding may be wider (padded
      for the hardware), and ids `>= size` mean nothing.
    encode: `text -> ids` with EOS at the end.
    decode: `ids -> text`; stops at the first EOS, skips pads, never raises:
      sentinels appear as `<extra_id_n>` and ids outside the vocabulary as `⁇`.
    piece: `id -> str`, what one id looks like; `▁` stands for a space.
    eos_id: the id that ends a text.
  """

  size: int
  encode: Callable[[str], list[int]]
  decode: Callable[[Ids], str]
  piece: Callable[[int], str]
  eos_id: int = EOS_ID


def sentencepiece_vocabulary(path: str | Path, extra_ids: int = 100) -> Vocabulary:
  """A SentencePiece model with seqio's sentinels appended.

  Args:
    path: a `.model` file whose pad, EOS and unknown ids are 0, 1 and 2, as T5's.
    extra_ids: number of sentinels; `<extra_id_0>` has the last id (seqio).

  Returns:
    The vocabulary; `size = pieces + extra_ids`.

  Raises:
    ValueError: the file is missing, damaged, or has other special ids.
  """
  path = Path(path).expanduser()
  if not path.is_file():
    raise ValueError(f'vocabulary: no file {path}; give the path of a .model file')
  try:
    model = path.read_bytes()
    num_pieces = sentencepiece.SentencePieceProcessor(model_proto=model).vocab_size()
    pieces = sentencepiece.SentencePieceProcessor(
      model_proto=model + _sentinel_pieces(extra_ids)
    )
  except (RuntimeError, OSError) as error:
    raise ValueError(
      f'vocabulary: {path} is not a SentencePiece model; fetch the file again'
    ) from error
  special = (pieces.pad_id(), pieces.eos_id(), pieces.unk_id())
  if special != (PAD_ID, EOS_ID, UNK_ID):
    raise ValueError(
      f'vocabulary: {path} has pad, EOS and unknown ids {special}; specjax needs '
      f'{(PAD_ID, EOS_ID, UNK_ID)}, as in the T5 vocabularies'
    )
  size = num_pieces + extra_ids

  def piece(token: int) -> str:
    if 0 <= token < num_pieces:
      return pieces.id_to_piece(int(token))
    if token < size and token >= 0:
      return f'<extra_id_{size - 1 - token}>'
    return '⁇'

  def encode(text: str) -> list[int]:
    return [*pieces.encode(text), EOS_ID]

  def decode(ids: Ids) -> str:
    known = [token if 0 <= token < size else UNK_ID for token in _content(ids)]
    return pieces.decode(known)

  return Vocabulary(size, encode, decode, piece)


def _sentinel_pieces(extra_ids: int) -> bytes:
  """What makes a SentencePiece model know seqio's sentinels, `▁<extra_id_n>`.

  Bytes after a protocol buffer add to its repeated fields. Field 1 of a model is
  its list of pieces, whose fields are 1: text, 2: score and 3: type, of which 4 is
  "user defined". All lengths are below 128, one byte each.
  """
  model = b''
  for n in reversed(range(extra_ids)):
    name = f'▁<extra_id_{n}>'.encode()
    piece = b'\x0a' + bytes([len(name)]) + name + b'\x15' + bytes(4) + b'\x18\x04'
    model += b'\x0a' + bytes([len(piece)]) + piece
  return model


def byte_vocabulary(extra_ids: int = 125) -> Vocabulary:
  """ByT5's vocabulary: id = byte of the UTF-8 text + 3, then the sentinels.

  Args:
    extra_ids: number of sentinels; ByT5 has 125, which makes 384 ids.

  Returns:
    The vocabulary. Bytes that are not UTF-8 decode to U+FFFD.
  """
  num_bytes = BYTE_OFFSET + 256
  size = num_bytes + extra_ids

  def piece(token: int) -> str:
    if BYTE_OFFSET <= token < num_bytes:
      byte = token - BYTE_OFFSET
      return (
        '▁' if byte == 0x20 else chr(byte) if 0x20 < byte < 0x7F else f'<{byte:02X}>'
      )
    if num_bytes <= token < size:
      return f'<extra_id_{size - 1 - token}>'
    return {PAD_ID: '<pad>', EOS_ID: '</s>'}.get(token, '⁇')

  def encode(text: str) -> list[int]:
    return [byte + BYTE_OFFSET for byte in text.encode('utf-8')] + [EOS_ID]

  def decode(ids: Ids) -> str:
    data = bytearray()
    for token in _content(ids):
      if BYTE_OFFSET <= token < num_bytes:
        data.append(token - BYTE_OFFSET)
      else:
        data += piece(token).encode('utf-8')
    return data.decode('utf-8', errors='replace')

  return Vocabulary(size, encode, decode, piece)


def read_lines(path: str | Path) -> list[str]:
  """The texts of a file, one a line; `-` reads standard input.

  Args:
    path: UTF-8, with or without a byte-order mark, LF or CRLF line ends.

  Returns:
    The lines without their ends, in order; blank lines at the end are no texts.

  Raises:
    ValueError: the file is missing or unreadable, has no text, a line before the last
      text is empty, or a line is not UTF-8; the message names the file and the line.
  """
  if str(path) == '-':
    return list(_decode_lines(sys.stdin.buffer, 'standard input'))
  path = Path(path).expanduser()
  try:
    with path.open('rb') as file:
      return list(_decode_lines(file, str(path)))
  except FileNotFoundError as error:
    raise ValueError(f'input: no file {path}; check the path') from error
  except OSError as error:
    raise ValueError(f'input: cannot read {path}: {error.strerror}') from error


def encode_sources(
  vocabulary: Vocabulary,
  texts: Sequence[str],
  max_length: int,
  *,
  truncate: bool = False,
) -> list[list[int]]:
  """Encodes sources and keeps them within the model's length.

  Args:
    vocabulary: the pair's vocabulary.
    texts: the sources, prefix included.
    max_length: largest number of ids a source may have, EOS counted; >= 1.
    truncate: cut longer sources (EOS is kept) rather than refuse them.

  Returns:
    One list of ids per text, each ending with EOS.

  Raises:
    ValueError: a text is empty or blank, or longer than `max_length`.
  """
  sources = []
  for number, text in enumerate(texts, 1):
    if not text.strip():
      raise ValueError(f'source {number} is empty; give it some text')
    ids = vocabulary.encode(text)
    if len(ids) > max_length:
      if not truncate:
        raise ValueError(
          f'source {number} has {len(ids)} tokens, the limit is {max_length}; '
          'shorten it or pass --truncate to cut it'
        )
      ids = [*ids[: max_length - 1], vocabulary.eos_id]
    sources.append(ids)
  return sources


def bucket_length(length: int, buckets: Sequence[int] = LENGTH_BUCKETS) -> int:
  """The smallest bucket that holds `length`; beyond the last, its multiples."""
  position = bisect.bisect_left(buckets, length)
  if position < len(buckets):
    return buckets[position]
  return -(-length // buckets[-1]) * buckets[-1]


def pad(rows: Sequence[Ids], length: int, num_rows: int | None = None):
  """Stacks rows of ids into an array filled up with pads.

  Args:
    rows: lists of at most `length` ids.
    length: number of columns.
    num_rows: number of rows of the result; default `len(rows)`. The surplus
      rows are all pads.

  Returns:
    int32 [num_rows, length].
  """
  num_rows = len(rows) if num_rows is None else num_rows
  array = np.full((num_rows, length), PAD_ID, np.int32)
  for i, row in enumerate(rows):
    array[i, : len(row)] = row
  return array


def group_by_length(
  lengths: Sequence[int],
  batch_size: int,
  buckets: Sequence[int] = LENGTH_BUCKETS,
) -> list[tuple[int, list[int]]]:
  """Groups rows of similar length, so that little padding is computed.

  Args:
    lengths: number of ids of each row.
    batch_size: largest number of rows in a group; >= 1.
    buckets: increasing lengths that rows are padded to.

  Returns:
    `(padded length, row numbers)` per group, shortest bucket first; rows keep
    their order within a bucket, and each row is in exactly one group.
  """
  members: dict[int, list[int]] = {}
  for row, length in enumerate(lengths):
    members.setdefault(bucket_length(length, buckets), []).append(row)
  return [
    (padded, rows[i : i + batch_size])
    for padded, rows in sorted(members.items())
    for i in range(0, len(rows), batch_size)
  ]


def _content(ids: Ids) -> Iterator[int]:
  """The ids before the first EOS, without pads; what is outside becomes -1."""
  for token in ids:
    token = int(token)
    if token == EOS_ID:
      return
    if token != PAD_ID:
      yield token


def _decode_lines(file: BinaryIO, name: str) -> Iterator[str]:
  num_texts, blank = 0, None
  for number, line in enumerate(file, 1):
    line = line.rstrip(b'\r\n')
    if number == 1:
      line = line.removeprefix(b'\xef\xbb\xbf')
    try:
      text = line.decode('utf-8')
    except UnicodeDecodeError as error:
      raise ValueError(
        f'{name}, line {number}: byte 0x{line[error.start]:02x} at column '
        f'{error.start + 1} is not UTF-8; save the file as UTF-8'
      ) from error
    if not text.strip():
      blank = blank or number
      continue
    if blank:
      raise ValueError(f'{name}, line {blank} is empty; remove the line or fill it')
    num_texts += 1
    yield text
  if num_texts == 0:
    raise ValueError(f'{name} is empty; give one source a line')
