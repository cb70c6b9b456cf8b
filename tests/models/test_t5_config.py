"""T5Config: published shapes, validation, the way to JSON and back."""

import json
import math

import jax
import jax.numpy as jnp
import pytest

from specjax.models.t5 import SIZES, T5Config, Transformer

TINY = {
  'vocab_size': 40,
  'emb_dim': 16,
  'num_heads': 2,
  'head_dim': 8,
  'mlp_dim': 24,
  'num_encoder_layers': 2,
  'num_decoder_layers': 1,
}

# As counted by others on the published checkpoints.
NUM_PARAMS = {
  't5_1_0_small': 60_506_624,
  't5_1_0_base': 222_903_552,
  't5_1_0_large': 737_668_096,
  't5_1_0_3b': 2_851_598_336,
  't5_1_0_11b': 11_307_321_344,
  't5_1_1_small': 76_961_152,
  't5_1_1_base': 247_577_856,
  't5_1_1_large': 783_150_080,
  't5_1_1_xl': 2_849_757_184,
  't5_1_1_xxl': 11_135_332_352,
  'mt5_small': 300_176_768,
  'mt5_base': 582_401_280,
  'mt5_large': 1_229_581_312,
  'mt5_xl': 3_742_619_648,
  'mt5_xxl': 12_921_057_280,
  'byt5_small': 299_637_760,
  'byt5_base': 581_653_248,
  'byt5_large': 1_228_183_552,
  'byt5_xl': 3_737_801_728,
  'byt5_xxl': 12_906_899_328,
}


def test_every_published_size_is_counted():
  assert set(SIZES) == set(NUM_PARAMS)


@pytest.mark.parametrize('name', sorted(SIZES))
def test_published_size_has_the_published_number_of_parameters(name):
  config = T5Config.from_size(name)
  # One layer of each stack is traced, the others are equal to it.
  shallow = T5Config.from_size(name, num_encoder_layers=1, num_decoder_layers=1)
  tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
  params = jax.eval_shape(Transformer(shallow).init, jax.random.key(0), tokens, tokens)

  def count(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))

  num_params = count(params)
  for stack, depth in (
    ('encoder', config.num_encoder_layers),
    ('decoder', config.num_decoder_layers),
  ):
    num_params += (depth - 1) * count(params['params'][stack]['layers_0'])
  assert num_params == NUM_PARAMS[name]


def test_byt5_has_unequal_depths():
  config = T5Config.from_size('byt5_xxl', dtype='bfloat16')
  assert (config.num_encoder_layers, config.num_decoder_layers) == (36, 12)
  assert config.dtype == 'bfloat16'


def test_survives_json():
  config = T5Config(
    **TINY, mlp_activations=('relu',), logits_via_embedding=True, dtype='bfloat16'
  )
  again = T5Config.from_dict(json.loads(json.dumps(config.to_dict())))
  assert again == config
  assert hash(again) == hash(config)


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('vocab_size', 0),
    ('emb_dim', -1),
    ('num_heads', 2.0),
    ('head_dim', '8'),
    ('mlp_dim', True),
    ('num_encoder_layers', 0),
    ('num_decoder_layers', None),
    ('mlp_activations', ('gelu', 'linear', 'relu')),
    ('mlp_activations', ()),
    ('mlp_activations', 'relu'),
    ('mlp_activations', ('swish',)),
    ('logits_via_embedding', 1),
    ('relative_attention_num_buckets', 2),
    ('relative_attention_num_buckets', 31),
    ('relative_attention_max_distance', 16),
    ('dtype', 'float64'),
  ],
)
def test_bad_field_is_named_with_its_value(field, value):
  with pytest.raises(ValueError, match=field) as error:
    T5Config(**{**TINY, field: value})
  assert repr(value) in str(error.value)
  assert '\n' not in str(error.value)


def test_float16_is_refused_with_reason_and_remedy():
  with pytest.raises(ValueError, match=r'float16.*65504.*bfloat16'):
    T5Config(**TINY, dtype='float16')


def test_unknown_names_get_near_names():
  with pytest.raises(ValueError, match='t5_1_1_small'):
    T5Config.from_size('t5-1-1-small')
  with pytest.raises(ValueError, match=r'num_head.*did you mean num_heads'):
    T5Config.from_dict({**TINY, 'num_head': 2})
  with pytest.raises(ValueError, match='lacks the fields emb_dim'):
    T5Config.from_dict({k: v for k, v in TINY.items() if k != 'emb_dim'})
