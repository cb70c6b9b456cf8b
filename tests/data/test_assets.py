"""What the wheel carries: the embedded pair and its licences."""

import json

import jax
import pytest

from specjax.checkpoints import store
from specjax.data import corpus, text

ASSETS = corpus.CORPUS_PATH.parent


@pytest.mark.parametrize(
  ('name', 'fewest', 'most'),
  [('target', 4_000_000, 7_000_000), ('draft', 500_000, 1_000_000)],
)
def test_weights(name, fewest, most):
  checkpoint = store.load(ASSETS / f'{name}.safetensors')
  count = sum(leaf.size for leaf in jax.tree.leaves(checkpoint.params))
  assert fewest <= count <= most
  assert checkpoint.notes['corpus_sha256'] == corpus.CORPUS_SHA256
  assert str(checkpoint.notes['seed']) in (ASSETS / 'README.md').read_text()


def test_vocabulary_fits_both_models():
  manifest = json.loads((ASSETS / 'pair.json').read_text(encoding='utf-8'))
  vocabulary = text.sentencepiece_vocabulary(
    ASSETS / manifest['vocabulary'], manifest['extra_ids']
  )
  for name in ('target', 'draft'):
    config = store.load(ASSETS / f'{name}.safetensors').config
    assert vocabulary.size <= config.vocab_size < vocabulary.size + 128


def test_total_size():
  size = sum(path.stat().st_size for path in ASSETS.iterdir() if path.is_file())
  assert size < 25e6


def test_licence_and_data_hash_travel_with_the_text():
  licence = (ASSETS / 'COPYRIGHT.libreoffice-help').read_text(encoding='utf-8')
  assert 'MPL-2.0' in licence
  readme = (ASSETS / 'README.md').read_text(encoding='utf-8')
  assert corpus.CORPUS_SHA256 in readme
  assert 'MPL-2.0' in readme
