"""The uncached oracle against the cached models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.recompute import recompute_model
from specjax.models.table import table_model
from specjax.testing import tables
from specjax.testing.tiny_t5 import tiny_t5

NUM_SLOTS = 12


def feed(model, params, inputs_BE, chunks):
  """Logits of successive calls; each chunk is `(tokens_BT, start_B)`."""
  extend = jax.jit(model.extend)
  init = jax.jit(model.init, static_argnames='num_slots')
  cache = init(params, inputs_BE, num_slots=NUM_SLOTS)
  logits = []
  for tokens_BT, start_B in chunks:
    output, cache = extend(
      params, cache, jnp.asarray(tokens_BT, jnp.int32), jnp.asarray(start_B, jnp.int32)
    )
    logits.append(np.asarray(output.logits_BTV))
  return logits


# Rows part, roll back, and overwrite what was rejected.
CHUNKS = [
  ([[0, 5], [0, 6]], [0, 0]),
  ([[3, 4, 5], [7, 8, 9]], [2, 1]),
  ([[9, 9, 9, 2], [4, 4, 4, 4]], [3, 2]),
  ([[6], [3]], [7, 5]),
]


@pytest.mark.parametrize('logits_via_embedding', [False, True])
def test_cached_t5_equals_recomputed_t5(logits_via_embedding):
  tiny = tiny_t5(logits_via_embedding=logits_via_embedding)
  inputs_BE = jnp.array([[3, 4, 5, 1], [6, 1, 0, 0]], jnp.int32)
  cached = feed(tiny.model, tiny.params, inputs_BE, CHUNKS)
  oracle = feed(tiny.oracle, tiny.params, inputs_BE, CHUNKS)
  for ours, expected in zip(cached, oracle, strict=True):
    assert np.ptp(expected) > 0.5  # the laws are not trivially equal
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_recomputed_table_equals_table():
  params, _ = (jnp.asarray(table) for table in tables.random_pair(0, 10, order=2))
  table = table_model(10, order=2)

  def apply(params, inputs_BE, decoder_inputs_BS):
    cache = table.init(params, inputs_BE, num_slots=decoder_inputs_BS.shape[1])
    start_B = jnp.zeros(inputs_BE.shape[0], jnp.int32)
    return table.extend(params, cache, decoder_inputs_BS, start_B)[0].logits_BTV

  model = recompute_model(apply)
  inputs_BE = jnp.zeros((2, 1), jnp.int32)
  expected = feed(table, params, inputs_BE, CHUNKS)
  for ours, theirs in zip(
    feed(model, params, inputs_BE, CHUNKS), expected, strict=True
  ):
    np.testing.assert_array_equal(ours, theirs)
  assert recompute_model(apply) is model
