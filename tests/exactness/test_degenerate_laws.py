"""Residuals without mass, laws that differ by rounding, tiny temperatures."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import loop, rng, types, verify, warp
from specjax.drafters import model_draft
from specjax.models.table import table_model
from specjax.testing import chi_square
from specjax.testing.drafters import random_draft

RULES = {'token': verify.token_rule, 'block': verify.block_rule}
NUM_ROWS = 512
WARP = warp.make_warp()


def verdict_of(rule, p_V, q_V, coin, token, num_draft=2):
  """A verdict on the same law and draft at each position, with given coins."""
  with np.errstate(divide='ignore'):
    logp_V, logq_V = (np.log(np.asarray(law, np.float32)) for law in (p_V, q_V))
  rows = (NUM_ROWS, num_draft)
  draft = types.Draft(
    jnp.full(rows, token, jnp.int32),
    jnp.broadcast_to(logq_V, (*rows, len(q_V))),
    jnp.full(NUM_ROWS, num_draft, jnp.int32),
  )
  logp_BG1V = jnp.broadcast_to(logp_V, (NUM_ROWS, num_draft + 1, len(p_V)))
  key_B = rng.row_keys(0, jnp.arange(NUM_ROWS))
  coin_BG = jnp.full(rows, coin, jnp.float32)
  return verify.verify(RULES[rule], coin_BG, key_B, draft, logp_BG1V)


@pytest.mark.parametrize('rule', RULES)
def test_equal_laws_and_a_coin_that_rejects(rule):
  # No coin of [0, 1) rejects here; a coin of 1 stands for a rounding error.
  law_V = [0.0, 0.5, 0.3, 0.2]
  verdict = verdict_of(rule, law_V, law_V, coin=1.0, token=1)
  assert (verdict.num_accepted_B == 0).all()
  counts = np.bincount(verdict.next_token_B, minlength=4)
  assert counts[0] == 0
  assert chi_square.chi_square(counts, law_V).p_value > 1e-6


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('direction', [-1, 1])
def test_laws_that_differ_by_one_unit_of_bfloat16(rule, direction):
  p_V = np.array([0.0, 0.5, 0.3, 0.2], np.float32)
  q_V = p_V.copy()
  q_V[1] *= 1 + direction * 2.0**-8
  q_V /= q_V.sum()
  for coin in (0.0, 0.999, 1.0):
    verdict = verdict_of(rule, p_V, q_V, coin, token=1)
    assert ((verdict.num_accepted_B >= 0) & (verdict.num_accepted_B <= 2)).all()
    assert (verdict.next_token_B != 0).all()


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('coin', [0.0, 0.5, 1.0])
def test_one_hot_laws(rule, coin):
  one_hot_V, other_V = np.eye(4)[2], np.eye(4)[1]
  same = verdict_of(rule, one_hot_V, one_hot_V, coin, token=2)
  assert (same.next_token_B == 2).all()
  assert (same.num_accepted_B == (2 if coin < 1 else 0)).all()
  apart = verdict_of(rule, one_hot_V, other_V, coin, token=1)
  assert (apart.next_token_B == 2).all()
  assert (apart.num_accepted_B == 0).all()


@pytest.mark.parametrize('temperature', [1e-4, 1e-30, 0.0])
def test_tiny_temperatures_and_huge_logits(temperature):
  random = np.random.default_rng(0)
  logits_CV = random.choice([-1e4, 0.0, 1e4], (5, 4)) + random.normal(0, 1, (5, 4))
  params = jnp.asarray(logits_CV, jnp.float32)
  model = table_model(4)
  state = loop.decode(
    types.Params(params, params[::-1]),
    jnp.zeros((8, 1), jnp.int32),
    rng.row_keys(0, jnp.arange(8)),
    warp.make_sampling(8, temperature=temperature),
    target=model,
    drafter=model_draft(model, WARP, 2),
    verifier=verify.block_verifier,
    warp=WARP,
    max_len=9,
    eos_id=-1,
  )
  expected, token = [], 4
  for _ in range(8):
    token = int(logits_CV[token].argmax())
    expected.append(token)
  assert np.asarray(state.tokens_BS)[:, 1:9].tolist() == [expected] * 8
  np.testing.assert_array_equal(state.trace.logp_BS, 0.0)


def test_a_uniform_draft_of_a_certain_target_is_accepted_once_in_v():
  # The target counts 0, 1, 2, ..: an index shifted by one shows at once.
  vocab_size, num_rows, num_tokens = 5, 4096, 6
  params = jnp.asarray(100.0 * np.eye(6, 5, k=1), jnp.float32)
  params = params.at[5].set(100.0 * jnp.eye(5)[0]).at[4].set(100.0 * jnp.eye(5)[0])
  state = loop.decode(
    types.Params(params),
    jnp.zeros((num_rows, 1), jnp.int32),
    rng.row_keys(0, jnp.arange(num_rows)),
    warp.make_sampling(num_rows, temperature=1.0),
    target=table_model(vocab_size),
    drafter=random_draft(2, vocab_size),
    verifier=verify.token_verifier,
    warp=WARP,
    max_len=num_tokens + 1,
    eos_id=-1,
  )
  expected = [0, 1, 2, 3, 4, 0]
  np.testing.assert_array_equal(
    state.tokens_BS[:, 1 : num_tokens + 1], np.tile(expected, (num_rows, 1))
  )
  drafted, accepted = (
    int(np.asarray(count_BG)[:, 0].sum()) for count_BG in state.trace[1:3]
  )
  law = [1 / vocab_size, 1 - 1 / vocab_size]
  chi_square.assert_law([accepted, drafted - accepted], law, 1e-6)
