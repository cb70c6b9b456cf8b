"""Logits and greedy tokens agree with those that T5X computed."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.t5 import T5Config, Transformer, t5_model

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 't5'

_RANDOM = {
  'vocab_size': 96,
  'emb_dim': 16,
  'num_heads': 2,
  'head_dim': 8,
  'mlp_dim': 32,
  'num_encoder_layers': 2,
  'num_decoder_layers': 2,
}
CONFIGS = {
  'random_v1_0': T5Config(
    **_RANDOM, mlp_activations=('relu',), logits_via_embedding=True
  ),
  'random_v1_1': T5Config(**_RANDOM),
  't5x_tiny': T5Config(
    vocab_size=32128,
    emb_dim=8,
    num_heads=4,
    head_dim=3,
    mlp_dim=16,
    num_encoder_layers=2,
    num_decoder_layers=2,
  ),
}
EOS = 1


@functools.cache
def load(name):
  with np.load(GOLDEN / f'{name}.npz') as file:
    golden = dict(file)
  params: dict = {}
  with np.load(GOLDEN / f'{name}_params.npz') as file:
    for path in file.files:
      *parents, leaf = path.split('/')
      node = params
      for parent in parents:
        node = node.setdefault(parent, {})
      node[leaf] = jnp.asarray(file[path])
  return golden, params


def assert_golden(logits_BTV, golden):
  assert logits_BTV.dtype == jnp.float32
  logits_BTV = np.asarray(logits_BTV)
  expected = golden['logits_columns']
  np.testing.assert_allclose(
    logits_BTV[..., golden['columns']], expected, rtol=1e-5, atol=1e-5
  )
  np.testing.assert_allclose(
    jax.nn.logsumexp(logits_BTV, axis=-1), golden['logsumexp'], rtol=1e-5, atol=1e-5
  )
  np.testing.assert_array_equal(logits_BTV.argmax(-1), golden['argmax'])


@pytest.mark.parametrize('name', CONFIGS)
def test_teacher_forced_logits(name, optimised_test):
  golden, params = load(name)
  apply = jax.jit(Transformer(CONFIGS[name]).apply)
  logits_BTV = apply(
    {'params': params}, golden['encoder_input_tokens'], golden['decoder_input_tokens']
  )
  assert_golden(logits_BTV, golden)


@pytest.mark.parametrize('name', CONFIGS)
def test_extended_logits(name):
  """The cached path, in three calls, past the largest bucket."""
  golden, params = load(name)
  tokens_BT = golden['decoder_input_tokens']
  batch, length = tokens_BT.shape
  model = t5_model(CONFIGS[name])
  extend = jax.jit(model.extend)
  cache = jax.jit(model.init, static_argnames='num_slots')(
    params, golden['encoder_input_tokens'], num_slots=length + 3
  )
  chunks = []
  for start in range(0, length, 50):
    start_B = jnp.full((batch,), start, jnp.int32)
    output, cache = extend(params, cache, tokens_BT[:, start : start + 50], start_B)
    chunks.append(output.logits_BTV)
  assert_golden(jnp.concatenate(chunks, axis=1), golden)


@pytest.mark.parametrize('name', CONFIGS)
def test_greedy_tokens(name):
  golden, params = load(name)
  inputs_BE = golden['encoder_input_tokens']
  batch = inputs_BE.shape[0]
  num_tokens = golden['greedy_tokens'].shape[1]
  model = t5_model(CONFIGS[name])
  extend = jax.jit(model.extend)
  cache = jax.jit(model.init, static_argnames='num_slots')(
    params, inputs_BE, num_slots=num_tokens
  )
  token_B = np.zeros((batch,), np.int32)
  done_B = np.zeros((batch,), bool)
  emitted = []
  for slot in range(num_tokens):
    start_B = jnp.full((batch,), slot, jnp.int32)
    output, cache = extend(params, cache, token_B[:, None], start_B)
    token_B = np.asarray(output.logits_BTV[:, 0].argmax(-1), np.int32)
    emitted.append(np.where(done_B, 0, token_B))
    done_B |= token_B == EOS
  np.testing.assert_array_equal(np.stack(emitted, axis=1), golden['greedy_tokens'])
