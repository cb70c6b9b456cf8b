"""A draft cut from its target: the same function where what is left out is nothing."""

import dataclasses
import functools

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.leaves import expected_shapes
from specjax.models.t5 import T5Config
from specjax.train import slicing, train

TARGET = T5Config(
  vocab_size=20,
  emb_dim=16,
  num_heads=4,
  head_dim=4,
  mlp_dim=24,
  num_encoder_layers=2,
  num_decoder_layers=3,
  logits_via_embedding=True,
)
KEPT = {'emb_dim': [1, 2, 4, 7, 8, 11], 'heads': [0, 2], 'mlp_dim': [0, 5, 6, 20]}
NARROW = dataclasses.replace(
  TARGET, emb_dim=6, num_heads=2, mlp_dim=4, num_decoder_layers=2
)
SOURCES = jnp.array([[3, 4, 5, 0], [6, 7, 8, 9]])
TARGETS = jnp.array([[11, 12, 13], [14, 15, 16]])


def random_params(config, seed=0):
  """Norms and all, so that no parameter is left at its first value."""
  rnd = np.random.default_rng(seed)
  return {
    name: rnd.uniform(0.5, 1.5, shape) if 'scale' in name else rnd.normal(size=shape)
    for name, shape in expected_shapes(config).items()
  }


def only_kept(flat):
  """The same weights, with nothing in the units that are to be left out."""
  kept = {'embed': KEPT['emb_dim'], 'mlp': KEPT['mlp_dim']}
  kept['joined'] = [head * 4 + i for head in KEPT['heads'] for i in range(4)]

  def keep(array, axis, name):
    mask = np.zeros(array.shape[axis])
    mask[kept[name]] = 1
    return array * np.expand_dims(mask, [i for i in range(array.ndim) if i != axis])

  found = {}
  for name, array in flat.items():
    if name.endswith('embedding') and 'rel' not in name:
      array = keep(array, 1, 'embed')
    elif '/mlp/wi' in name:
      array = keep(array, 1, 'mlp')
    elif '/mlp/wo' in name:
      array = keep(keep(array, 0, 'mlp'), 1, 'embed')
    elif name.endswith('out/kernel'):
      array = keep(keep(array, 0, 'joined'), 1, 'embed')
    elif name.endswith('query/kernel'):
      array = keep(array, 1, 'joined')
    found[name] = array
  return found


@functools.cache
def compiled(config):
  return jax.jit(train.teacher_forcing(config))


def logits(config, params):
  params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
  return np.asarray(compiled(config)(params, SOURCES, TARGETS))


def nested(flat):
  return flax.traverse_util.unflatten_dict(flat, sep='/')


def test_nothing_cut_is_the_target():
  flat = random_params(TARGET)
  whole = slicing.cut(nested(flat), TARGET, TARGET)
  for name, leaf in flax.traverse_util.flatten_dict(whole, sep='/').items():
    np.testing.assert_array_equal(leaf, flat[name].astype(np.float32))


@pytest.mark.parametrize('tied', [True, False])
def test_what_is_left_is_the_same_function(tied):
  """Kept units are those with weight; norms and the head make up for the width."""
  config = dataclasses.replace(TARGET, logits_via_embedding=tied)
  draft = dataclasses.replace(NARROW, logits_via_embedding=tied)
  flat = only_kept(random_params(config))
  # The last decoder layer but one adds nothing, and is the one that is left out.
  for name in flat:
    if 'decoder/layers_1/' in name and name.endswith(('out/kernel', 'wo/kernel')):
      flat[name] = 0 * flat[name]
  cut = slicing.cut(nested(flat), config, draft, decoder_layers=(0, 2))
  shapes = flax.traverse_util.flatten_dict(jax.tree.map(np.shape, cut), sep='/')
  assert shapes == dict(expected_shapes(draft))
  expected = logits(config, nested(flat))
  np.testing.assert_allclose(logits(draft, cut), expected, rtol=2e-4, atol=2e-4)
  other = slicing.cut(nested(flat), config, draft, decoder_layers=(0, 1))
  assert np.abs(logits(draft, other) - expected).max() > 0.1


def test_units_with_most_weight_are_kept_in_order():
  flat = only_kept(random_params(TARGET))
  cut = slicing.cut(nested(flat), TARGET, NARROW)
  embedding = flat['token_embedder/embedding']
  np.testing.assert_allclose(
    cut['token_embedder']['embedding'], embedding[:, KEPT['emb_dim']], rtol=1e-6
  )
  bias = flat['decoder/relpos_bias/rel_embedding']
  np.testing.assert_allclose(
    cut['decoder']['relpos_bias']['rel_embedding'], bias[KEPT['heads']], rtol=1e-6
  )
  wi = flat['decoder/layers_2/mlp/wi_1/kernel'][KEPT['emb_dim']][:, KEPT['mlp_dim']]
  np.testing.assert_allclose(
    cut['decoder']['layers_1']['mlp']['wi_1']['kernel'], wi, rtol=1e-6
  )


@pytest.mark.parametrize(
  ('fields', 'layers', 'message'),
  [
    ({'mlp_dim': 25}, (), 'mlp_dim: 25 of the draft, 24 of the target; give no more'),
    ({'num_encoder_layers': 3}, (), 'num_encoder_layers: 3 of the draft, 2 of'),
    ({'mlp_activations': ('relu',)}, (), "mlp_activations: ('relu',) of the draft"),
    ({}, (0, 3), 'decoder_layers: (0, 3); give 2 of the layers 0 to 2'),
    ({}, (0,), 'decoder_layers: (0,); give 2 of the layers 0 to 2'),
  ],
)
def test_what_can_not_be_cut_is_said(fields, layers, message):
  draft = dataclasses.replace(NARROW, **fields)
  with pytest.raises(ValueError, match=r'; ') as caught:
    slicing.cut(nested(random_params(TARGET)), TARGET, draft, decoder_layers=layers)
  assert str(caught.value).startswith(message)
