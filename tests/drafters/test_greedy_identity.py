"""At temperature 0 no drafter changes a token: random T5s, ragged batches.

The reference is the plain loop, and the plain loop's is an uncached argmax. Every
drafter is held against it on more than 10,000 tokens, a draft model with every
gamma from 1 to 7. The arithmetic is float32: in bfloat16 passes of other widths may
break near-ties differently. Drafters that can share a compilation do, chosen by a
traced index.
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
NUM_ROWS = 640  # so that every drafter is held against more than 10,000 tokens
NUM_DRAFT = 3
WARP = warp.make_warp(VOCAB_SIZE, eos_id=EOS)
TEXTS = [[3, 4, 5, 1], [6, 7, 8, 9, 1]]


TARGET = tiny_t5(seed=2)


@functools.cache
def draft_params():
  """The target's, with noise: a draft that is right about half of the time."""
  random = np.random.default_rng(1)
  return jax.tree.map(
    lambda x: x * random.normal(1, 0.15, x.shape).astype(np.float32), TARGET.params
  )


@functools.cache
def sources():
  """Ragged rows, of one to nine tokens."""
  random = np.random.default_rng(0)
  inputs_BE = random.integers(2, VOCAB_SIZE, (NUM_ROWS, 9))
  length_B1 = random.permutation(np.arange(NUM_ROWS) % 9 + 1)[:, None]
  return np.where(np.arange(9) < length_B1, inputs_BE, 0).astype(np.int32)


def arguments(params):
  # Budgets differ as well, and so does gamma, from 1 to what the drafter has.
  row_B = np.arange(NUM_ROWS)
  sampling = warp.make_sampling(
    NUM_ROWS,
    max_new_tokens=np.where(row_B % 5, MAX_LEN - 1, 2 + row_B % 21),
    min_new_tokens=np.where(row_B % 3, 16, row_B % 16),
    num_draft=row_B % 7 + 1,
  )
  return params, jnp.asarray(sources()), rng.row_keys(0, jnp.arange(NUM_ROWS)), sampling


@functools.cache
def plain():
  return autoregressive.decode(
    *arguments(types.Params(TARGET.params)),
    target=TARGET.model,
    warp=WARP,
    max_len=MAX_LEN,
    eos_id=EOS,
  )


def speculative(
  drafter, draft_params, verifier=verify.token_verifier, decode=loop.decode
):
  return decode(
    *arguments(types.Params(TARGET.params, draft_params)),
    target=TARGET.model,
    drafter=drafter,
    verifier=verifier,
    warp=WARP,
    max_len=MAX_LEN,
    eos_id=EOS,
  )


def assert_same_output(state, expected):
  assert (np.asarray(expected.length_B) - 1).sum() >= 10_000
  np.testing.assert_array_equal(state.length_B, expected.length_B)
  np.testing.assert_array_equal(
    state.tokens_BS[:, :MAX_LEN], expected.tokens_BS[:, :MAX_LEN]
  )


def test_plain_output_is_the_uncached_argmax():
  state = plain()
  tokens_BS = np.asarray(state.tokens_BS)[:, :MAX_LEN]
  assert len({tuple(row) for row in tokens_BS}) > NUM_ROWS / 2
  slot_BT = jnp.broadcast_to(jnp.arange(1, MAX_LEN)[None], (NUM_ROWS, MAX_LEN - 1))
  oracle, params = TARGET.oracle, TARGET.params
  cache = oracle.init(params, jnp.asarray(sources()), num_slots=MAX_LEN)
  fed_BT = jnp.asarray(tokens_BS[:, :-1])
  start_B = jnp.zeros(NUM_ROWS, jnp.int32)
  output, _ = jax.jit(oracle.extend)(params, cache, fed_BT, start_B)
  sampling = arguments(None)[-1]
  best_BT = np.asarray(WARP(output.logits_BTV, sampling, slot_BT)).argmax(axis=-1)
  for row, length in enumerate(np.asarray(state.length_B)):
    np.testing.assert_array_equal(tokens_BS[row, 1:length], best_BT[row, : length - 1])


VERIFIERS = (verify.token_verifier, verify.block_verifier)


@functools.partial(jax.jit, static_argnums=2)
def decode_model(rule, params, num_draft):
  def verifier(*args):
    return jax.lax.switch(rule, VERIFIERS, *args)

  drafter = model_draft(TARGET.model, WARP, num_draft)
  return speculative(drafter, params, verifier, loop.decode.__wrapped__)


@pytest.mark.parametrize('rule', range(len(VERIFIERS)), ids=['token', 'block'])
@pytest.mark.parametrize('num_draft', [1, 7])
def test_model_draft_with_every_gamma(num_draft, rule):
  state = decode_model(rule, draft_params(), num_draft)
  assert_same_output(state, plain())
  # Rows propose 1..7 tokens a round: all of these, and no more.
  gamma_B = np.minimum(np.arange(NUM_ROWS) % 7 + 1, num_draft)
  drafted_BG = np.asarray(state.trace.drafted_BG)
  for gamma in range(1, num_draft + 1):
    drafted_G = drafted_BG[gamma_B == gamma].sum(axis=0)
    assert np.count_nonzero(drafted_G) == gamma
  assert 0.05 < np.asarray(state.trace.accepted_BG).sum() / drafted_BG.sum() < 0.95


def test_ngram_draft():
  assert_same_output(speculative(ngram_draft(5, NUM_LOGITS), None), plain())


def stateless_drafters():
  """Those that keep nothing, and their parameters."""
  constant = functools.partial(drafters.constant_draft, NUM_DRAFT, NUM_LOGITS)
  return {
    'unigram': (unigram_draft(WARP, NUM_DRAFT), fit_unigram(TEXTS, NUM_LOGITS)),
    'bigram': (bigram_draft(WARP, NUM_DRAFT), fit_bigram(TEXTS, NUM_LOGITS)),
    'random': (drafters.random_draft(NUM_DRAFT, NUM_LOGITS), None),
    'constant': (constant(5), None),
    'always EOS': (constant(EOS), None),
    'a padding id': (constant(14), None),
  }


STATELESS = ('unigram', 'bigram', 'random', 'constant', 'always EOS', 'a padding id')


@jax.jit
def decode_stateless(index):
  branches = [
    functools.partial(
      lambda drafter, params, *args: drafter.propose(params, *args),
      drafter,
      None if params is None else jnp.asarray(params),
    )
    for drafter, params in stateless_drafters().values()
  ]
  any_of_them = drafters.random_draft(NUM_DRAFT, NUM_LOGITS)
  drafter = any_of_them._replace(
    propose=lambda params, *args: jax.lax.switch(index, branches, *args)
  )
  return speculative(drafter, None, decode=loop.decode.__wrapped__)


@pytest.mark.parametrize('name', STATELESS)
def test_stateless_drafts(name):
  names = list(stateless_drafters())
  assert sorted(names) == sorted(STATELESS)
  assert_same_output(decode_stateless(names.index(name)), plain())


@jax.jit
def decode_self(position, contrary, varying):
  """The target as its own draft, spoilt as the traced arguments say.

  Args:
    position: where the draft is wrong; NUM_DRAFT for nowhere.
    contrary: propose the least likely id instead.
    varying: propose 0, 1, 2, .. drafts in turn instead of all.
  """

  def draft_warp(logits_BTV, sampling, slot_BT):
    spoilt_BTV = jnp.where(contrary, -logits_BTV, logits_BTV)
    return WARP(spoilt_BTV, sampling, slot_BT)

  def count(length_B):
    return jnp.where(varying, length_B % (NUM_DRAFT + 1), NUM_DRAFT)

  drafter = model_draft.__wrapped__(TARGET.model, draft_warp, NUM_DRAFT)
  drafter = drafters.wrong_at.__wrapped__(drafter, position)
  drafter = drafters.counted.__wrapped__(drafter, count)
  return speculative(drafter, TARGET.params, decode=loop.decode.__wrapped__)


@pytest.mark.parametrize('position', range(NUM_DRAFT))
def test_a_rejection_forced_at_each_position(position):
  state = decode_self(position, False, False)
  assert_same_output(state, plain())
  accepted_G = np.asarray(state.trace.accepted_BG).sum(axis=0)
  assert (accepted_G[position:] == 0).all()
  assert (accepted_G[:position] > 0).all()


def test_a_self_draft_is_always_accepted():
  state = decode_self(NUM_DRAFT, False, False)
  assert_same_output(state, plain())
  lost_B = np.asarray(state.trace.drafted_BG - state.trace.accepted_BG).sum(axis=1)
  # An EOS inside a block cuts what follows it, in the row's last round only.
  ended_by_eos_B = (np.asarray(state.tokens_BS) == EOS).any(axis=1)
  assert (lost_B[~ended_by_eos_B] == 0).all()
  assert (lost_B < NUM_DRAFT).all()
  assert np.asarray(state.trace.accepted_BG).sum() > 30


def test_a_number_of_drafts_that_varies():
  state = decode_self(NUM_DRAFT, False, True)
  assert_same_output(state, plain())
  drafted_G = np.asarray(state.trace.drafted_BG).sum(axis=0)
  assert drafted_G[0] > drafted_G[-1] > 0


def test_a_contrary_draft():
  state = decode_self(NUM_DRAFT, True, False)
  assert_same_output(state, plain())
  assert np.asarray(state.trace.accepted_BG).sum() == 0
