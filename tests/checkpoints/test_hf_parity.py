"""Against transformers itself, wherever it and torch import.

Both sides compute in float32 with the same random parameters: our `hf.write` makes the
folder that transformers loads, and transformers' `save_pretrained` the one that we
open.
"""

import importlib.util
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.checkpoints import hf, leaves
from specjax.core.warp import make_sampling
from specjax.models.t5 import T5Config, Transformer, t5_model

_HAS_BOTH = all(importlib.util.find_spec(name) for name in ('transformers', 'torch'))
pytestmark = [
  pytest.mark.hf,
  pytest.mark.skipif(
    not _HAS_BOTH,
    reason="needs transformers and torch: pip install -e '.[hf,test]'",
  ),
  # Of theirs, on import.
  pytest.mark.filterwarnings('ignore::DeprecationWarning'),
  pytest.mark.filterwarnings('ignore::FutureWarning'),
  pytest.mark.filterwarnings('ignore::UserWarning'),
]

SHAPE = {
  'vocab_size': 64,
  'emb_dim': 32,
  'num_heads': 4,
  'head_dim': 8,
  'mlp_dim': 48,
  'num_encoder_layers': 2,
  'num_decoder_layers': 2,
}
CONFIGS = {
  'v1.0': T5Config(**SHAPE, mlp_activations=('relu',), logits_via_embedding=True),
  'v1.0 untied': T5Config(**SHAPE, mlp_activations=('relu',)),
  'v1.1': T5Config(**SHAPE),
  'v1.1 tied': T5Config(**SHAPE, logits_via_embedding=True),
  'tied, unscaled': T5Config(
    **SHAPE, logits_via_embedding=True, scale_tied_logits=False
  ),
  'unequal depth': T5Config(
    **{**SHAPE, 'num_encoder_layers': 3, 'num_decoder_layers': 1}
  ),
  'as many heads as buckets': T5Config(
    **{**SHAPE, 'num_heads': 8}, relative_attention_num_buckets=8
  ),
  'near distances': T5Config(**SHAPE, relative_attention_max_distance=20),
  'silu': T5Config(**SHAPE, mlp_activations=('silu', 'linear')),
  'plain gelu': T5Config(**SHAPE, mlp_activations=('gelu',)),
}
LENGTH = 150  # past the largest bucket


def random_weights(config, seed=0, embedding=1.0):
  """Well-conditioned: norms near 1, kernels that keep variance, a decisive head."""
  random = np.random.default_rng(seed)
  found = {}
  for name, shape in leaves.expected_shapes(config).items():
    if name.endswith('scale'):
      values = random.normal(1.0, 0.1, shape)
    elif name.endswith('rel_embedding'):
      values = random.normal(0.0, 1.0, shape)
    elif name.endswith('embedding'):
      values = random.normal(0.0, embedding, shape)
    else:
      values = random.normal(0.0, 0.7 * shape[0] ** -0.5, shape)
    found[name] = leaves.array_leaf(values.astype(np.float32))
  return leaves.Weights(config, found, {})


def load(folder, dtype=None):
  import torch
  import transformers

  logging.getLogger('transformers').setLevel(logging.ERROR)
  torch.set_num_threads(1)
  model = transformers.T5ForConditionalGeneration.from_pretrained(
    folder, torch_dtype=dtype or torch.float32
  )
  return model.eval()


def inputs():
  random = np.random.default_rng(3)
  source = random.integers(2, 64, (3, 24)).astype(np.int32)
  source[1, 11:] = source[2, 3:] = 0
  decoder = random.integers(2, 64, (3, LENGTH)).astype(np.int32)
  decoder[:, 0] = 0
  return source, decoder


def their_logits(model, source, decoder):
  import torch

  source, decoder = torch.tensor(source).long(), torch.tensor(decoder).long()
  with torch.no_grad():
    output = model(
      input_ids=source, attention_mask=(source > 0).long(), decoder_input_ids=decoder
    )
  return output.logits.float().numpy()


@pytest.mark.parametrize('name', CONFIGS)
def test_logits_of_what_we_write(tmp_path, name):
  import transformers

  if name == 'tied, unscaled' and transformers.__version__.startswith('4.'):
    pytest.skip('needs transformers 5: 4 scales every tied head')
  weights = random_weights(CONFIGS[name])
  hf.write(tmp_path / 'x', weights)
  theirs = their_logits(load(tmp_path / 'x'), *inputs())
  params = leaves.restore(weights)
  ours = jax.jit(Transformer(CONFIGS[name]).apply)({'params': params}, *inputs())
  scale = np.abs(theirs).max() if CONFIGS[name].logits_via_embedding else 1.0
  assert np.abs(theirs).max() > 0.5
  np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * max(scale, 1.0))


@pytest.mark.parametrize('name', CONFIGS)
def test_their_file_is_ours(tmp_path, name):
  """Saved by transformers again: the tensors are bit-equal, and open to the same."""
  weights = random_weights(CONFIGS[name])
  hf.write(tmp_path / 'ours', weights, shard_bytes=30000)
  load(tmp_path / 'ours').save_pretrained(tmp_path / 'theirs')
  again = hf.open_weights(tmp_path / 'theirs')
  assert again.config == weights.config
  assert {*again.leaves} == {*weights.leaves}
  for key, leaf in weights.leaves.items():
    np.testing.assert_array_equal(
      leaves.read_whole(again.leaves[key]), leaves.read_whole(leaf)
    )
  hf.write(tmp_path / 'single', again)
  single = (tmp_path / 'single' / hf.SINGLE).read_bytes()
  assert single == (tmp_path / 'theirs' / hf.SINGLE).read_bytes()


@pytest.mark.parametrize('name', ['v1.0', 'v1.1', 'unequal depth'])
def test_greedy_tokens_are_those_of_generate(tmp_path, name):
  """The speculative loop's, three drafts a round from another model."""
  import torch

  config = CONFIGS[name]
  # A tied head repeats the last token for ever, unless embeddings are small.
  weights = random_weights(config, seed=5, embedding=0.1)
  hf.write(tmp_path / 'x', weights)
  source, _ = inputs()
  num_tokens = 32
  with torch.no_grad():
    theirs = load(tmp_path / 'x').generate(
      torch.tensor(source).long(),
      attention_mask=torch.tensor(source > 0).long(),
      max_new_tokens=num_tokens,
      do_sample=False,
      num_beams=1,
    )
  theirs = np.pad(theirs.numpy(), ((0, 0), (0, num_tokens + 1 - theirs.shape[1])))
  warp = specjax.make_warp(config.vocab_size, 1)
  draft = random_weights(config, seed=6, embedding=0.1)
  state = specjax.decode(
    specjax.Params(leaves.restore(weights), leaves.restore(draft)),
    jnp.asarray(source),
    specjax.row_keys(0, jnp.arange(3)),
    make_sampling(3, max_new_tokens=num_tokens),
    target=t5_model(config),
    drafter=specjax.model_draft(t5_model(config), warp, 3),
    verifier=specjax.token_verifier,
    warp=warp,
    max_len=num_tokens + 1,
    eos_id=1,
  )
  np.testing.assert_array_equal(state.tokens_BS[:, : num_tokens + 1], theirs)
  assert len({*theirs.ravel().tolist()}) > (2 if config.logits_via_embedding else 5)


def test_padding_and_neighbours(tmp_path):
  """Where their logits differ between batch and single, so would ours."""
  config = CONFIGS['v1.1']
  weights = random_weights(config)
  hf.write(tmp_path / 'x', weights)
  model = load(tmp_path / 'x')
  source, decoder = inputs()
  together = their_logits(model, source, decoder)
  for row, length in enumerate((24, 11, 3)):
    alone = their_logits(model, source[row : row + 1, :length], decoder[row : row + 1])
    np.testing.assert_allclose(alone[0], together[row], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_dtypes_are_theirs(tmp_path, dtype):
  import torch

  hf.write(tmp_path / 'x', random_weights(CONFIGS['v1.1']), dtype=dtype)
  model = load(tmp_path / 'x', 'auto')
  kinds = {values.dtype for name, values in model.named_parameters()}
  assert getattr(torch, dtype) in kinds
  assert json.loads((tmp_path / 'x' / hf.CONFIG).read_text())['torch_dtype'] == dtype
