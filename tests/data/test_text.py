"""Files, vocabularies, padding and buckets."""

import io

import numpy as np
import pytest

from specjax.data import corpus, text

VOCABULARY = corpus.CORPUS_PATH.with_name('vocab.model')


@pytest.fixture(scope='module')
def pieces():
  return text.sentencepiece_vocabulary(VOCABULARY)


def test_read_lines_strips_line_ends_and_byte_order_mark(tmp_path):
  path = tmp_path / 'in put.txt'
  path.write_bytes('\ufefferste Zeile\r\n  zweite\nlast, no end'.encode())
  assert text.read_lines(path) == ['erste Zeile', '  zweite', 'last, no end']


def test_read_lines_reads_standard_input(monkeypatch):
  stdin = io.TextIOWrapper(io.BytesIO('für\n'.encode()))
  monkeypatch.setattr('sys.stdin', stdin)
  assert text.read_lines('-') == ['für']


@pytest.mark.parametrize(
  ('data', 'message'),
  [
    (b'good\nbad \xff byte\n', 'line 2: byte 0xff at column 5 is not UTF-8'),
    (b'cut \xe2\x82', 'line 1: byte 0xe2 at column 5 is not UTF-8'),
    (b'one\n\nthree\n', 'line 2 is empty'),
    (b'\none\n', 'line 1 is empty'),
    (b'one\n \n\nfour', 'line 2 is empty'),
    (b' \n\n', 'is empty; give one source a line'),
    (b'', 'is empty; give one source a line'),
  ],
)
def test_read_lines_names_file_and_line(tmp_path, data, message):
  path = tmp_path / 'sources.txt'
  path.write_bytes(data)
  with pytest.raises(ValueError, match=message) as error:
    text.read_lines(path)
  assert str(path) in str(error.value)
  assert '\n' not in str(error.value)


def test_read_lines_missing_file_and_folder(tmp_path):
  with pytest.raises(ValueError, match=r'no file .*absent\.txt'):
    text.read_lines(tmp_path / 'absent.txt')
  with pytest.raises(ValueError, match='cannot read'):
    text.read_lines(tmp_path)


@pytest.mark.parametrize(
  'line', ['Öffnet den Dialog "Seite".', '=SUM(A1;B2) 5 % – 日本', 'a  b   c', 'x']
)
def test_pieces_round_trip(pieces, line):
  ids = pieces.encode(line)
  assert ids[-1] == text.EOS_ID
  assert all(0 < token < pieces.size for token in ids)
  assert pieces.decode(ids) == ' '.join(line.split())
  assert pieces.decode([0, *ids, 0, 17, 18]) == pieces.decode(ids)


def test_pieces_and_sentinels(pieces):
  assert pieces.size == 4096 + 100
  assert pieces.piece(pieces.size - 1) == '<extra_id_0>'
  assert pieces.piece(4096) == '<extra_id_99>'
  assert pieces.piece(pieces.encode('Datei')[0]).startswith('▁')
  ids = [*pieces.encode('one')[:-1], 4195, *pieces.encode('two')]
  assert pieces.decode(ids) == 'one <extra_id_0> two'


def test_decode_never_raises(pieces):
  wild = [4300, 4223, 3, 5, -1, 2, 4196]
  assert '⁇' in pieces.decode(wild)
  assert text.byte_vocabulary().decode([400, 383, 3 + 0xC3]) == '⁇<extra_id_0>\ufffd'
  assert pieces.decode([]) == text.byte_vocabulary().decode([1, 70]) == ''


def test_bytes_are_byt5s():
  vocabulary = text.byte_vocabulary()
  assert vocabulary.size == 384
  ids = vocabulary.encode('aß ')
  assert ids == [97 + 3, 0xC3 + 3, 0x9F + 3, 0x20 + 3, 1]
  assert vocabulary.decode(ids) == 'aß '
  assert [vocabulary.piece(token) for token in ids] == [
    'a',
    '<C3>',
    '<9F>',
    '▁',
    '</s>',
  ]


def test_vocabulary_errors(tmp_path):
  with pytest.raises(ValueError, match='no file'):
    text.sentencepiece_vocabulary(tmp_path / 'absent.model')
  damaged = tmp_path / 'damaged.model'
  damaged.write_bytes(VOCABULARY.read_bytes()[:999])
  with pytest.raises(ValueError, match='not a SentencePiece model'):
    text.sentencepiece_vocabulary(damaged)


def test_encode_sources_refuses_or_truncates(pieces):
  long = 'Das ist ein recht langer Satz mit vielen Wörtern.'
  length = len(pieces.encode(long))
  assert text.encode_sources(pieces, [long], length) == [pieces.encode(long)]
  with pytest.raises(ValueError, match=f'source 2 has {length} tokens, the limit is 8'):
    text.encode_sources(pieces, ['x', long], 8)
  (cut,) = text.encode_sources(pieces, [long], 8, truncate=True)
  assert cut == [*pieces.encode(long)[:7], text.EOS_ID]
  for blank in ('', ' \n'):
    with pytest.raises(ValueError, match='source 1 is empty'):
      text.encode_sources(pieces, [blank], 8)


def test_bucket_length():
  cases = {1: 16, 16: 16, 17: 32, 512: 512, 513: 1024, 1025: 1536}
  assert {length: text.bucket_length(length) for length in cases} == cases


def test_group_by_length_covers_each_row_once():
  lengths = list(np.random.default_rng(0).integers(1, 700, 100))
  groups = text.group_by_length(lengths, 7)
  assert sorted(row for _, rows in groups for row in rows) == list(range(100))
  for padded, rows in groups:
    assert len(rows) <= 7
    assert {text.bucket_length(lengths[row]) for row in rows} == {padded}


def test_pad():
  expected = [[5, 6, 1], [1, 0, 0], [0, 0, 0]]
  np.testing.assert_array_equal(text.pad([[5, 6, 1], [1]], 3, 3), expected)
