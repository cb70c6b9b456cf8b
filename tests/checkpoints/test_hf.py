"""Hugging Face folders: logits against transformers' own, round trips, bad files."""

import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import specjax
from specjax.checkpoints import files, hf, leaves, names, tensors
from specjax.core.warp import make_sampling
from specjax.models.t5 import T5Config, Transformer, t5_model

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'hf'
MODELS = ('v1_0', 'v1_1', 'square')
TINY = {
  'vocab_size': 16,
  'emb_dim': 8,
  'num_heads': 2,
  'head_dim': 4,
  'mlp_dim': 12,
  'num_encoder_layers': 1,
  'num_decoder_layers': 2,
}


@functools.cache
def golden(name):
  return {
    **np.load(GOLDEN / name / 'golden.npz'),
    'float64': np.load(GOLDEN / name / 'float64.npz')['logits'],
  }


@functools.cache
def opened(name):
  weights = hf.open_weights(GOLDEN / name)
  return weights.config, leaves.restore(weights)


@functools.cache
def apply(name):
  config, params = opened(name)
  return functools.partial(jax.jit(Transformer(config).apply), {'params': params})


@pytest.mark.parametrize('name', MODELS)
def test_logits_are_those_of_transformers(name):
  """As near to the float64 logits as transformers' float32 is, within twice.

  The parameters of v1_0 and v1_1 amplify rounding (their logits reach 157, and
  transformers' own float32 is up to 0.1 away); those of `square` do not. Of amplified
  rounding the largest is one row's, and another order of summation, so another
  processor, makes it another: root mean squares are compared.
  """
  values = golden(name)
  ours = np.asarray(apply(name)(values['input_ids'], values['decoder_input_ids']))
  error, theirs = (
    np.abs(each - values['float64']) for each in (ours, values['logits'])
  )
  assert ours.dtype == np.float32
  assert np.sqrt(np.mean(error**2)) <= 2 * np.sqrt(np.mean(theirs**2))
  assert error.mean() <= 2 * theirs.mean()
  if name == 'square':
    np.testing.assert_allclose(ours, values['logits'], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize('name', ['v1_0', 'v1_1'])
def test_greedy_tokens_are_those_of_generate(name):
  """Teacher-forced: the tokens that `generate` chose are the argmax before each."""
  values = golden(name)
  tokens = values['greedy_tokens']
  decoder_inputs = np.zeros_like(values['decoder_input_ids'])
  decoder_inputs[:, : tokens.shape[1]] = tokens
  logits = apply(name)(values['input_ids'], decoder_inputs)
  chosen = np.asarray(logits.argmax(-1))[:, : tokens.shape[1] - 1]
  ended = np.cumsum(tokens == 1, axis=1) > 0
  alive = ~ended[:, :-1]
  assert alive.sum() > 60
  np.testing.assert_array_equal(chosen[alive], tokens[:, 1:][alive])


def test_the_speculative_loop_emits_what_generate_does():
  values = golden('v1_1')
  config, params = opened('v1_1')
  warp = specjax.make_warp(config.vocab_size, 1)
  tokens = values['greedy_tokens']
  state = specjax.decode(
    specjax.Params(params),
    jnp.asarray(values['input_ids']),
    specjax.row_keys(0, jnp.arange(3)),
    make_sampling(3, max_new_tokens=tokens.shape[1] - 1),
    target=t5_model(config),
    drafter=specjax.ngram_draft(3, config.vocab_size),
    verifier=specjax.token_verifier,
    warp=warp,
    max_len=tokens.shape[1],
    eos_id=1,
  )
  np.testing.assert_array_equal(state.tokens_BS[:, : tokens.shape[1]], tokens)
  assert int(state.trace.rounds_B.min()) < tokens.shape[1] - 1


def test_padding_and_neighbours_change_no_logit():
  """Sources of 2, 5 and 9 ids, padded to 9 and to 24, alone and together."""
  logits = apply('square')
  source = np.arange(2, 29, dtype=np.int32).reshape(3, 9)
  for row, length in enumerate((2, 5, 9)):
    source[row, length:] = 0
  decoder_inputs = golden('square')['decoder_input_ids'][[0, 0, 0]]
  together = logits(source, decoder_inputs)
  wide = logits(np.pad(source, ((0, 0), (0, 15))), decoder_inputs)
  np.testing.assert_allclose(wide, together, rtol=1e-5, atol=1e-5)
  assert np.abs(together[0] - together[1]).max() > 0.1
  for row in range(3):
    alone = logits(source[[row, row, row]], decoder_inputs)
    np.testing.assert_allclose(alone[0], together[row], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name', MODELS)
def test_round_trip_is_bit_equal(tmp_path, name):
  """Hugging Face -> T5X's names -> Hugging Face: the same file, byte by byte."""
  hf.write(tmp_path / 'there', hf.open_weights(GOLDEN / name))
  original = (GOLDEN / name / hf.SINGLE).read_bytes()
  assert (tmp_path / 'there' / hf.SINGLE).read_bytes() == original
  theirs = json.loads((GOLDEN / name / hf.CONFIG).read_text())
  ours = json.loads((tmp_path / 'there' / hf.CONFIG).read_text())
  # transformers 5 writes `true` for a head of its own as well.
  if name == 'square':
    assert not ours.pop('tie_word_embeddings')
  assert ours.pop('torch_dtype') == theirs['dtype']
  assert {key: theirs[key] for key in ours} == ours


def test_the_relative_bias_is_transposed():
  """A square one too, of which no shape could tell."""
  for name in MODELS:
    weights = hf.open_weights(GOLDEN / name)
    with safetensors.safe_open(GOLDEN / name / hf.SINGLE, 'np') as file:
      for stack in ('encoder', 'decoder'):
        stored = file.get_tensor(
          f'{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight'
        )
        leaf = weights.leaves[f'{stack}/relpos_bias/rel_embedding']
        np.testing.assert_array_equal(leaves.read_whole(leaf), stored.T)


def random_weights(dtype=np.float32, **overrides):
  config = T5Config(**{**TINY, **overrides})
  random = np.random.default_rng(0)
  return leaves.Weights(
    config,
    {
      name: leaves.array_leaf(random.standard_normal(shape).astype(dtype))
      for name, shape in leaves.expected_shapes(config).items()
    },
    {},
  )


def assert_equal(weights, others):
  assert weights.config == others.config
  assert {*weights.leaves} == {*others.leaves}
  for name, leaf in weights.leaves.items():
    values = leaves.read_whole(others.leaves[name])
    assert values.dtype == leaf.dtype
    np.testing.assert_array_equal(values, leaves.read_whole(leaf))


@pytest.mark.parametrize('activations', [('relu',), ('gelu', 'linear')])
@pytest.mark.parametrize('head', ['scaled', 'unscaled', 'own'])
def test_every_layout_comes_back(tmp_path, activations, head):
  weights = random_weights(
    ml_dtypes.bfloat16 if head == 'own' else np.float32,
    mlp_activations=activations,
    logits_via_embedding=head != 'own',
    scale_tied_logits=head != 'unscaled',
    relative_attention_max_distance=40,
  )
  hf.write(tmp_path / 'one', weights)
  assert_equal(weights, hf.open_weights(tmp_path / 'one'))
  hf.write(tmp_path / 'many', weights, shard_bytes=1000)
  shards = sorted(tmp_path.glob('many/model-*-of-*.safetensors'))
  assert len(shards) > 3
  index = json.loads((tmp_path / 'many' / hf.INDEX).read_text())
  assert len(index['weight_map']) == len(weights.leaves)
  assert_equal(weights, hf.open_weights(tmp_path / 'many'))


@pytest.mark.parametrize(
  ('projection', 'activations'),
  [
    ('relu', ('relu',)),
    ('gelu_new', ('gelu',)),
    ('gated-gelu', ('gelu', 'linear')),
    ('gated-relu', ('relu', 'linear')),
    ('gated-silu', ('silu', 'linear')),
  ],
)
def test_feed_forward_blocks(projection, activations):
  assert config_of(feed_forward_proj=projection).mlp_activations == activations


FIELDS = json.loads((GOLDEN / 'square' / hf.CONFIG).read_text())


def config_of(*, has_head=True, **changes):
  # As transformers 4 and the published files have them.
  fields = {
    key: value
    for key, value in FIELDS.items()
    if key not in ('dense_act_fn', 'is_gated_act', 'scale_decoder_outputs')
  }
  fields.update(changes)
  fields = {key: value for key, value in fields.items() if value != 'absent'}
  return hf.config_from_fields(fields, has_head=has_head)


@pytest.mark.parametrize(
  ('fields', 'has_head', 'tied', 'scaled'),
  [
    ({'tie_word_embeddings': True}, False, True, True),
    ({'tie_word_embeddings': 'absent'}, False, True, True),
    ({'tie_word_embeddings': True}, True, True, True),  # a copy, compared
    ({'tie_word_embeddings': False}, True, False, True),
    ({'scale_decoder_outputs': False}, False, True, False),
    ({'scale_decoder_outputs': False}, True, False, True),  # transformers 5, Flan
    ({'model_type': 'mt5'}, True, False, True),  # transformers 5, mT5
    ({'tie_word_embeddings': False}, False, False, True),  # the head is missing
  ],
)
def test_heads(fields, has_head, tied, scaled):
  config = config_of(has_head=has_head, **fields)
  assert (config.logits_via_embedding, config.scale_tied_logits) == (tied, scaled)


def test_absent_fields_have_the_published_defaults():
  config = config_of(
    num_decoder_layers='absent',
    relative_attention_num_buckets='absent',
    relative_attention_max_distance='absent',
    decoder_start_token_id='absent',
  )
  assert config.num_decoder_layers == config.num_encoder_layers == 3
  assert config.relative_attention_num_buckets == 32
  assert config.relative_attention_max_distance == 128
  assert config_of(dense_act_fn='silu').mlp_activations == ('silu', 'linear')


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'model_type': 'umt5'}, "model_type is 'umt5'"),
    ({'decoder_start_token_id': 2}, 'decoder_start_token_id is 2; specjax needs 0'),
    ({'eos_token_id': 2}, 'eos_token_id is 2; specjax needs 1'),
    ({'pad_token_id': 1}, 'pad_token_id is 1; specjax needs 0'),
    ({'layer_norm_epsilon': 1e-5}, 'layer_norm_epsilon is 1e-05'),
    ({'feed_forward_proj': 'gelu'}, 'exact GELU'),
    ({'feed_forward_proj': 'gated-tanh'}, "feed_forward_proj is 'gated-tanh'"),
    ({'feed_forward_proj': 'a-b-c'}, "feed_forward_proj is 'a-b-c'"),
    ({'d_ff': 'absent'}, 'lacks d_ff'),
    ({'d_ff': -1}, 'mlp_dim=-1'),
  ],
)
def test_configurations_that_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    config_of(**fields)


def test_a_block_that_hugging_face_has_not(tmp_path):
  weights = random_weights(mlp_activations=('linear', 'gelu'))
  with pytest.raises(ValueError, match='second branch'):
    hf.write(tmp_path / 'x', weights)
  assert list(tmp_path.iterdir()) == []


def changed(folder, change, name='v1_0'):
  """A copy of a golden folder after `change(tensors, fields)`."""
  shutil.copytree(GOLDEN / name, folder)
  stored = safetensors.numpy.load_file(folder / hf.SINGLE)
  fields = json.loads((folder / hf.CONFIG).read_text())
  change(stored, fields)
  safetensors.numpy.save_file(stored, folder / hf.SINGLE)
  (folder / hf.CONFIG).write_text(json.dumps(fields))
  return folder


COPIES = (*names.EMBEDDINGS[1:], names.HEAD)


def test_copies_of_the_embedding(tmp_path):
  """As transformers 4 and torch's own files have them: any of them, or all."""
  expected = hf.open_weights(GOLDEN / 'v1_0')

  def add_all(stored, fields):
    stored.update({name: stored[names.EMBEDDINGS[0]].copy() for name in COPIES})
    stored[names.UNUSED] = np.zeros((32, 4), np.float32)

  weights = hf.open_weights(changed(tmp_path / 'all', add_all))
  assert_equal(expected, weights)

  def rename(stored, fields):
    stored[names.HEAD] = stored.pop(names.EMBEDDINGS[0])

  assert_equal(expected, hf.open_weights(changed(tmp_path / 'renamed', rename)))


@pytest.mark.parametrize('name', COPIES)
def test_copies_that_differ(tmp_path, name):
  def differ(stored, fields):
    stored[name] = stored[names.EMBEDDINGS[0]].copy()
    stored[name][50, 3] += 1

  weights = hf.open_weights(changed(tmp_path / 'x', differ))
  with pytest.raises(ValueError, match=rf'{name} and shared\.weight must be equal'):
    leaves.restore(weights)


LAYER = 'decoder.block.1.layer.2.DenseReluDense.wo.weight'


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda stored, fields: stored.pop(LAYER), rf'lacks {LAYER} \(16, 32\)'),
    (lambda stored, fields: stored.pop('shared.weight'), r'lacks shared\.weight'),
    (
      lambda stored, fields: stored.update({LAYER: stored[LAYER].T.copy()}),
      rf'{LAYER} has shape \(32, 16\), expected \(16, 32\)',
    ),
    (
      lambda stored, fields: stored.update({LAYER: np.ones((16, 32), np.int32)}),
      f'{LAYER} has dtype I32',
    ),
    (
      lambda stored, fields: stored.update(extra=stored[LAYER]),
      'surplus tensor extra',
    ),
    # One `wi` with the configuration of a gated block, and the reverse.
    (
      lambda stored, fields: fields.update(
        feed_forward_proj='gated-gelu', dense_act_fn='gelu_new', is_gated_act=True
      ),
      r'lacks decoder\.block\.0\.layer\.2\.DenseReluDense\.wi_0\.weight',
    ),
    (
      lambda stored, fields: fields.update(
        tie_word_embeddings=False, scale_decoder_outputs=False
      ),
      r'lacks lm_head\.weight',
    ),
    (
      lambda stored, fields: fields.update(num_decoder_layers=1),
      r'surplus tensor decoder\.block\.1',
    ),
    (lambda stored, fields: fields.update(vocab_size=128), r'shared\.weight has shape'),
  ],
)
def test_what_does_not_belong_together(tmp_path, change, message):
  folder = changed(tmp_path / 'x', change)
  with pytest.raises(ValueError, match=message) as error:
    hf.open_weights(folder)
  assert str(folder) in str(error.value)
  assert '\n' not in str(error.value)


def test_cut_and_damaged_files(tmp_path):
  def refusal(data, name=hf.SINGLE):
    folder = tmp_path / 'x'
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(GOLDEN / 'v1_0', folder)
    (folder / name).write_bytes(data) if data is not None else (folder / name).unlink()
    with pytest.raises(ValueError, match=r'.') as error:
      hf.open_weights(folder)
    assert str(folder) in str(error.value)
    return str(error.value)

  whole = (GOLDEN / 'v1_0' / hf.SINGLE).read_bytes()
  assert 'ends in shared.weight' in refusal(whole[:-1])
  assert 'ends in decoder.block.1.layer.1.Enc' in refusal(whole[: len(whole) // 2])
  for size in (0, 4, 8, 500):
    assert 'damaged or cut' in refusal(whole[:size])
  assert 'no safetensors file' in refusal(b'\xff' * 100)
  assert 'is damaged' in refusal(whole[:8] + b'x' + whole[9:])
  assert 'neither model.safetensors nor' in refusal(None)
  assert 'config.json is not valid JSON' in refusal(b'{', hf.CONFIG)
  assert 'no JSON object' in refusal(b'[]', hf.CONFIG)
  assert 'config.json (no such file)' in refusal(None, hf.CONFIG)


def test_a_cache_of_links(tmp_path):
  """As the hub's client keeps them: a snapshot's files are links to others' names."""
  (tmp_path / 'blobs').mkdir()
  (tmp_path / 'snapshot').mkdir()
  for number, name in enumerate((hf.CONFIG, hf.SINGLE)):
    shutil.copy(GOLDEN / 'v1_0' / name, tmp_path / 'blobs' / f'{number}')
    (tmp_path / 'snapshot' / name).symlink_to(f'../blobs/{number}')
  assert_equal(hf.open_weights(GOLDEN / 'v1_0'), hf.open_weights(tmp_path / 'snapshot'))


def test_a_lost_shard(tmp_path):
  weights = random_weights()
  hf.write(tmp_path / 'x', weights, shard_bytes=1000)
  first = min(tmp_path.glob('x/model-0*'))
  kept = first.read_bytes()
  first.unlink()
  with pytest.raises(ValueError, match=f'{first.name}.*no such file'):
    hf.open_weights(tmp_path / 'x')
  first.write_bytes(kept)
  index = json.loads((tmp_path / 'x' / hf.INDEX).read_text())
  index['weight_map']['shared.weight'] = first.name
  (tmp_path / 'x' / hf.INDEX).write_text(json.dumps(index))
  with pytest.raises(ValueError, match=f'{first.name} lacks shared.weight'):
    hf.open_weights(tmp_path / 'x')


def test_a_block_reads_little_more_than_itself(tmp_path, monkeypatch):
  weights = random_weights(mlp_dim=64, emb_dim=64)
  hf.write(tmp_path / 'x', weights)
  again = hf.open_weights(tmp_path / 'x')
  count = []
  read, read_many = files.read, files.read_many

  def counted(*arguments):
    data = read(*arguments)
    count.append(len(data))
    return data

  def counted_many(*arguments):
    data = read_many(*arguments)
    count.extend(map(len, data))
    return data

  monkeypatch.setattr(files, 'read', counted)
  monkeypatch.setattr(files, 'read_many', counted_many)
  for name in ('encoder/layers_0/mlp/wo/kernel', 'token_embedder/embedding'):
    whole = leaves.read_whole(weights.leaves[name])
    for index in (
      (slice(3, 7), slice(0, whole.shape[1])),
      (slice(0, whole.shape[0]), slice(16, 32)),
      (slice(1, 2), slice(5, 6)),
      (slice(4, 8), slice(8, 24)),
    ):
      count.clear()
      block = again.leaves[name].read(index)
      np.testing.assert_array_equal(block, whole[index])
      assert sum(count) == whole[index].nbytes


def test_float16_is_read_and_never_computed_with(tmp_path):
  """As halved files are: projections float16, `wo` kept in float32."""

  def halve(stored, fields):
    for name in stored:
      if not name.endswith('wo.weight'):
        stored[name] = stored[name].astype(np.float16)

  weights = hf.open_weights(changed(tmp_path / 'x', halve))
  dtypes = {name: leaf.dtype for name, leaf in weights.leaves.items()}
  assert dtypes['encoder/layers_0/mlp/wo/kernel'] == np.float32
  assert dtypes['encoder/layers_0/mlp/wi/kernel'] == np.float16
  for dtype in ('float32', 'bfloat16'):
    params = leaves.restore(weights, dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
  with pytest.raises(ValueError, match='exceed the float16 range'):
    T5Config.from_dict({**weights.config.to_dict(), 'dtype': 'float16'})


def test_large_activations_stay_finite_in_bfloat16(tmp_path):
  """`wo` times 1e6 leads past 65504, where float16 ends."""

  def enlarge(stored, fields):
    for name in stored:
      if name.endswith('wo.weight'):
        stored[name] *= 1e6

  weights = hf.open_weights(changed(tmp_path / 'x', enlarge, 'square'))
  kernel = leaves.read_whole(weights.leaves['decoder/layers_1/mlp/wo/kernel'])
  assert np.abs(kernel).max() > 65504
  config = T5Config.from_dict({**weights.config.to_dict(), 'dtype': 'bfloat16'})
  params = leaves.restore(weights, dtype='bfloat16')
  values = golden('square')
  logits = jax.jit(Transformer(config).apply)(
    {'params': params}, values['input_ids'], values['decoder_input_ids']
  )
  assert jnp.isfinite(logits).all()
  assert logits.dtype == jnp.float32


def test_an_interrupted_folder_is_continued(tmp_path, monkeypatch):
  weights = random_weights()
  stops = {'after': 10}

  def stopping(leaf):
    def read(index):
      stops['after'] -= 1
      if stops['after'] < 0:
        raise KeyboardInterrupt
      return leaf.read(index)

    return leaf._replace(read=read)

  slow = weights._replace(
    leaves={name: stopping(leaf) for name, leaf in weights.leaves.items()}
  )
  with pytest.raises(KeyboardInterrupt):
    hf.write(tmp_path / 'x', slow)
  with pytest.raises(ValueError, match=r'config\.json \(no such file\)'):
    hf.open_weights(tmp_path / 'x')
  hf.write(tmp_path / 'x', weights)
  assert_equal(weights, hf.open_weights(tmp_path / 'x'))
  with pytest.raises(ValueError, match='holds a model already'):
    hf.write(tmp_path / 'x', weights)


def test_not_finite_values_are_not_written(tmp_path):
  weights = random_weights()
  name = 'decoder/layers_1/mlp/wo/kernel'
  leaves.read_whole(weights.leaves[name])[1, 1] = np.inf
  with pytest.raises(ValueError, match=r'decoder\.block\.1.*wo.* not finite'):
    hf.write(tmp_path / 'x', weights)


def test_every_parameter_has_a_name_of_its_own():
  for activations in (('relu',), ('gelu', 'linear')):
    shapes = leaves.expected_shapes(T5Config(**TINY, mlp_activations=activations))
    places = [names.hugging_face(name) for name in shapes]
    assert len({place.name for place in places}) == len(shapes)
    for name, place in zip(shapes, places, strict=True):
      # A norm and the embedding are as they are; all else is transposed.
      assert place.transposed == (len(shapes[name]) == 2 and 'embedder' not in name)


def test_rounding_to_bfloat16(tmp_path):
  weights = random_weights()
  hf.write(tmp_path / 'x', weights, dtype='bfloat16')
  again = hf.open_weights(tmp_path / 'x')
  assert (
    json.loads((tmp_path / 'x' / hf.CONFIG).read_text())['torch_dtype'] == 'bfloat16'
  )
  for name, leaf in weights.leaves.items():
    expected = leaves.read_whole(leaf).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(leaves.read_whole(again.leaves[name]), expected)
  assert tensors.DTYPES['BF16'] == ml_dtypes.bfloat16


def test_no_file_of_the_package_needs_transformers_or_torch():
  package = pathlib.Path(specjax.__file__).parent
  rivals = package / 'eval' / 'systems.py'  # the benchmark runs them if they are there
  for path in {*package.rglob('*.py')} - {rivals}:
    text = path.read_text(encoding='utf-8')
    for framework in ('transformers', 'torch'):
      assert f'import {framework}' not in text, path
      assert f'from {framework}' not in text, path
