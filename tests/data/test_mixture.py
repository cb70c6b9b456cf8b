"""Sources and how they are mixed; streams that start anywhere are the same stream."""

import collections
import itertools

import numpy as np
import pytest

from specjax.data import corpus, mixture, text

WORDS = text.byte_vocabulary(100)


def _file(folder, letter, count):
  path = folder / f'{letter}.tsv'
  path.write_text(''.join(f'{letter}{n:02}\t{letter}\n' for n in range(count)))
  return str(path)


def _source(name, **options):
  return mixture.open_source(name, WORDS, max_source=16, **options)


def _texts(pairs):
  return [WORDS.decode(pair.source) for pair in pairs]


def test_weights_are_repeats(tmp_path):
  a, b = _source(_file(tmp_path, 'a', 10)), _source(_file(tmp_path, 'b', 20))
  epochs = [
    _texts(mixture.epoch_pairs([(a, 2.0), (b, 0.5)], seed=1, epoch=epoch))
    for epoch in (0, 0, 1)
  ]
  assert epochs[0] == epochs[1] != epochs[2]
  counts = collections.Counter(epochs[0])
  assert all(counts[f'a{n:02}'] == 2 for n in range(10))
  chosen = {name for name in counts if name[0] == 'b'}
  assert len(chosen) == 10
  assert chosen != {name for name in epochs[2] if name[0] == 'b'}
  assert [name[0] for name in epochs[0]] != sorted(name[0] for name in epochs[0])


def test_the_embedded_epoch_is_the_corpus_own():
  """What the embedded weights were trained on: `corpus.epoch_examples`."""
  weights = {'ende': 1.0, 'summ': 1.5, 'fix': 1.0}
  sources = [(_source(name, split='valid'), weight) for name, weight in weights.items()]
  examples = corpus.read_corpus('valid')
  expected = corpus.epoch_examples(examples, weights, 3, 2)
  found = list(mixture.epoch_pairs(sources, seed=3, epoch=2))
  assert len(found) == len(expected) > 300
  for pair, example in zip(found[:50], expected, strict=False):
    assert pair == corpus.encode_example(WORDS, example, 16)


def test_batches_go_on_from_any_step(tmp_path):
  (tmp_path / 'a.txt').write_text('The quick brown fox jumps over a dog.\n' * 9)
  sources = [
    (_source(_file(tmp_path, 'a', 10)), 1.0),
    (_source(f'spans:{tmp_path}/a.txt'), 1.0),
  ]

  def batches(start):
    return mixture.endless_batches(sources, ((4, 4), (16, 9)), 50, 0, start)

  whole = list(itertools.islice(batches(0), 60))
  assert sum(len(batch.sources_BE[batch.sources_BE[:, 0] > 0]) for batch in whole) > 60
  for start in (1, 37):
    for one, other in zip(whole[start:], batches(start), strict=False):
      for field, expected in zip(one, other, strict=True):
        np.testing.assert_array_equal(field, expected)


def test_spans_are_masked_anew_in_every_epoch(tmp_path):
  (tmp_path / 'a.txt').write_text(
    ''.join(f'The fox jumps {n:02}.\n' for n in range(20))
  )
  source = _source(f'spans:{tmp_path}/a.txt')
  first, again, second = (source.examples(0, epoch) for epoch in (0, 0, 1))
  assert first == again != second
  assert max(len(pair.source) for pair in first) == 16
  assert source.path == f'{tmp_path}/a.txt'


def test_targets_that_fit_no_bucket(tmp_path):
  source = _source(_file(tmp_path, 'a', 3))
  stream = mixture.endless_batches([(source, 1.0)], ((8, 1),), 50, 0)
  with pytest.raises(ValueError, match='every target is longer than 1 ids'):
    next(stream)


def test_too_few_sentinels(tmp_path):
  (tmp_path / 'a.txt').write_text('The quick brown fox.\n')
  with pytest.raises(ValueError, match='2 masked spans take as many sentinels'):
    mixture.open_source(
      f'spans:{tmp_path}/a.txt', text.byte_vocabulary(1), max_source=32
    )
