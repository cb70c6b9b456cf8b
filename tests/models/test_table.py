"""The Markov toy: contexts, chunks, rollback, sources."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.table import table_model, write_slots
from specjax.testing import tables

VOCAB_SIZE = 3


def teacher_forced(logits_CV, order, tokens_S):
  """Logits by slot, from the definition."""
  law = tables.conditional(logits_CV, order)
  return np.log([law(tuple(tokens_S[1 : s + 1])) for s in range(len(tokens_S))])


@pytest.fixture
def tokens_BS():
  return np.random.default_rng(0).integers(0, VOCAB_SIZE, (4, 9)).astype(np.int32)


@pytest.mark.parametrize('order', [0, 1, 2, 3])
@pytest.mark.parametrize('chunks', [(9,), (1,) * 9, (2, 1, 4, 2), (5, 4)])
def test_any_split_equals_one_pass(tokens_BS, order, chunks):
  params, _ = tables.random_pair(0, VOCAB_SIZE, order)
  model = table_model(VOCAB_SIZE, order)
  cache = model.init(params, jnp.zeros((4, 1), jnp.int32), num_slots=12)
  start, logits = 0, []
  for width in chunks:
    start_B = jnp.full(4, start, jnp.int32)
    output, cache = model.extend(
      jnp.asarray(params), cache, tokens_BS[:, start : start + width], start_B
    )
    logits.append(output.logits_BTV)
    start += width
  expected = [teacher_forced(params, order, tokens_S) for tokens_S in tokens_BS]
  np.testing.assert_allclose(jnp.concatenate(logits, axis=1), expected, atol=1e-5)


def test_rows_at_their_own_slots_and_rollback(tokens_BS):
  params, _ = tables.random_pair(0, VOCAB_SIZE, order=2)
  model = table_model(VOCAB_SIZE, order=2)
  cache = model.init(params, jnp.zeros((4, 1), jnp.int32), num_slots=12)
  # Wrong drafts everywhere, then the right tokens from another slot in each row.
  _, cache = model.extend(
    jnp.asarray(params), cache, (tokens_BS + 1) % VOCAB_SIZE, jnp.zeros(4, jnp.int32)
  )
  _, cache = model.extend(
    jnp.asarray(params), cache, tokens_BS[:, :5], jnp.zeros(4, jnp.int32)
  )
  start_B = np.array([5, 3, 1, 4], np.int32)
  fed_BT = np.stack([row[s : s + 3] for row, s in zip(tokens_BS, start_B, strict=True)])
  output, cache = model.extend(jnp.asarray(params), cache, fed_BT, jnp.asarray(start_B))
  for row, s in enumerate(start_B):
    expected = teacher_forced(params, 2, tokens_BS[row])[s : s + 3]
    np.testing.assert_allclose(output.logits_BTV[row], expected, atol=1e-5)
  assert (cache.tokens_BS[0, 5:8] == tokens_BS[0, 5:8]).all()


@pytest.mark.parametrize('start_id', [0, 2])
def test_the_start_token_does_not_matter(start_id):
  params, _ = tables.random_pair(0, VOCAB_SIZE, order=2)
  model = table_model(VOCAB_SIZE, order=2)
  cache = model.init(params, jnp.zeros((1, 1), jnp.int32), num_slots=4)
  fed_BT = jnp.array([[start_id, 1]], jnp.int32)
  output, _ = model.extend(jnp.asarray(params), cache, fed_BT, jnp.zeros(1, jnp.int32))
  before = VOCAB_SIZE + 1
  np.testing.assert_array_equal(
    output.logits_BTV[0], [params[3 + 3 * before], params[1 + 3 * before]]
  )


def test_garbage_slots_change_the_logits_if_read():
  params, _ = tables.random_pair(0, VOCAB_SIZE, order=2)
  model = table_model(VOCAB_SIZE, order=2)
  cache = model.init(params, jnp.zeros((1, 1), jnp.int32), num_slots=8)
  assert len(np.unique(cache.tokens_BS)) == VOCAB_SIZE
  # Feeding slot 5 before slot 4: the context is (garbage, token).
  output, _ = model.extend(
    jnp.asarray(params), cache, jnp.array([[1]], jnp.int32), jnp.array([5], jnp.int32)
  )
  garbage = int(cache.tokens_BS[0, 4])
  row = params[1 + garbage * (VOCAB_SIZE + 1)]
  np.testing.assert_array_equal(output.logits_BTV[0, 0], row)


def test_sources_choose_the_table():
  kinds = np.stack([tables.random_pair(seed, VOCAB_SIZE)[0] for seed in range(2)])
  model = table_model(VOCAB_SIZE)
  inputs_BE = jnp.array([[4], [5], [0]], jnp.int32)
  cache = model.init(kinds, inputs_BE, num_slots=4)
  output, _ = model.extend(
    jnp.asarray(kinds), cache, jnp.zeros((3, 1), jnp.int32), jnp.zeros(3, jnp.int32)
  )
  np.testing.assert_array_equal(output.logits_BTV[:, 0], kinds[[0, 1, 0], 3])


def test_write_slots_drops_what_does_not_fit():
  cache_BS = jnp.arange(6, dtype=jnp.int32)[None]
  new_BT = jnp.array([[10, 11, 12]], jnp.int32)
  written = write_slots(cache_BS, new_BT, jnp.array([4], jnp.int32))
  assert written.tolist() == [[0, 1, 2, 3, 10, 11]]


def test_same_arguments_give_the_same_model():
  assert table_model(3, 2) is table_model(3, 2)
  assert table_model(3, 2) != table_model(3, 1)
