"""Files of examples, and what is said about damaged ones."""

import gzip
import lzma

import pytest

from specjax.data import pairs

EXPECTED = [('ende: a', 'ä'), ('b c', '')]
TSV = 'ende: a\tä\nb c\t\n'.encode()
JSONL = (
  '{"source": "ende: a", "target": "ä"}\n\n{"inputs": "b c", "targets": ""}'.encode()
)


@pytest.mark.parametrize(
  ('name', 'data'),
  [
    ('a.tsv', TSV),
    ('a.tsv', b'\xef\xbb\xbf' + TSV.replace(b'\n', b'\r\n')),
    ('a.jsonl', JSONL),
    ('a.tsv.gz', gzip.compress(TSV, mtime=0)),
    ('a.jsonl.xz', lzma.compress(JSONL)),
  ],
)
def test_pairs_are_read(tmp_path, name, data):
  (tmp_path / name).write_bytes(data)
  assert pairs.read_pairs(tmp_path / name) == EXPECTED


def test_documents_are_lines(tmp_path):
  (tmp_path / 'a.txt').write_text('One.\n\n Two\ttabs. \n')
  assert pairs.read_documents(tmp_path / 'a.txt') == ['One.', ' Two\ttabs. ']


@pytest.mark.parametrize(
  ('name', 'data', 'message'),
  [
    ('a.tsv', b'a\tb\nc\n', 'line 2: 0 tabs; expected source<TAB>target'),
    ('a.tsv', b'a\tb\tc\n', 'line 1: 2 tabs'),
    ('a.tsv', b'a\tb\n \tc\n', 'line 2: the source is empty'),
    ('a.tsv', b'a\tb\nc\t\xffd\n', 'line 2: byte 0xff at column 3 is not UTF-8'),
    ('a.tsv', b'\n', 'is empty; give one example a line'),
    ('a.jsonl', JSONL[:-2], 'line 3: no JSON .*is the file complete'),
    ('a.jsonl', b'{"source": 1, "target": "b"}', 'the texts "source" and "target"'),
    (
      'a.tsv.gz',
      gzip.compress(TSV * 99, mtime=0)[:-9],
      'cannot read .*make the file again',
    ),
    ('a.tsv.xz', lzma.compress(TSV * 99)[:-9], 'cannot read .*make the file again'),
    ('a.tsv.gz', TSV, 'cannot read .*beyond line 0'),
  ],
)
def test_damaged_files(tmp_path, name, data, message):
  (tmp_path / name).write_bytes(data)
  with pytest.raises(ValueError, match=message) as raised:
    pairs.read_pairs(tmp_path / name)
  assert str(tmp_path / name) in str(raised.value)


def test_no_file(tmp_path):
  with pytest.raises(ValueError, match=r'no file .*absent\.tsv; check the path'):
    pairs.read_pairs(tmp_path / 'absent.tsv')
