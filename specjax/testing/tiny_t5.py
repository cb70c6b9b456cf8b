"""Random T5s of a few thousand parameters, with the whole architecture."""

import functools
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.leaves import expected_shapes
from specjax.core import types
from specjax.models import recompute
from specjax.models.t5 import T5Config, Transformer, t5_model

VOCAB_SIZE = 12  # real ids; the embedding is padded
NUM_LOGITS = 16


class TinyT5(NamedTuple):
  """A random T5.

  Attributes:
    config: its shape.
    params: its parameters, float32.
    model: the cached model.
    oracle: the same function without a cache, recomputed at every call.
  """

  config: T5Config
  params: Any
  model: types.Model
  oracle: types.Model


def tiny_t5(
  seed: int = 0, num_layers: int = 2, gain: float = 8.0, **overrides: Any
) -> TinyT5:
  """A T5 with 16 logits (12 real ids), D 16, 2 heads of 8, F 32.

  Args:
    seed: of the parameters.
    num_layers: of the encoder and of the decoder; 2 for a target, 1 for a draft.
    gain: scales the head, since the laws of an untrained T5 are nearly uniform.
    **overrides: fields of `T5Config`.

  Returns:
    The `TinyT5`; equal arguments give equal parameters and identical functions.
  """
  fields = {
    'vocab_size': NUM_LOGITS,
    'emb_dim': 16,
    'num_heads': 2,
    'head_dim': 8,
    'mlp_dim': 32,
    'num_encoder_layers': num_layers,
    'num_decoder_layers': num_layers,
    **overrides,
  }
  config = T5Config(**fields)
  params = jax.tree.map(lambda leaf: leaf, _init(config, seed))  # the dicts are new
  if not config.logits_via_embedding:
    head = params['decoder']['logits_dense']
    head['kernel'] = head['kernel'] * gain
  oracle = recompute.recompute_model(_apply(config))
  return TinyT5(config, params, t5_model(config), oracle)


@functools.cache
def _init(config: T5Config, seed: int) -> Any:
  """By the laws of the network's initialisers, which take seconds to compile."""
  generator = np.random.default_rng(seed)

  def draw(name, shape):
    *_, module, leaf = name.split('/')
    if leaf == 'scale':
      return np.ones(shape)
    if leaf == 'embedding':
      return generator.normal(size=shape)
    if leaf == 'rel_embedding':
      return generator.uniform(-1, 1, shape) * np.sqrt(6 / sum(shape))
    fan_in = shape[0] * (config.head_dim if module == 'query' else 1)
    return generator.normal(size=shape) / np.sqrt(fan_in)

  params = {
    name: jnp.asarray(draw(name, shape), jnp.float32)
    for name, shape in expected_shapes(config).items()
  }
  return flax.traverse_util.unflatten_dict(params, sep='/')


@functools.cache
def _apply(config: T5Config):
  module = Transformer(config)

  def apply(params, inputs_BE, decoder_inputs_BS):
    return module.apply({'params': params}, inputs_BE, decoder_inputs_BS)

  return apply
