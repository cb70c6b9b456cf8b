"""One teacher-forced pass over the output reproduces every law that was used.

A stale or misplaced key or value changes some row of p; without statistics, this
finds it at the token where it happened.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import loop, rng, types, verify, warp
from specjax.drafters import model_draft
from specjax.testing.tiny_t5 import VOCAB_SIZE, tiny_t5

NUM_ROWS, MAX_LEN, EOS, NUM_DRAFT = 12, 20, 1, 3
TOLERANCE = 1e-5
WARP = warp.make_warp(VOCAB_SIZE, eos_id=EOS)
# Laws that are far from uniform but not point masses: all sources occur.
TARGET = tiny_t5(0, gain=2.0)
DRAFT = tiny_t5(0, gain=1.0)  # the target with a flatter head: agrees often
INPUTS = np.random.default_rng(0).integers(1, VOCAB_SIZE, (NUM_ROWS, 7))
INPUTS[::2, 4:] = 0


@functools.cache
def sampling():
  row = np.arange(NUM_ROWS)
  return warp.make_sampling(
    NUM_ROWS, temperature=0.7 + row / 20, top_k=row % 4 * 3, max_new_tokens=8 + row
  )


def decode(target):
  return loop.decode(
    types.Params(TARGET.params, DRAFT.params),
    jnp.asarray(INPUTS, jnp.int32),
    rng.row_keys(0, jnp.arange(NUM_ROWS)),
    sampling(),
    target=target,
    drafter=model_draft(DRAFT.model, WARP, NUM_DRAFT),
    verifier=verify.block_verifier,
    warp=WARP,
    max_len=MAX_LEN,
    eos_id=EOS,
  )


@jax.jit
def rescored(tokens_BS):
  """log p of the token after each one, by one pass from slot 0."""
  cache = TARGET.model.init(
    TARGET.params, jnp.asarray(INPUTS, jnp.int32), num_slots=tokens_BS.shape[1]
  )
  start_B = jnp.zeros(NUM_ROWS, jnp.int32)
  output, _ = TARGET.model.extend(TARGET.params, cache, tokens_BS, start_B)
  slot_BT = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1])[None] + 1, tokens_BS.shape)
  logp_BTV = WARP(output.logits_BTV, sampling(), slot_BT)
  next_BT1 = jnp.roll(tokens_BS, -1, axis=1)[..., None]
  return jnp.take_along_axis(logp_BTV, next_BT1, axis=-1)[..., 0]


def largest_difference(state):
  """Over all emitted tokens: recorded log p against the re-scored one."""
  recorded_BS = np.asarray(state.trace.logp_BS)[:, 1:]
  again_BS = np.asarray(rescored(state.tokens_BS))[:, :-1]
  emitted_BS = (
    np.arange(1, recorded_BS.shape[1] + 1) < np.asarray(state.length_B)[:, None]
  )
  assert emitted_BS.sum() > 60
  return np.abs(recorded_BS - again_BS)[emitted_BS].max()


@pytest.fixture(scope='module')
def state():
  return decode(TARGET.model)


def test_every_recorded_law_is_that_of_one_pass(state):
  sources = set(np.unique(state.trace.source_BS).tolist())
  assert sources >= {loop.Source.ACCEPTED, loop.Source.CORRECTION, loop.Source.BONUS}
  assert largest_difference(state) < TOLERANCE


def test_a_stale_slot_is_found():
  """The last draft's key and value are not kept, as in a cache cut too short."""

  def extend(params, cache, tokens_BT, start_B):
    output, _ = TARGET.model.extend(params, cache, tokens_BT, start_B)
    _, cache = TARGET.model.extend(params, cache, tokens_BT[:, :-1], start_B)
    return output, cache

  faulty = decode(types.Model(TARGET.model.init, extend))
  assert largest_difference(faulty) > 100 * TOLERANCE
