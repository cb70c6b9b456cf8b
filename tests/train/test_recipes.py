"""Distillation by a recipe: whose texts, which laws, which checkpoint is kept."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints import store
from specjax.core import autoregressive, loop, rng, types, verify
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

SIZE = 12
VOCABULARY = text.Vocabulary(SIZE, lambda line: [1], lambda ids: '', str)
TARGET, DRAFT = tiny_t5(0, gain=2.0), tiny_t5(1, 1, gain=2.0)
OTHER = jax.tree.map(lambda leaf: 1.3 * leaf, DRAFT.params)
LENGTH, ROWS = 10, 6
SOURCES = np.random.default_rng(0).integers(3, SIZE, (ROWS, 7)).astype(np.int32)
SOURCES[1, 4:] = 0
SOURCES[-1] = 0  # fills up the batch
BATCH = corpus.Batch(
  SOURCES, np.random.default_rng(1).integers(3, SIZE, (ROWS, LENGTH)).astype(np.int32)
)


def prepared(data, params=DRAFT.params, step=3, divergence='forward_kl', **fields):
  prepare = texts.make_prepare(
    Recipe(data=data, divergence=divergence, num_draft=2, **fields),
    TARGET.config,
    TARGET.params,
    DRAFT.config,
    VOCABULARY,
    total_steps=10,
    seed=5,
  )
  return jax.tree.map(np.asarray, prepare(params, step, BATCH))


def target_laws(targets_BT):
  """Of one pass without a cache, over the ids that are real."""
  fed_BT = np.pad(targets_BT, ((0, 0), (1, 0)))[:, :-1]
  cache = TARGET.oracle.init(TARGET.params, jnp.asarray(SOURCES), num_slots=LENGTH)
  output, _ = TARGET.oracle.extend(
    TARGET.params, cache, jnp.asarray(fed_BT), jnp.zeros(ROWS, jnp.int32)
  )
  logits_BTV = np.asarray(output.logits_BTV).copy()
  logits_BTV[..., SIZE:] = -np.inf
  return np.asarray(jax.nn.log_softmax(logits_BTV))


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
  return prepared('draft', {'draft': DRAFT.params, 'other': OTHER}[which])


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
  """Of 600 texts by the same rows, the first tokens against the draft's law."""
  counts = np.zeros(DRAFT.config.vocab_size)
  for step in range(100):
    counts += np.bincount(
      prepared('draft', step=step).targets_BT[:1, 0], minlength=counts.size
    )
  cache = DRAFT.oracle.init(DRAFT.params, jnp.asarray(SOURCES[:1]), num_slots=1)
  start = jnp.zeros((1, 1), jnp.int32)
  output, _ = DRAFT.oracle.extend(DRAFT.params, cache, start, jnp.zeros(1, jnp.int32))
  logits_V = np.asarray(output.logits_BTV)[0, 0].copy()
  logits_V[SIZE:] = logits_V[0] = -np.inf
  law_V = np.asarray(jax.nn.softmax(logits_V))
  distance = 0.5 * np.abs(counts / 100 - law_V).sum()
  targets = np.exp(target_laws(BATCH.targets_BT)[0, 0])
  assert distance < 0.2 < 0.5 * np.abs(counts / 100 - targets).sum()


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


def decode(drafter, params=DRAFT.params):
  warp = warps.make_warp(SIZE, 1, (0,))
  return loop.decode(
    types.Params(TARGET.params, params),
    jnp.asarray(SOURCES),
    rng.row_keys(0, np.arange(ROWS)),
    warps.make_sampling(ROWS, temperature=1.0),
    target=TARGET.model,
    drafter=drafter,
    verifier=verify.token_verifier,
    warp=warp,
    max_len=LENGTH + 1,
    eos_id=1,
  )


def test_recording_changes_no_output_and_a_row_too_late_is_found(monkeypatch):
  drafter = model_draft(DRAFT.model, warps.make_warp(SIZE, 1, (0,)), 2)
  plain = decode(drafter)
  state = decode(online.recording(drafter, TARGET.config.vocab_size))
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
  mutant = online.recording.__wrapped__(drafter, TARGET.config.vocab_size)
  assert worst(online.replay(decode(mutant))[1]) > 1e-2


def test_cross_entropy_is_that_to_the_token():
  batch = prepared('fixed', divergence='cross_entropy')
  loss = texts.objective(Recipe(divergence='cross_entropy'), DRAFT.config, SIZE)
  found = jax.jit(loss)(DRAFT.params, batch)
  logits = jax.jit(texts.teacher_forcing(DRAFT.config))
  logits_BTV = np.asarray(logits(DRAFT.params, SOURCES, BATCH.targets_BT)).copy()
  logits_BTV[..., SIZE:] = -np.inf
  logq_BTV = np.asarray(jax.nn.log_softmax(logits_BTV))
  chosen = np.take_along_axis(logq_BTV, BATCH.targets_BT[..., None], -1)
  np.testing.assert_allclose(found, -chosen.mean(), rtol=1e-5)


def test_objective_leaves_padding_out_and_heeds_the_temperature():
  batch = prepared('fixed', temperature=0.5)
  np.testing.assert_allclose(
    np.exp(batch.logp_BTV),
    np.exp(2 * target_laws(BATCH.targets_BT))
    / np.exp(2 * target_laws(BATCH.targets_BT)).sum(-1, keepdims=True),
    atol=1e-5,
  )
  recipe = Recipe(divergence='tvd', temperature=0.5)
  loss = jax.jit(texts.objective(recipe, DRAFT.config, SIZE))
  logits = jax.jit(texts.teacher_forcing(DRAFT.config))
  logits_BTV = logits(DRAFT.params, SOURCES, BATCH.targets_BT)
  logq_BTV = jax.nn.log_softmax(2 * logits_BTV[..., :SIZE])
  tvd_BT = divergences.tvd(batch.logp_BTV[..., :SIZE], logq_BTV)
  np.testing.assert_allclose(loss(DRAFT.params, batch), tvd_BT.mean(), rtol=1e-5)
  # Decoder inputs are causal: texts that end earlier are the same up to there.
  targets_BT = BATCH.targets_BT.copy()
  targets_BT[:, 6:] = 0
  cut = batch._replace(targets_BT=targets_BT)
  np.testing.assert_allclose(loss(DRAFT.params, cut), tvd_BT[:, :6].mean(), rtol=1e-5)


TABLE = table_model(4)
# p = (1/2, 1/2, 0, 0) always; EOS is id 3.
P = np.array([0.5, 0.5, 1e-9, 1e-9])
EVEN = np.array([0.25, 0.25, 0.25, 0.25])  # KL log 2 = .69, TVD 1/2
ONE_SIDED = np.array([0.88, 0.02, 0.05, 0.05])  # KL 1.33, TVD .48


def logits_of(law):
  return jnp.log(jnp.tile(jnp.asarray(law, jnp.float32)[None], (5, 1)))


def alphas_of_tables(params):
  warp = warps.make_warp(4, None)
  sampling = warps.make_sampling(8, temperature=1.0)
  inputs_BE = jnp.ones((8, 2), jnp.int32)
  state = autoregressive.decode(
    types.Params(logits_of(P)),
    inputs_BE,
    rng.row_keys(0, np.arange(8)),
    sampling,
    target=TABLE,
    warp=warp,
    max_len=7,
    eos_id=-1,
  )
  prompt = select.HeldOut(inputs_BE, state.tokens_BS, state.length_B, sampling)
  both = types.Params(logits_of(P), params)
  alpha = select.measure_alpha(both, [prompt], target=TABLE, draft=TABLE, warp=warp)
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
    float(divergences.forward_kl(jnp.log(P), jax.nn.log_softmax(q)).mean())
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
  steps = [json.loads(line)['step'] for line in (tmp_path / 'scores.jsonl').open()]
  assert steps == [10, 20, 30, 35]
  selection.observe(near, 20)  # a resumed run measures anew from here
  assert selection.best()[0] == 10


def test_a_dear_draft_is_not_worth_speculating():
  score = select.promise(0.3, 0.4)
  assert (score.gamma, score.speedup) == (0, 1.0)
  assert select.promise(0.7, 0.1, v=1.5).speedup == pytest.approx(
    max(theory.speedup(0.7, gamma, 0.1, 1.5) for gamma in range(1, 17))
  )


MATERIAL = distill.Material(
  store.Checkpoint(TARGET.config, jax.tree.map(np.asarray, TARGET.params), {}),
  VOCABULARY,
  [corpus.Pair([*row, 1], [*row[::-1], 1]) for row in SOURCES[:5].tolist() if all(row)],
  {'ende': [[*row, 1] for row in SOURCES[:3].tolist()]},
)
CONFIG = DistillConfig(
  dataclasses.replace(TARGET.config, num_decoder_layers=1),
  FitConfig(30, learning_rate=3e-2, warmup_steps=3, checkpoint_seconds=1e9),
  DataConfig(buckets=((8, 8),), tokens_per_batch=64),
)


def test_a_draft_cut_from_its_target_learns_on_its_own_texts(tmp_path, capsys):
  recipe = Recipe(
    divergence='forward_kl', data='draft', start='target', measure_steps=15, c=0.1
  )
  params = distill.first_params(CONFIG, recipe, MATERIAL.target)
  before = distill.make_measure(recipe, MATERIAL, CONFIG.model, 0)(params)['all']
  distill.learn(CONFIG, recipe, MATERIAL, tmp_path)
  scores = [json.loads(line) for line in (tmp_path / 'scores.jsonl').open()]
  assert [each['step'] for each in scores] == [15, 30]
  assert scores[-1]['alpha'] > before + 0.05
  best = store.load(tmp_path / 'best.safetensors')
  assert best.config == CONFIG.model
  assert best.notes['speedup'] == max(each['speedup'] for each in scores)
  assert best.notes['recipe']['data'] == 'draft'
  assert 'alpha' in capsys.readouterr().out


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
  with pytest.raises(ValueError, match='.') as caught:
    Recipe(**fields)
  assert message in str(caught.value)


def test_widths_must_agree():
  other = dataclasses.replace(DRAFT.config, vocab_size=24)
  with pytest.raises(ValueError, match='vocab_size: 24 of the draft, 16 of the target'):
    texts.make_prepare(
      Recipe(), TARGET.config, {}, other, VOCABULARY, total_steps=1, seed=0
    )
