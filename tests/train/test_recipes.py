"""Distillation by a recipe: whose texts, which laws, which checkpoint is kept."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints import store
from specjax.core import loop, rng, types, verify
from specjax.core import warp as warps
from specjax.data import corpus, text
from specjax.drafters import model_draft
from specjax.eval import theory
from specjax.models import t5
from specjax.models.table import table_model
from specjax.testing.tiny_t5 import tiny_t5
from specjax.train import distill, divergences, online, select, texts
from specjax.train.config import DataConfig, DistillConfig, FitConfig
from specjax.train.recipe import Recipe

NUM_IDS, SIZE = 8, 7  # the last id is padding of the table, 1 ends a text
VOCABULARY = text.Vocabulary(SIZE, lambda line: [1], lambda ids: '', str)
TABLE = table_model(NUM_IDS)
# A table for each of three kinds of sources: a row that is mixed up shows.
TARGET, DRAFT, OTHER = (
  jnp.asarray(
    np.random.default_rng(seed).normal(size=(3, NUM_IDS + 1, NUM_IDS)) * 1.5
  ).astype(jnp.float32)
  for seed in range(3)
)
LENGTH, ROWS = 10, 6
SOURCES = np.random.default_rng(0).integers(3, SIZE, (ROWS, 7)).astype(np.int32)
SOURCES[:, 0] = [3, 4, 5, 3, 4, 0]
SOURCES[1, 4:] = 0
SOURCES[-1] = 0  # fills up the batch
BATCH = corpus.Batch(
  SOURCES, np.random.default_rng(1).integers(2, SIZE, (ROWS, LENGTH)).astype(np.int32)
)


def prepared(data, params=DRAFT, step=3, divergence='forward_kl', **fields):
  prepare = texts.make_prepare(
    Recipe(data=data, divergence=divergence, num_draft=2, **fields),
    TABLE,
    TARGET,
    TABLE,
    NUM_IDS,
    VOCABULARY,
    total_steps=10,
    seed=5,
  )
  return jax.tree.map(np.asarray, prepare(params, step, BATCH))


def log_softmax(x):
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def laws_by_hand(table, targets_BT, temperature=1.0):
  """Looked up in the table; padding ids have none."""
  previous_BT = np.pad(targets_BT, ((0, 0), (1, 0)), constant_values=NUM_IDS)[:, :-1]
  logits_BTV = np.asarray(table)[SOURCES[:, :1] % 3, previous_BT] / temperature
  logits_BTV[..., SIZE:] = -np.inf
  return log_softmax(logits_BTV)


def target_laws(targets_BT):
  return laws_by_hand(TARGET, targets_BT)


def table_logits(params, sources_BE, targets_BT):
  previous_BT = jnp.pad(targets_BT, ((0, 0), (1, 0)), constant_values=NUM_IDS)[:, :-1]
  return params[sources_BE[:, :1] % 3, previous_BT]


def check_laws(batch, atol=1e-5):
  real_BT = batch.targets_BT > 0
  assert real_BT[:-1].sum() > 2 * ROWS
  np.testing.assert_allclose(
    batch.logp_BTV[real_BT], target_laws(batch.targets_BT)[real_BT], atol=atol
  )


def test_texts_of_the_corpus_keep_their_tokens_and_get_the_targets_laws():
  batch = prepared('fixed')
  np.testing.assert_array_equal(batch.targets_BT, BATCH.targets_BT)
  check_laws(batch)
  assert np.isneginf(batch.logp_BTV[..., SIZE:]).all()


@functools.cache
def drafts(which):
  return prepared('draft', {'draft': DRAFT, 'other': OTHER}[which])


def test_texts_of_the_draft_are_what_decoding_it_gives():
  batch = drafts('draft')
  assert not batch.targets_BT[-1].any(), 'a row that fills up the batch'
  check_laws(batch)
  # The key of the step is not known here: the draft's own law says whether the texts
  # are its own. Texts of another draft fit it worse, and the target's laws are others.
  assert (drafts('other').targets_BT != batch.targets_BT).any()
  again = prepared('draft')
  np.testing.assert_array_equal(again.targets_BT, batch.targets_BT)
  assert (prepared('draft', step=4).targets_BT != batch.targets_BT).any()
  ended = batch.targets_BT == 1
  assert ended.any(), 'texts end'
  assert not batch.targets_BT[:, 1:][np.cumsum(ended, axis=1)[:, :-1] > 0].any()


def test_texts_of_the_draft_have_its_law():
  """The first tokens of many steps, against its law and against the target's."""
  first = [prepared('draft', step=step).targets_BT[:5, 0] for step in range(120)]
  tokens = np.stack(first)
  distances = {}
  for name, table in (('draft', DRAFT), ('target', TARGET)):
    law_BV = np.exp(laws_by_hand(table, BATCH.targets_BT)[:5, 0])
    law_BV[:, 0] = 0  # a pad would end the text
    law_BV /= law_BV.sum(-1, keepdims=True)
    seen_BV = (tokens[..., None] == np.arange(NUM_IDS)).mean(axis=0)
    distances[name] = 0.5 * np.abs(seen_BV - law_BV).sum(-1).mean()
  assert distances['draft'] < 0.12 < 0.3 < distances['target'], distances


def test_new_parameters_compile_nothing():
  prepared('draft'), prepared('online')
  before = loop.decode._cache_size(), texts.score._cache_size()
  for data in ('draft', 'online'):
    prepared(data, OTHER, step=7)
  assert (loop.decode._cache_size(), texts.score._cache_size()) == before


def test_mixed_takes_both_kinds_of_batches():
  is_own = [
    (prepared('mixed', step=step).targets_BT == BATCH.targets_BT).all()
    for step in range(12)
  ]
  assert 2 < sum(is_own) < 10
  for fraction, data in ((0.0, 'fixed'), (1.0, 'draft')):
    mixed = prepared('mixed', draft_fraction=fraction)
    np.testing.assert_array_equal(mixed.targets_BT, prepared(data).targets_BT)


def test_online_rows_are_those_that_a_further_pass_would_compute():
  batch = prepared('online')
  check_laws(batch, atol=2e-5)
  assert not batch.targets_BT[-1].any()
  lengths = (batch.targets_BT > 0).sum(axis=1)
  assert len(set(lengths.tolist())) > 2


def decode(drafter, params=DRAFT):
  warp = warps.make_warp(SIZE, 1, (0,))
  return loop.decode(
    types.Params(TARGET, params),
    jnp.asarray(SOURCES),
    rng.row_keys(0, np.arange(ROWS)),
    warps.make_sampling(ROWS, temperature=1.0),
    target=TABLE,
    drafter=drafter,
    verifier=verify.token_verifier,
    warp=warp,
    max_len=LENGTH + 1,
    eos_id=1,
  )


def test_recording_changes_no_output_and_a_row_too_late_is_found(monkeypatch):
  drafter = model_draft(TABLE, warps.make_warp(SIZE, 1, (0,)), 2)
  plain = decode(drafter)
  state = decode(online.recording(drafter, NUM_IDS))
  np.testing.assert_array_equal(state.tokens_BS, plain.tokens_BS)
  assert int(np.asarray(plain.trace.accepted_BG).sum()) > 5
  assert int((np.asarray(plain.trace.source_BS) == loop.Source.CORRECTION).sum()) > 5
  targets_BT, logits_BTV = online.replay(state)
  real_BT = np.asarray(targets_BT[:, :LENGTH]) > 0
  real_BT[-1] = False
  right = target_laws(np.asarray(targets_BT[:, :LENGTH]))

  def worst(logits_BTV):
    found = texts.log_law(logits_BTV[:, :LENGTH], SIZE, 1.0)
    return np.abs(np.exp(found) - np.exp(right))[real_BT].max()

  assert worst(logits_BTV) < 1e-5
  assert worst(jnp.roll(logits_BTV, 1, axis=1)) > 1e-2
  # A mutant that keeps what was written first: rows of rejected drafts stay.
  keep = jax.jit(lambda old, new, start: jnp.where(
    (old == 0).all(-1, keepdims=True), write(old, new, start), old
  ))  # fmt: skip
  write = online._write_rows
  monkeypatch.setattr(online, '_write_rows', keep)
  mutant = online.recording.__wrapped__(drafter, NUM_IDS)
  assert worst(online.replay(decode(mutant))[1]) > 1e-2


def loss_of(batch, **fields):
  loss = texts.objective(Recipe(**fields), table_logits, SIZE)
  return float(loss(DRAFT, jax.tree.map(jnp.asarray, batch)))


def test_cross_entropy_is_that_to_the_token():
  batch = prepared('fixed', divergence='cross_entropy')
  logq_BTV = laws_by_hand(DRAFT, BATCH.targets_BT)
  chosen = np.take_along_axis(logq_BTV, BATCH.targets_BT[..., None], -1)
  found = loss_of(batch, divergence='cross_entropy')
  np.testing.assert_allclose(found, -chosen.mean(), rtol=1e-5)


def test_objective_heeds_the_temperature_and_leaves_padding_out():
  batch = prepared('fixed', temperature=0.5)
  p, q = (
    np.exp(laws_by_hand(table, BATCH.targets_BT, 0.5)) for table in (TARGET, DRAFT)
  )
  np.testing.assert_allclose(np.exp(batch.logp_BTV), p, atol=1e-5)
  tvd_BT = 1 - np.minimum(p, q).sum(-1)
  fields = {'divergence': 'tvd', 'temperature': 0.5}
  np.testing.assert_allclose(loss_of(batch, **fields), tvd_BT.mean(), rtol=1e-5)
  targets_BT = BATCH.targets_BT.copy()
  targets_BT[:, 6:] = 0
  cut = batch._replace(targets_BT=targets_BT)
  np.testing.assert_allclose(loss_of(cut, **fields), tvd_BT[:, :6].mean(), rtol=1e-5)


def test_the_warm_start_passes_from_kl_to_tvd():
  weights = [
    float(prepared('fixed', step=step, warm_fraction=0.5).tvd_weight)
    for step in (0, 2, 5, 9)
  ]
  np.testing.assert_allclose(weights, [0.0, 0.4, 1.0, 1.0], rtol=1e-6)
  batch = prepared('fixed', step=2, warm_fraction=0.5)
  kl, tvd, both = (
    loss_of(batch, divergence=name) for name in ('forward_kl', 'tvd', 'kl_then_tvd')
  )
  assert both == pytest.approx(0.6 * kl + 0.4 * tvd, rel=1e-5)
  assert kl > 2 * tvd > 0.1


SMALL = table_model(4)
# p = (1/2, 1/2, 0, 0) always; EOS is id 3.
P = np.array([0.5, 0.5, 1e-9, 1e-9])
EVEN = np.array([0.25, 0.25, 0.25, 0.25])  # KL log 2 = .69, TVD 1/2
ONE_SIDED = np.array([0.88, 0.02, 0.05, 0.05])  # KL 1.33, TVD .48


def logits_of(law):
  return jnp.log(jnp.tile(jnp.asarray(law, jnp.float32)[None], (5, 1)))


@functools.cache
def table_prompts():
  vocabulary = VOCABULARY._replace(size=4, eos_id=3)
  return select.held_out(
    SMALL,
    logits_of(P),
    vocabulary,
    [[2, 3]] * 9,
    temperature=1.0,
    seed=0,
    max_new_tokens=6,
  )


def test_held_out_texts_are_the_targets_and_fillers_count_nothing():
  (prompt,) = table_prompts()
  assert prompt.inputs_BE.shape == (16, 32)
  np.testing.assert_array_equal(prompt.length_B, [7] * 9 + [1] * 7)
  tokens = np.asarray(prompt.tokens_BS)[:9, 1:7]
  assert set(tokens.ravel().tolist()) == {0, 1}, 'what p allows'
  assert len({tuple(row) for row in tokens.tolist()}) > 4, 'each row its own noise'


def alphas_of_tables(params):
  both = types.Params(logits_of(P), params)
  alpha = select.measure_alpha(
    both, table_prompts(), target=SMALL, draft=SMALL, warp=warps.make_warp(4, 3)
  )
  return {'all': alpha}


def test_the_best_draft_is_that_of_the_largest_speedup_not_of_the_smallest_loss(
  tmp_path,
):
  written = {}
  selection = select.make_selection(
    tmp_path,
    alphas_of_tables,
    lambda path, params, notes: written.update({path.name: (params, notes)}),
    c=0.05,
    v=1.0,
    measure_steps=10,
    total_steps=35,
  )
  near, far = logits_of(EVEN), logits_of(ONE_SIDED)
  losses = [
    float(divergences.forward_kl(logits_of(P), jax.nn.log_softmax(q)).mean())
    for q in (near, far)
  ]
  assert losses[0] < 0.7 < 1.3 < losses[1], 'by the loss, the first is better'
  assert selection.observe(near, 10).endswith('best so far')
  assert selection.observe(far, 15) == '', 'not the time to measure'
  assert selection.observe(far, 20).endswith('best so far')
  assert 'best' not in selection.observe(near, 30)
  assert 'best' not in selection.observe(far, 35), 'ties go to the earlier one'
  params, notes = written['best.safetensors']
  np.testing.assert_array_equal(params, far)
  step, score = selection.best()
  assert step == notes['step'] == 20
  assert score.alpha == pytest.approx(0.52, abs=1e-5)
  # S by hand: gamma 2, (1 + .52 + .52^2) / (1 + 2 * .05) = 1.628; 3 gives 1.677.
  by_hand = {
    gamma: sum(0.52**i for i in range(gamma + 1)) / (1 + 0.05 * gamma)
    for gamma in range(9)
  }
  assert score.gamma == max(by_hand, key=by_hand.get)
  assert score.speedup == pytest.approx(by_hand[score.gamma], abs=1e-4)
  steps = [
    json.loads(line)['step']
    for line in (tmp_path / 'scores.jsonl').read_text().splitlines()
  ]
  assert steps == [10, 20, 30, 35]
  selection.observe(near, 20)  # a resumed run measures anew from here
  assert selection.best()[0] == 10


def test_a_dear_draft_is_not_worth_speculating():
  score = select.promise(0.3, 0.4)
  assert (score.gamma, score.speedup) == (0, 1.0)
  assert select.promise(0.7, 0.1, v=1.5).speedup == pytest.approx(
    max(theory.speedup(0.7, gamma, 0.1, 1.5) for gamma in range(1, 17))
  )


T5 = tiny_t5(0, gain=2.0)
MATERIAL = distill.Material(
  store.Checkpoint(T5.config, jax.tree.map(np.asarray, T5.params), {}),
  VOCABULARY,
  [corpus.Pair([*row, 1], [*row, 1]) for row in SOURCES[[0, 2, 3, 4]].tolist()],
  {'ende': [[*row, 1] for row in SOURCES[[0, 2, 3]].tolist()]},
)
TEXTS = corpus.Batch(*(text.pad(each, 8) for each in zip(*MATERIAL.pairs, strict=True)))
CONFIG = DistillConfig(
  dataclasses.replace(T5.config, num_decoder_layers=1),
  FitConfig(30, learning_rate=3e-2, warmup_steps=3, checkpoint_seconds=1e9),
  DataConfig(buckets=((8, 8),), tokens_per_batch=64),
)


def test_a_draft_cut_from_its_target_learns(tmp_path, capsys):
  """The objective on its own texts stands in for alpha, which has its tests above."""
  recipe = Recipe(
    divergence='forward_kl', data='target', start='target', measure_steps=15, c=0.1
  )
  params = distill.first_params(CONFIG, recipe, MATERIAL.target)
  layer = params['decoder']['layers_0']['mlp']['wo']['kernel']
  last = T5.params['decoder']['layers_1']['mlp']['wo']['kernel']
  np.testing.assert_array_equal(layer, last)
  seen = []

  def measure(params):
    seen.append(params)
    return {'all': 0.5 + 0.1 * len(seen)}

  state = distill.learn(CONFIG, recipe, MATERIAL, tmp_path, measure=measure)
  lines = (tmp_path / 'scores.jsonl').read_text().splitlines()
  scores = [json.loads(line) for line in lines]
  assert [(each['step'], each['alpha']) for each in scores] == [
    (0, 0.6), (15, 0.7), (30, 0.8)
  ]  # fmt: skip
  best = store.load(tmp_path / 'best.safetensors')
  assert best.config == CONFIG.model
  assert best.notes['speedup'] == max(each['speedup'] for each in scores)
  assert best.notes['recipe']['data'] == 'target'
  # Both models over the texts: nearer to the target's laws than at the beginning.
  sources_BE, targets_BT = (jnp.asarray(each) for each in TEXTS)
  size = {'size': SIZE, 'temperature': 1.0}
  laws = [
    texts.score(each, sources_BE, targets_BT, model=t5.t5_model(config), **size)
    for each, config in (
      (T5.params, T5.config), (params, CONFIG.model), (state.params, CONFIG.model)
    )
  ]  # fmt: skip
  before, after = (
    float(divergences.forward_kl(laws[0], logq_BTV).mean()) for logq_BTV in laws[1:]
  )
  assert after < 0.7 * before
  assert 'the best so far' in capsys.readouterr().out
  other = dataclasses.replace(recipe, divergence='tvd')
  with pytest.raises(ValueError, match=r'recipe: .*tvd.* is not what the run in'):
    distill.learn(CONFIG, other, MATERIAL, tmp_path, measure=measure, resume=True)


def test_cost_by_the_roofline_and_as_told():
  big = t5.T5Config.from_size('t5_1_1_xxl')
  small = t5.T5Config.from_size('t5_1_1_small')
  assert distill.costs(Recipe(c=0.3), big, small) == 0.3
  found = distill.costs(Recipe(), big, small)
  assert 0.006 < found < 0.02, 'the paper measured .02, of which bytes are a part'
  assert distill.costs(Recipe(), big, big) == pytest.approx(1.0)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'divergence': 'kl'}, "divergence: 'kl'; give one of cross_entropy, forward_kl"),
    ({'data': 'own'}, "data: 'own'; give one of fixed, target, draft, mixed, online"),
    ({'beta': 1.0}, 'beta: 1.0; give a number between 0 and 1'),
    ({'temperature': 0.0}, 'temperature: 0.0; give a number above 0'),
    ({'c': -1.0}, 'c: -1.0; give 0 or more'),
    ({'measure_steps': 0}, 'measure_steps: 0; give 1 or more'),
    ({'draft_fraction': 2.0}, 'draft_fraction: 2.0; give one from 0 to 1'),
    ({'decoder_layers': (0,)}, "they choose layers of the target, give start 'target'"),
  ],
)
def test_bad_recipes_name_field_value_and_remedy(fields, message):
  with pytest.raises(ValueError, match=r'give ') as caught:
    Recipe(**fields)
  assert message in str(caught.value)


def test_widths_must_agree(tmp_path):
  other = dataclasses.replace(CONFIG.model, vocab_size=24)
  config = dataclasses.replace(CONFIG, model=other)
  with pytest.raises(ValueError, match='vocab_size: 24 of the draft, 16 of the target'):
    distill.learn(config, Recipe(), MATERIAL, tmp_path)
