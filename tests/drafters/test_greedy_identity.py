"""At temperature 0 no drafter changes a token: random T5s, ragged batches.

The reference is the plain loop, and the plain loop's is an uncached argmax. The
arithmetic is float32: in bfloat16 passes of other widths may break near-ties
differently.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import autoregressive, loop, rng, types, verify, warp
from specjax.drafters import (
  bigram_draft,
  fit_bigram,
  fit_unigram,
  model_draft,
  ngram_draft,
  unigram_draft,
)
from specjax.testing import drafters
from specjax.testing.tiny_t5 import NUM_LOGITS, VOCAB_SIZE, tiny_t5

EOS = 1
MAX_LEN = 24
NUM_ROWS = 6
NUM_DRAFT = 3
WARP = warp.make_warp(VOCAB_SIZE, eos_id=EOS)
TARGET = tiny_t5(seed=0)
DRAFT = tiny_t5(seed=1, num_layers=1)
TEXTS = [[3, 4, 5, 1], [6, 7, 8, 9, 1]]


@functools.cache
def sources():
  """Ragged rows, the longest first and a single token last."""
  random = np.random.default_rng(0)
  inputs_BE = np.zeros((NUM_ROWS, 9), np.int32)
  for row, length in enumerate([9, 2, 5, 7, 3, 1]):
    inputs_BE[row, :length] = random.integers(2, VOCAB_SIZE, length)
  return jnp.asarray(inputs_BE)


def arguments(params):
  # Budgets differ as well; without an early EOS rows run into them.
  sampling = warp.make_sampling(
    NUM_ROWS,
    max_new_tokens=jnp.array([23, 23, 20, 9, 23, 2]),
    min_new_tokens=jnp.array([0, 5, 0, 23, 12, 0]),
  )
  return params, sources(), rng.row_keys(0, jnp.arange(NUM_ROWS)), sampling


STATIC = {'target': TARGET.model, 'warp': WARP, 'max_len': MAX_LEN, 'eos_id': EOS}


@functools.cache
def plain():
  return autoregressive.decode(*arguments(types.Params(TARGET.params)), **STATIC)


def speculative(drafter, draft_params, verifier=verify.token_verifier):
  return loop.decode(
    *arguments(types.Params(TARGET.params, draft_params)),
    drafter=drafter,
    verifier=verifier,
    **STATIC,
  )


def assert_same_output(state, expected):
  np.testing.assert_array_equal(state.length_B, expected.length_B)
  np.testing.assert_array_equal(
    state.tokens_BS[:, :MAX_LEN], expected.tokens_BS[:, :MAX_LEN]
  )


def half(length_B):
  return length_B % (NUM_DRAFT + 1)


CASES = {
  'model': (model_draft(DRAFT.model, WARP, NUM_DRAFT), DRAFT.params),
  'model, 1 draft': (model_draft(DRAFT.model, WARP, 1), DRAFT.params),
  'model, 7 drafts': (model_draft(DRAFT.model, WARP, 7), DRAFT.params),
  'model without a cache': (model_draft(DRAFT.oracle, WARP, NUM_DRAFT), DRAFT.params),
  'target itself': (model_draft(TARGET.model, WARP, NUM_DRAFT), TARGET.params),
  'ngram': (ngram_draft(5, NUM_LOGITS), None),
  'unigram': (unigram_draft(WARP, NUM_DRAFT), fit_unigram(TEXTS, NUM_LOGITS)),
  'bigram': (bigram_draft(WARP, NUM_DRAFT), fit_bigram(TEXTS, NUM_LOGITS)),
  'random': (drafters.random_draft(NUM_DRAFT, NUM_LOGITS), None),
  'constant': (drafters.constant_draft(NUM_DRAFT, NUM_LOGITS, 5), None),
  'always EOS': (drafters.constant_draft(NUM_DRAFT, NUM_LOGITS, EOS), None),
  'a padding id': (drafters.constant_draft(NUM_DRAFT, NUM_LOGITS, 14), None),
  'contrary': (drafters.contrary_draft(TARGET.model, NUM_DRAFT), TARGET.params),
  'counted': (
    drafters.counted(model_draft(TARGET.model, WARP, NUM_DRAFT), half),
    TARGET.params,
  ),
}


@pytest.mark.parametrize('name', CASES)
def test_every_drafter_gives_the_plain_output(name):
  state = speculative(*CASES[name])
  assert_same_output(state, plain())
  rounds_B = np.asarray(state.trace.rounds_B)
  assert (rounds_B <= np.asarray(state.length_B) - 1).all()


def test_block_verification_gives_the_plain_output():
  state = speculative(*CASES['model'], verifier=verify.block_verifier)
  assert_same_output(state, plain())


def test_plain_output_is_the_uncached_argmax():
  state = plain()
  tokens_BS = np.asarray(state.tokens_BS)[:, :MAX_LEN]
  assert len({tuple(row) for row in tokens_BS}) == NUM_ROWS
  slot_BT = jnp.broadcast_to(jnp.arange(1, MAX_LEN)[None], (NUM_ROWS, MAX_LEN - 1))
  cache = TARGET.oracle.init(TARGET.params, sources(), num_slots=MAX_LEN)
  output, _ = jax.jit(TARGET.oracle.extend)(
    TARGET.params, cache, jnp.asarray(tokens_BS[:, :-1]), jnp.zeros(NUM_ROWS, jnp.int32)
  )
  sampling = arguments(None)[-1]
  best_BT = np.asarray(WARP(output.logits_BTV, sampling, slot_BT)).argmax(axis=-1)
  for row, length in enumerate(np.asarray(state.length_B)):
    np.testing.assert_array_equal(tokens_BS[row, 1:length], best_BT[row, : length - 1])


@jax.jit
def wrong_at(position):
  """The target as its own draft, wrong at one position; one compilation for all."""
  drafter = drafters.wrong_at.__wrapped__(CASES['target itself'][0], position)
  return loop.decode.__wrapped__(
    *arguments(types.Params(TARGET.params, TARGET.params)),
    drafter=drafter,
    verifier=verify.token_verifier,
    **STATIC,
  )


@pytest.mark.parametrize('position', range(NUM_DRAFT + 1))
def test_a_rejection_forced_at_each_position(position):
  state = wrong_at(position)
  assert_same_output(state, plain())
  accepted_G = np.asarray(state.trace.accepted_BG).sum(axis=0)
  assert (accepted_G[position:] == 0).all()
  assert (accepted_G[:position] > 0).all()


def test_a_self_draft_is_always_accepted():
  state = speculative(*CASES['target itself'])
  drafted_BG, accepted_BG = map(np.asarray, state.trace[1:3])
  # An EOS inside a block cuts what follows it in the row's last round only.
  cut_B = (drafted_BG - accepted_BG).sum(axis=1)
  ended_by_eos_B = (np.asarray(state.tokens_BS) == EOS).any(axis=1)
  assert (cut_B[~ended_by_eos_B] == 0).all()
  assert (cut_B < NUM_DRAFT + 1).all()
  assert accepted_BG.sum() > 30
