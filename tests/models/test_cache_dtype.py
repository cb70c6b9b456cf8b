"""Keys and values may be kept in another dtype than that of the activations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import PairConfig
from specjax.load import load_pair
from specjax.models.t5 import t5_model
from specjax.testing import tiny_pair
from specjax.testing.tiny_t5 import tiny_t5
from specjax.testing.width import logits_by_width


@pytest.fixture(scope='module')
def tiny():
  return tiny_t5(num_layers=1)


def test_the_cache_is_half_as_large(tiny):
  inputs_BE = jnp.ones((2, 5), jnp.int32)
  full, half = (
    jax.eval_shape(
      lambda params, model=model: model.init(params, inputs_BE, num_slots=9),
      tiny.params,
    )
    for model in (tiny.model, t5_model(tiny.config, 'bfloat16'))
  )
  assert {leaf.dtype for leaf in jax.tree.leaves(full)} == {jnp.dtype('float32')}
  kept = jax.tree.leaves((half.sources, half.slots))
  assert {leaf.dtype for leaf in kept} == {jnp.dtype('bfloat16')}
  # Padding is still hidden in float32.
  assert half.source_bias.dtype == jnp.float32


def test_wide_and_narrow_passes_have_one_law_near_the_full_one(tiny):
  model = t5_model(tiny.config, 'bfloat16')
  inputs_BE = jnp.asarray([[3, 5, 7, 2], [4, 9, 0, 0]], jnp.int32)
  tokens_BS = jnp.asarray([[0, 3, 4, 5], [0, 9, 9, 2]], jnp.int32)
  wide, narrow, full = (
    np.asarray(logits_by_width(m, tiny.params, inputs_BE, tokens_BS, width=width))
    for m, width in ((model, 4), (model, 1), (tiny.model, 4))
  )
  assert wide.dtype == np.float32
  np.testing.assert_allclose(wide, narrow, atol=1e-4)
  # bfloat16 has 8 bits: a key or value is off by 0.4% at most.
  assert 1e-4 < np.std(wide - full) / np.std(full) < 0.01


def test_models_are_the_same_object_for_the_same_dtype(tiny):
  assert t5_model(tiny.config, 'float32') is tiny.model
  assert t5_model(tiny.config, 'bfloat16') is t5_model(tiny.config, 'bfloat16')


def test_a_pair_is_told(tmp_path):
  blank = tiny_pair.blank_t5(tiny_pair.NUM_LOGITS)
  folder = tiny_pair.write_tiny_pair(tmp_path, target=blank, draft=blank)
  pair = load_pair(folder, cache_dtype='bfloat16')
  assert pair.target is t5_model(pair.target_config, 'bfloat16')
  assert load_pair(folder, cache_dtype='float32').target is load_pair(folder).target
  with pytest.raises(ValueError, match=r"cache_dtype: 'int8' is unknown"):
    load_pair(folder, cache_dtype='int8')
  with pytest.raises(ValueError, match=r"cache_dtype: 'int8' is unknown"):
    PairConfig(cache_dtype='int8')
