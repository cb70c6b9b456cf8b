"""The embedded corpus, its tasks and its batches."""

import collections
import hashlib
import json
import lzma

import numpy as np
import pytest

from specjax.data import corpus, text

ASSETS = corpus.CORPUS_PATH.parent


@pytest.fixture(scope='module')
def vocabulary():
  return text.sentencepiece_vocabulary(ASSETS / 'vocab.model')


@pytest.fixture(scope='module')
def train_examples():
  return corpus.read_corpus('train')


def test_corpus_is_the_one_that_is_named(train_examples):
  assert corpus.corpus_sha256() == corpus.CORPUS_SHA256
  counts = collections.Counter(example.task for example in train_examples)
  assert counts == {'ende': 27321, 'summ': 3620}


def test_no_test_source_is_in_train(train_examples):
  train = {example.source for example in train_examples}
  test = [example.source for example in corpus.read_corpus('test')]
  assert len(test) == 1340 + 119
  assert not train.intersection(test)


def test_read_corpus_bad_input(tmp_path):
  with pytest.raises(ValueError, match="split: 'dev' is none of train, valid, test"):
    corpus.read_corpus('dev')
  path = tmp_path / 'x.tsv.xz'
  path.write_bytes(lzma.compress(b'ende\ttrain\ta\tb\nende\ttrain\ta\n'))
  with pytest.raises(ValueError, match='line 2: expected task, split, source, target'):
    corpus.read_corpus('train', path)


def test_misspell_is_deterministic_and_close_to_its_rate(train_examples):
  lines = [e.source for e in train_examples[:3000]]
  once = [corpus.misspell(line, str(i)) for i, line in enumerate(lines)]
  assert once == [corpus.misspell(line, str(i)) for i, line in enumerate(lines)]
  assert once != [corpus.misspell(line, f'x{i}') for i, line in enumerate(lines)]
  # Pinned: another Python must draw the same misspellings.
  digest = hashlib.sha256('\n'.join(once).encode()).hexdigest()
  assert digest == '46952ad8873d660079f491a0dee05e62b1737590f8a0af0d4995093aeac4438e'
  changed = able = 0
  for line, noisy in zip(lines, once, strict=True):
    for word, other in zip(line.split(' '), noisy.split(' '), strict=True):
      if len(word) > 3 and word.isalpha():
        able += 1
        changed += word != other
        assert word[0] == other[0]
        assert abs(len(word) - len(other)) <= 1
      else:
        assert word == other
  # A swap of equal letters or a replacement by the same one changes nothing.
  assert 0.10 < changed / able < corpus.MISSPELT_RATE


def test_prefixes_choose_the_task(vocabulary):
  sources = [
    corpus.encode_example(vocabulary, corpus.Example(task, 'A cell.', 'x'), 128).source
    for task in ('ende', 'summ', 'fix')
  ]
  texts = [vocabulary.decode(source) for source in sources]
  assert texts == ['ende: A cell.', 'summ: A cell.', 'fix: A cell.']
  assert set(corpus.PREFIXES) == {'ende', 'summ', 'fix'}


def test_long_sources_are_cut_and_end_with_eos(vocabulary):
  example = corpus.Example('summ', 'word ' * 500, 'x')
  source = corpus.encode_example(vocabulary, example, 128).source
  assert len(source) == 128
  assert source[-1] == text.EOS_ID


def test_epoch_follows_the_mixture(train_examples):
  mixture = {'ende': 0.25, 'summ': 2.0, 'fix': 1.0}
  epoch = corpus.epoch_examples(train_examples, mixture, seed=0, epoch=0)
  counts = collections.Counter(example.task for example in epoch)
  assert counts['ende'] == round(27321 / 4)
  assert counts['summ'] == 2 * 3620
  assert counts['fix'] == len(corpus.fix_examples(train_examples))
  assert epoch == corpus.epoch_examples(train_examples, mixture, seed=0, epoch=0)
  other = corpus.epoch_examples(train_examples, mixture, seed=0, epoch=1)
  noisy = [{e.source for e in each if e.task == 'fix'} for each in (epoch, other)]
  assert len(noisy[0] & noisy[1]) < 0.3 * len(noisy[0])


def test_batches_hold_each_fitting_pair_once():
  rng = np.random.default_rng(0)
  pairs = [
    corpus.Pair([int(n)] * int(n), [int(i) + 2] * int(m))
    for i, (n, m) in enumerate(rng.integers(1, 40, (300, 2)))
  ]
  buckets = ((16, 16), (32, 16), (32, 32))
  batches = list(corpus.batch_pairs(pairs, buckets, 256, seed='0'))
  seen = [
    (int(source[0]), int(target[0]) - 2)
    for batch in batches
    for source, target in zip(*batch, strict=True)
    if source[0]
  ]
  fitting = [
    (len(pair.source), i)
    for i, pair in enumerate(pairs)
    if len(pair.source) <= 32 and len(pair.target) <= 32
  ]
  assert sorted(seen) == sorted(fitting)
  shapes = {(b.sources_BE.shape, b.targets_BT.shape) for b in batches}
  assert shapes == {((8, 16), (8, 16)), ((5, 32), (5, 16)), ((4, 32), (4, 32))}
  for batch in batches:
    assert batch.sources_BE.dtype == batch.targets_BT.dtype == np.int32


def test_samples_are_drawn_from_the_test_split_by_seed(vocabulary):
  samples = [
    json.loads(line)
    for line in (ASSETS / 'samples.jsonl').read_text(encoding='utf-8').splitlines()
  ]
  drawn = [
    {'task': e.task, 'source': e.source, 'reference': e.target}
    for e in corpus.sample_examples(vocabulary)
  ]
  assert samples == drawn
  assert collections.Counter(e['task'] for e in samples) == {
    'ende': 4,
    'summ': 4,
    'fix': 4,
  }
