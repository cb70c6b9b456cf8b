"""Wide passes against narrow ones: zero on tables, rounding on a T5, faults seen."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import types
from specjax.models.table import table_model
from specjax.testing import tables, width
from specjax.testing.tiny_t5 import VOCAB_SIZE, tiny_t5

TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, 4, (3, 8)), jnp.int32)
INPUTS = jnp.ones((3, 5), jnp.int32)


def test_tables_have_no_rounding():
  params = jnp.asarray(tables.random_pair(0, 4, 2)[0])
  assert width.distance(table_model(4, 2), params, INPUTS, TOKENS, 4).max() == 0


def test_a_t5_rounds_and_nothing_else():
  t5 = tiny_t5(0)
  tv_BS = width.distance(t5.model, t5.params, INPUTS, TOKENS % VOCAB_SIZE, 4)
  assert tv_BS.shape == (3, 8)
  assert 0 <= tv_BS.max() < 1e-5


def test_a_model_that_depends_on_the_width_is_seen():
  model = table_model(4, 2)

  def extend(params, cache, tokens_BT, start_B):
    output, cache = model.extend(params, cache, tokens_BT, start_B)
    return types.Output(output.logits_BTV * (1 + 0.01 * tokens_BT.shape[1])), cache

  params = jnp.asarray(tables.random_pair(0, 4, 2)[0])
  tv_BS = width.distance(types.Model(model.init, extend), params, INPUTS, TOKENS, 4)
  assert tv_BS.max() > 1e-3


def test_refuses_a_width_that_does_not_divide():
  params = jnp.asarray(tables.random_pair(0, 4, 2)[0])
  with pytest.raises(ValueError, match='width: 3; must divide'):
    width.distance(table_model(4, 2), params, INPUTS, TOKENS, 3)
