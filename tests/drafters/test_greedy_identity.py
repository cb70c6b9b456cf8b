"""At temperature 0 no drafter changes a token: random T5s, ragged batches.

The reference is the plain loop, and the plain loop's is an uncached argmax. The
arithmetic is float32: in bfloat16 passes of other widths may break near-ties
differently. Drafters that can share a compilation do, chosen by a traced index.
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
from specjax.models.table import table_model
from specjax.testing import drafters
from specjax.testing.tiny_t5 import NUM_LOGITS, VOCAB_SIZE, tiny_t5

EOS = 1
MAX_LEN = 24
NUM_ROWS = 6
NUM_DRAFT = 3
WARP = warp.make_warp(VOCAB_SIZE, eos_id=EOS)
TEXTS = [[3, 4, 5, 1], [6, 7, 8, 9, 1]]


@functools.cache
def target():
  return tiny_t5(seed=2)


@functools.cache
def draft():
  return tiny_t5(seed=1, num_layers=1)


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


@functools.cache
def plain():
  return autoregressive.decode(
    *arguments(types.Params(target().params)),
    target=target().model,
    warp=WARP,
    max_len=MAX_LEN,
    eos_id=EOS,
  )


def speculative(
  drafter, draft_params, verifier=verify.token_verifier, decode=loop.decode
):
  return decode(
    *arguments(types.Params(target().params, draft_params)),
    target=target().model,
    drafter=drafter,
    verifier=verifier,
    warp=WARP,
    max_len=MAX_LEN,
    eos_id=EOS,
  )


def assert_same_output(state, expected):
  np.testing.assert_array_equal(state.length_B, expected.length_B)
  np.testing.assert_array_equal(
    state.tokens_BS[:, :MAX_LEN], expected.tokens_BS[:, :MAX_LEN]
  )


def test_plain_output_is_the_uncached_argmax():
  state = plain()
  tokens_BS = np.asarray(state.tokens_BS)[:, :MAX_LEN]
  assert len({tuple(row) for row in tokens_BS}) == NUM_ROWS
  slot_BT = jnp.broadcast_to(jnp.arange(1, MAX_LEN)[None], (NUM_ROWS, MAX_LEN - 1))
  oracle, params = target().oracle, target().params
  cache = oracle.init(params, sources(), num_slots=MAX_LEN)
  fed_BT = jnp.asarray(tokens_BS[:, :-1])
  output, _ = jax.jit(oracle.extend)(params, cache, fed_BT, jnp.zeros(6, jnp.int32))
  sampling = arguments(None)[-1]
  best_BT = np.asarray(WARP(output.logits_BTV, sampling, slot_BT)).argmax(axis=-1)
  for row, length in enumerate(np.asarray(state.length_B)):
    np.testing.assert_array_equal(tokens_BS[row, 1:length], best_BT[row, : length - 1])


@pytest.mark.parametrize(
  ('num_draft', 'verifier'),
  [
    (1, verify.token_verifier),
    (3, verify.token_verifier),
    (7, verify.block_verifier),
  ],
  ids=['1, token', '3, token', '7, block'],
)
def test_model_draft(num_draft, verifier):
  drafter = model_draft(draft().model, WARP, num_draft)
  assert_same_output(speculative(drafter, draft().params, verifier), plain())


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

  drafter = model_draft.__wrapped__(target().model, draft_warp, NUM_DRAFT)
  drafter = drafters.wrong_at.__wrapped__(drafter, position)
  drafter = drafters.counted.__wrapped__(drafter, count)
  return speculative(drafter, target().params, decode=loop.decode.__wrapped__)


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


def test_ten_thousand_tokens_of_tables():
  num_rows, vocab_size, max_len = 256, 12, 41
  logits = np.random.default_rng(0).normal(0, 2, (2, num_rows, 13**2, vocab_size))
  # Each row has a table of its own.
  logits[1] = logits[0] + 0.7 * logits[1]
  model = table_model(vocab_size, 2)
  params = types.Params(*jnp.asarray(logits, jnp.float32))
  inputs = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
  rest = (rng.row_keys(0, inputs[:, 0]), warp.make_sampling(num_rows))
  static = {'target': model, 'warp': warp.make_warp(), 'max_len': max_len, 'eos_id': -1}
  expected = autoregressive.decode(params, inputs, *rest, **static)
  state = loop.decode(
    params,
    inputs,
    *rest,
    drafter=model_draft(model, warp.make_warp(), 4),
    verifier=verify.token_verifier,
    **static,
  )
  np.testing.assert_array_equal(
    state.tokens_BS[:, :max_len], expected.tokens_BS[:, :max_len]
  )
  assert len(np.unique(state.tokens_BS, axis=0)) == num_rows
  accepted = np.asarray(state.trace.accepted_BG).sum()
  assert 0.2 < accepted / np.asarray(state.trace.drafted_BG).sum() < 0.9
