"""Shared noise: at any temperature the output is plain decoding's, bit for bit."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from specjax.core import autoregressive, coupling, loop, rng, types, warp
from specjax.drafters import model_draft, ngram_draft
from specjax.models.table import table_model
from specjax.testing import enumerate_law, tables
from specjax.testing.chi_square import assert_law, count_outputs
from specjax.testing.drafters import constant_draft, counted, random_draft
from specjax.testing.tiny_t5 import VOCAB_SIZE, tiny_t5

V = 4
EOS = 3
NUM_ROWS = 64
MAX_LEN = 12
MODEL = table_model(V, 2)
WARP = warp.make_warp(eos_id=EOS)
PARAMS = types.Params(*map(jnp.asarray, tables.random_pair(3, V, 2, agreement=0.3)))


def ragged(num_rows=NUM_ROWS):
  row = np.arange(num_rows)
  return warp.make_sampling(
    num_rows,
    temperature=np.where(row % 5 == 0, 0.0, 0.5 + row / 40),
    top_k=row % 4,
    top_p=np.where(row % 3 == 0, 0.8, 1.0),
    max_new_tokens=2 + row % 10,
    min_new_tokens=row % 3,
    num_draft=row % 6,
  )


def coupled(drafter, params=PARAMS, sampling=None, seed=0, **fields):
  sampling = ragged() if sampling is None else sampling
  num_rows = sampling.top_k_B.shape[0]
  fields = {'target': MODEL, 'warp': WARP, 'max_len': MAX_LEN, 'eos_id': EOS, **fields}
  return loop.decode(
    params,
    jnp.ones((num_rows, 5), jnp.int32),
    rng.row_keys(seed, jnp.arange(num_rows)),
    sampling,
    drafter=drafter,
    verifier=coupling.gumbel_verifier,
    block_keys=coupling.slot_block_keys(drafter.num_draft),
    **fields,
  )


def plain(params=PARAMS, sampling=None, seed=0, **fields):
  """The baseline with its own, uncoupled keys."""
  sampling = ragged() if sampling is None else sampling
  num_rows = sampling.top_k_B.shape[0]
  fields = {'target': MODEL, 'warp': WARP, 'max_len': MAX_LEN, 'eos_id': EOS, **fields}
  return autoregressive.decode(
    params,
    jnp.ones((num_rows, 5), jnp.int32),
    rng.row_keys(seed, jnp.arange(num_rows)),
    sampling,
    **fields,
  )


def assert_same_text(state, expected):
  np.testing.assert_array_equal(state.length_B, expected.length_B)
  np.testing.assert_array_equal(
    state.tokens_BS[:, :MAX_LEN], expected.tokens_BS[:, :MAX_LEN]
  )


def shared(num_draft):
  return model_draft(MODEL, WARP, num_draft, keys=coupling.slot_keys)


DRAFTERS = {
  'shared noise, G 1': lambda: shared(1),
  'shared noise, G 3': lambda: shared(3),
  'shared noise, G 5': lambda: shared(5),
  'noise of its own': lambda: model_draft(MODEL, WARP, 3),
  'random': lambda: random_draft(2, V),
  'always EOS': lambda: constant_draft(3, V, EOS),
  'n-grams': lambda: ngram_draft(3, V),
  'varying number': lambda: counted(shared(4), lambda length_B: length_B % 5),
}


@functools.cache
def plain_text():
  return plain()


@pytest.mark.parametrize('name', DRAFTERS)
def test_text_is_that_of_plain_sampling(name):
  state = coupled(DRAFTERS[name]())
  assert_same_text(state, plain_text())
  # Sampled text, not one greedy text for all.
  assert len(np.unique(state.tokens_BS[:, :MAX_LEN], axis=0)) > NUM_ROWS // 2


def test_another_seed_gives_another_text():
  other = coupled(shared(3), seed=1)
  assert_same_text(other, plain(seed=1))
  assert (other.tokens_BS != coupled(shared(3)).tokens_BS).any()


def test_a_fault_of_the_target_shows():
  """The test by equality can fail: one stale slot is enough."""

  def extend(params, cache, tokens_BT, start_B):
    output, _ = MODEL.extend(params, cache, tokens_BT, start_B)
    _, cache = MODEL.extend(params, cache, tokens_BT[:, :-1], start_B)
    return output, cache

  state = coupled(shared(1), target=types.Model(MODEL.init, extend))
  assert (state.tokens_BS[:, :MAX_LEN] != plain_text().tokens_BS[:, :MAX_LEN]).any()


def test_self_draft_accepts_everything():
  params = types.Params(PARAMS.target, PARAMS.target)
  state = coupled(shared(3), params)
  drafted_BG, accepted_BG = state.trace[1:3]
  # EOS and the budget may cut off what was accepted; the sources tell rejection.
  assert not (np.asarray(state.trace.source_BS) == loop.Source.CORRECTION).any()
  assert np.asarray(drafted_BG).sum() > NUM_ROWS
  assert np.asarray(accepted_BG).sum() > NUM_ROWS


@pytest.mark.parametrize('draft_noise', ['shared', 'own'])
def test_acceptance_is_the_formula(draft_noise):
  num_rows = 1 << 14
  drafter = shared(1) if draft_noise == 'shared' else model_draft(MODEL, WARP, 1)
  sampling = warp.make_sampling(num_rows, temperature=1.0, max_new_tokens=2)
  state = coupled(drafter, sampling=sampling, eos_id=-1)
  p_V, q_V = (tables.conditional(np.asarray(t), 2)(()) for t in PARAMS)
  expected = (
    float(coupling.match_probability(p_V, q_V))
    if draft_noise == 'shared'
    else float(p_V @ q_V)
  )
  accepted = int(np.asarray(state.trace.accepted_BG).sum())
  assert stats.binomtest(accepted, num_rows, expected).pvalue > 1e-6
  tv = 0.5 * np.abs(p_V - q_V).sum()
  if draft_noise == 'shared':
    assert (1 - tv) / (1 + tv) <= expected <= 1 - tv


def test_joint_law():
  num_rows, num_tokens = 1 << 16, 4
  sampling = warp.make_sampling(num_rows, temperature=1.0)
  state = coupled(shared(2), sampling=sampling, max_len=num_tokens + 1, eos_id=-1)
  target = tables.conditional(np.asarray(PARAMS.target), 2)
  law = enumerate_law.target_law(target, V, num_tokens)
  assert_law(*count_outputs(state.tokens_BS, state.length_B, law))


def test_text_of_a_t5():
  t5, small = tiny_t5(0, gain=2.0), tiny_t5(1, num_layers=1, gain=2.0)
  fields = {
    'params': types.Params(t5.params, small.params),
    'sampling': ragged(16),
    'target': t5.model,
    'warp': warp.make_warp(VOCAB_SIZE, eos_id=1),
    'eos_id': 1,
  }
  drafter = model_draft(small.model, fields['warp'], 3, keys=coupling.slot_keys)
  state = coupled(drafter, **fields)
  assert_same_text(state, plain(**fields))
  assert np.asarray(state.trace.accepted_BG).sum() > 0


def test_refuses_keys_of_another_loop():
  with pytest.raises(ValueError, match=r'slot_block_keys\(2\)'):
    loop.decode(
      PARAMS,
      jnp.ones((2, 1), jnp.int32),
      rng.row_keys(0, jnp.arange(2)),
      warp.make_sampling(2),
      target=MODEL,
      drafter=shared(2),
      verifier=coupling.gumbel_verifier,
      warp=WARP,
      max_len=4,
      eos_id=-1,
    )
