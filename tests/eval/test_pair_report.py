"""The pair's report: counts and texts on a random pair with known answers."""

import shutil

import pytest

from specjax import drafters
from specjax.checkpoints import store
from specjax.core import warp as warps
from specjax.data import corpus
from specjax.eval import pair_report
from specjax.models import t5
from specjax.train import train

MODEL = t5.T5Config(
  vocab_size=4224,
  emb_dim=8,
  num_heads=2,
  head_dim=4,
  mlp_dim=16,
  num_encoder_layers=1,
  num_decoder_layers=1,
  logits_via_embedding=True,
)


@pytest.fixture(scope='module')
def models(tmp_path_factory):
  """A pair whose draft is the target itself."""
  folder = tmp_path_factory.mktemp('pair')
  params = train.init_params(MODEL, 0)
  for name in ('target', 'draft'):
    store.save(folder / f'{name}.safetensors', params, MODEL, dtype='float32')
  shutil.copy(corpus.CORPUS_PATH.with_name('vocab.model'), folder)
  return pair_report.read_models(folder)


@pytest.mark.slow
def test_a_copy_of_the_target_drafts_perfectly(models):
  vocabulary = models.vocabulary
  sources = [vocabulary.encode(line) for line in ('fix: one cell', 'ende: Page', 'x')]
  warp = warps.make_warp(vocabulary.size, vocabulary.eos_id)
  options = {'temperature': 0.0, 'max_new_tokens': 13, 'batch_size': 4}
  copy = drafters.model_draft(models.draft, warp, 3)
  drafted = pair_report.decode_task(models, copy, sources, **options)
  lookup = drafters.ngram_draft(3, models.vocab_size)
  looked_up = pair_report.decode_task(models, lookup, sources, **options)
  assert drafted.alpha == pytest.approx(1.0, abs=1e-6)
  assert drafted.summary.acceptance_rate == 1.0
  # The row that fills up the batch counts for nothing.
  assert drafted.summary.num_emitted_tokens <= 3 * 13
  assert looked_up.texts == drafted.texts
  assert looked_up.summary.num_emitted_tokens == drafted.summary.num_emitted_tokens


def test_read_task_draws_by_seed():
  assert len(pair_report.read_task('summ', 'test')) == 119
  few = pair_report.read_task('fix', 'test', limit=5)
  assert few == pair_report.read_task('fix', 'test', limit=5)
  assert {example.task for example in few} == {'fix'}
  assert len(few) == 5


def test_quality():
  same = pair_report.quality(['one two three four'], ['one two three four'])
  assert same == pytest.approx({'bleu': 100, 'chrf': 100, 'exact_match': 1})
  other = pair_report.quality(['seven'], ['one two three four'])
  assert other['exact_match'] == 0
  assert other['bleu'] == pytest.approx(0)


def test_table_has_the_rows_numbers():
  row = {
    'task': 'fix',
    'temperature': 0.0,
    'method': 'ngram',
    'num_draft': 8,
    'alpha': 0.8765,
    'acceptance_rate': 0.5,
    'block_efficiency': 3.456,
    'bleu': 81.0,
    'chrf': 92.0,
    'exact_match': 0.25,
  }
  table = pair_report.table([row])
  cells = [next(iter(column.cells)) for column in table.columns]
  assert cells == ['fix', '0', 'ngram', '8', '0.876', '0.5', '3.46', '81', '92', '0.25']
