"""The parameter tree of each layout: names, shapes and axes, golden.

Run as a script it writes the golden file anew.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.t5 import T5Config, Transformer, logical_axes

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 't5' / 'param_trees.json'

_SHAPE = {'vocab_size': 40, 'emb_dim': 16, 'num_heads': 3, 'head_dim': 4, 'mlp_dim': 24}
LAYOUTS = {
  'v1_0': T5Config(
    **_SHAPE,
    num_encoder_layers=2,
    num_decoder_layers=2,
    mlp_activations=('relu',),
    logits_via_embedding=True,
  ),
  'v1_1': T5Config(**_SHAPE, num_encoder_layers=2, num_decoder_layers=2),
  'byt5': T5Config(**_SHAPE, num_encoder_layers=3, num_decoder_layers=1),
}


def param_tree(config):
  tokens_BT = jax.ShapeDtypeStruct((1, 4), jnp.int32)
  params = jax.eval_shape(
    Transformer(config).init, jax.random.key(0), tokens_BT, tokens_BT
  )['params']
  axes = logical_axes(params)
  lines = {}
  for path, leaf in jax.tree.leaves_with_path(params):
    names = [key.key for key in path]
    leaf_axes = axes
    for name in names:
      leaf_axes = leaf_axes[name]
    lines['/'.join(names)] = [list(leaf.shape), list(leaf_axes), str(leaf.dtype)]
  return lines


@pytest.mark.parametrize('layout', LAYOUTS)
def test_param_tree_is_golden(layout):
  golden = json.loads(GOLDEN.read_text())[layout]
  assert param_tree(LAYOUTS[layout]) == golden


@pytest.mark.parametrize('layout', ['v1_0', 'v1_1'])
def test_names_are_those_of_t5x(layout):
  with np.load(GOLDEN.parent / f'random_{layout}_params.npz') as t5x:
    assert set(param_tree(LAYOUTS[layout])) == set(t5x.files)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_each_axis_name_has_one_size(layout):
  sizes = {}
  for shape, axes, _ in param_tree(LAYOUTS[layout]).values():
    assert len(shape) == len(axes)
    for size, axis in zip(shape, axes, strict=True):
      sizes.setdefault(axis, set()).add(size)
  assert sizes == {
    'vocab': {40},
    'embed': {16},
    'joined_kv': {12},
    'mlp': {24},
    'heads': {3},
    'relpos_buckets': {32},
  }


def test_a_foreign_parameter_has_no_axes():
  with pytest.raises(ValueError, match='encoder/adapter/bias'):
    logical_axes({'encoder': {'adapter': {'bias': 0}}})


def test_initial_scales():
  """Variances of T5X's initializers, each within 5 standard errors."""
  config = T5Config(
    vocab_size=500,
    emb_dim=64,
    num_heads=8,
    head_dim=16,
    mlp_dim=256,
    num_encoder_layers=1,
    num_decoder_layers=1,
  )
  tokens_BT = jnp.ones((1, 4), jnp.int32)
  init = jax.jit(Transformer(config).init)
  params = init(jax.random.key(0), tokens_BT, tokens_BT)['params']
  layer = params['decoder']['layers_0']
  # Uniform for the relative embedding, normal and truncated normal elsewhere;
  # the variance of a squared sample is at most 2 sigma^4.
  for value, variance in [
    (params['token_embedder']['embedding'], 1.0),
    (layer['self_attention']['query']['kernel'], 1 / (64 * 16)),
    (layer['self_attention']['key']['kernel'], 1 / 64),
    (layer['encoder_decoder_attention']['value']['kernel'], 1 / 64),
    (layer['self_attention']['out']['kernel'], 1 / 128),
    (layer['mlp']['wi_1']['kernel'], 1 / 64),
    (layer['mlp']['wo']['kernel'], 1 / 256),
    (params['decoder']['logits_dense']['kernel'], 1 / 64),
    (params['decoder']['relpos_bias']['rel_embedding'], 2 / (8 + 32)),
  ]:
    error = abs(float(jnp.mean(value**2)) / variance - 1)
    assert error < 5 * (2 / value.size) ** 0.5
    assert isinstance(value, jax.Array)
  assert bool(jnp.all(layer['pre_mlp_layer_norm']['scale'] == 1))


if __name__ == '__main__':
  blocks = []
  for layout_name, layout_config in LAYOUTS.items():
    leaves = [
      f'  {json.dumps(name)}: {json.dumps(leaf)}'
      for name, leaf in param_tree(layout_config).items()
    ]
    blocks.append(f' "{layout_name}": {{\n' + ',\n'.join(leaves) + '\n }')
  GOLDEN.write_text('{\n' + ',\n'.join(blocks) + '\n}\n')
