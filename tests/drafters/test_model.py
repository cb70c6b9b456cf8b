"""The model drafter: calls, laws, and a cache that never lags."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import rng, types, warp
from specjax.drafters import model_draft
from specjax.models.table import table_model
from specjax.testing import chi_square, tables

VOCAB_SIZE = 4
ORDER = 2
NUM_SLOTS = 12
WARP = warp.make_warp()
MODEL = table_model(VOCAB_SIZE, ORDER)
LOGITS_CV, _ = tables.random_pair(0, VOCAB_SIZE, ORDER)
TEXT = [0, 3, 1, 2, 2, 0, 1, 3, 3]


def history(length_B, temperature=1.0):
  tokens_BS = np.full((len(length_B), NUM_SLOTS), 1, np.int32)
  for row, length in enumerate(length_B):
    tokens_BS[row, :length] = TEXT[:length]
  sampling = warp.make_sampling(len(length_B), temperature=temperature)
  return types.History(jnp.asarray(tokens_BS), jnp.asarray(length_B), sampling)


def draft_of(history, num_draft, warp=WARP, cache=None, seed=0):
  drafter = model_draft(MODEL, warp, num_draft)
  num_rows = history.length_B.shape[0]
  if cache is None:
    inputs_BE = jnp.zeros((num_rows, 1), jnp.int32)
    cache = drafter.init(LOGITS_CV, inputs_BE, num_slots=NUM_SLOTS)
    # What the rounds before have left there; the last two are not fed yet.
    tokens_BS = np.array(cache.tokens_BS)
    for row, length in enumerate(history.length_B.tolist()):
      tokens_BS[row, : max(length - 2, 0)] = TEXT[: max(length - 2, 0)]
    cache = cache._replace(tokens_BS=jnp.asarray(tokens_BS))
  key_B = rng.row_keys(seed, jnp.arange(num_rows))
  return jax.jit(drafter.propose)(jnp.asarray(LOGITS_CV), cache, key_B, history)


@pytest.mark.parametrize('num_draft', [1, 2, 4])
@pytest.mark.parametrize('temperature', [0.0, 0.7, 1.0])
def test_recorded_laws_are_the_models_laws(num_draft, temperature):
  # Lengths 1 and 2 are where the last two tokens do not exist or just do.
  length_B = [1, 2, 3, 8]
  draft, _ = draft_of(history(length_B, temperature), num_draft)
  law = tables.conditional(LOGITS_CV, ORDER, temperature)
  for row, length in enumerate(length_B):
    prefix = tuple(TEXT[1:length])
    for i in range(num_draft):
      context = (*prefix, *draft.tokens_BG[row, :i].tolist())
      np.testing.assert_allclose(
        np.exp(draft.logq_BGV[row, i]), law(context), atol=1e-6
      )


def test_drafts_follow_the_recorded_law():
  num_rows = 20_000
  draft, _ = draft_of(history([3] * num_rows), 2)
  law = tables.conditional(LOGITS_CV, ORDER)
  prefix = tuple(TEXT[1:3])
  joint = np.array(
    [law(prefix)[x] * law((*prefix, x))[y] for x in range(4) for y in range(4)]
  )
  pairs_B = np.asarray(draft.tokens_BG[:, 0] * 4 + draft.tokens_BG[:, 1])
  chi_square.assert_law(np.bincount(pairs_B, minlength=16), joint, 1e-6)


def test_the_first_call_repairs_the_slot_of_the_last_draft():
  # After a full acceptance the slot at length - 2 was never fed.
  seen = history([7])
  drafter = model_draft(MODEL, WARP, 2)
  cache = drafter.init(LOGITS_CV, jnp.zeros((1, 1), jnp.int32), num_slots=NUM_SLOTS)
  cache = cache._replace(tokens_BS=cache.tokens_BS.at[0, :5].set(jnp.array(TEXT[:5])))
  draft, cache = draft_of(seen, 2, cache=cache)
  assert cache.tokens_BS[0, :7].tolist() == TEXT[:7]
  assert cache.tokens_BS[0, 7] == draft.tokens_BG[0, 0]


@pytest.mark.parametrize('num_draft', [1, 2, 5])
def test_one_model_call_for_each_draft(num_draft):
  widths = []

  def extend(params, cache, tokens_BT, start_B):
    jax.debug.callback(lambda: widths.append(tokens_BT.shape[1]))
    return MODEL.extend(params, cache, tokens_BT, start_B)

  counting = types.Model(MODEL.init, extend)
  drafter = model_draft(counting, WARP, num_draft)
  cache = drafter.init(LOGITS_CV, jnp.zeros((1, 1), jnp.int32), num_slots=NUM_SLOTS)
  key_B = rng.row_keys(0, jnp.arange(1))
  jax.jit(drafter.propose)(jnp.asarray(LOGITS_CV), cache, key_B, history([3]))
  jax.effects_barrier()
  assert widths == [2] + [1] * (num_draft - 1)


def sharpened(logits_BTV, sampling, slot_BT):
  cooler = sampling._replace(temperature_B=sampling.temperature_B * 0.5)
  return WARP(logits_BTV, cooler, slot_BT)


def test_the_draft_may_have_a_warp_of_its_own():
  draft, _ = draft_of(history([3, 8]), 2, warp=sharpened)
  law = tables.conditional(LOGITS_CV, ORDER, temperature=0.5)
  np.testing.assert_allclose(
    np.exp(draft.logq_BGV[1, 0]), law(tuple(TEXT[1:8])), atol=1e-6
  )


def test_keys_differ_by_position_and_by_row():
  flat = jnp.zeros((1, VOCAB_SIZE))
  model = table_model(VOCAB_SIZE, 0)
  drafter = model_draft(model, WARP, 4)
  seen = history([3] * 64)
  cache = drafter.init(flat, jnp.zeros((64, 1), jnp.int32), num_slots=NUM_SLOTS)
  key_B = rng.row_keys(0, jnp.arange(64))
  draft, _ = jax.jit(drafter.propose)(flat, cache, key_B, seen)
  assert len(np.unique(draft.tokens_BG, axis=0)) > 32
  assert (draft.tokens_BG[:, 0] != draft.tokens_BG[:, 1]).mean() > 0.5


def test_refuses_zero_drafts():
  with pytest.raises(ValueError, match='num_draft=0'):
    model_draft(MODEL, WARP, 0)
