"""T5X checkpoints: files of T5X's own, every layout, every path, every damage."""

import functools
import gzip
import json
import lzma
import pathlib
import shutil

import flax.serialization
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from specjax.checkpoints import arrays, files, inline, layouts, leaves, t5x
from specjax.models import t5

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
TREES = json.loads((GOLDEN / 't5x' / 'layouts.json').read_text())
NAME = 'decoder/layers_1/mlp/wo/kernel'
BIAS = 'encoder/relpos_bias/rel_embedding'
HEAD = 'decoder/logits_dense/kernel'


@functools.cache
def golden(name):
  with np.load(GOLDEN / 't5' / f'{name}.npz') as file:
    return dict(file)


@functools.cache
def apply(config):
  return jax.jit(t5.Transformer(config).apply)


def logits(config, params, example):
  return apply(config)(
    {'params': params}, example['encoder_input_tokens'], example['decoder_input_tokens']
  )


def assert_golden(weights, name):
  example = golden(name)
  logits_BTV = logits(weights.config, leaves.restore(weights), example)
  np.testing.assert_allclose(
    logits_BTV[..., example['columns']],
    example['logits_columns'],
    rtol=1e-5,
    atol=1e-5,
  )


def nested(flat):
  return flax.traverse_util.unflatten_dict(flat, sep='/')


def write_file(path, target, version=3):
  """The one-file layout, as Flax writes it."""
  optimizer = {'state': {'step': np.int32(5)}, 'target': nested(target)}
  tree = {'version': version, 'optimizer': optimizer} if version else optimizer
  path.write_bytes(flax.serialization.msgpack_serialize(tree))
  return path


def write_folder(folder, flat, version=3, driver='gfile', rows=None):
  """The folder layout: norms in the file, all else in Zarr folders."""
  folder.mkdir(parents=True)
  target = {}
  for name, values in flat.items():
    if name.endswith('scale'):
      target[name] = values
      continue
    spec = {
      'driver': 'zarr',
      'dtype': values.dtype.name,
      'metadata': {
        'chunks': [rows or values.shape[0], *values.shape[1:]],
        'compressor': {'id': 'gzip'},
        'shape': list(values.shape),
      },
    }
    key = f'target/{name}'.replace('/', '.')
    store = {'driver': 'file', 'path': f'{folder}/{key}/'}
    ts.open({**spec, 'kvstore': store}, create=True).result().write(values).result()
    target[name] = {**spec, 'kvstore': {'driver': driver, 'path': f'{key}/'}}
  write_file(folder / 'checkpoint', target, version)
  return folder


def assert_equal(weights, flat):
  assert weights.leaves.keys() == flat.keys()
  for name, leaf in weights.leaves.items():
    values = leaves.read_whole(leaf)
    assert (values.shape, values.dtype) == (leaf.shape, leaf.dtype)
    assert values.dtype == flat[name].dtype
    np.testing.assert_array_equal(values, flat[name], err_msg=name)


@pytest.fixture
def flat():
  return dict(golden('random_v1_1_params'))


@pytest.fixture
def folder(tmp_path, flat):
  return write_folder(tmp_path / 'run' / 'checkpoint_5', flat)


# Files of T5X's own.


def test_one_file_of_t5x(tmp_path, optimised_test):
  path = tmp_path / 'test_t5_tiny.checkpoint_0'
  packed = GOLDEN / 't5x' / 'test_t5_tiny.checkpoint_0.xz'
  path.write_bytes(lzma.decompress(packed.read_bytes()))
  weights = t5x.open_weights(path)
  assert weights.notes == {
    'path': str(path),
    'version': 3,
    'step': 0,
    'layout': 'unrolled',
    'skipped': [],
  }
  assert_equal(weights, golden('t5x_tiny_params'))
  assert_golden(weights, 't5x_tiny')


def test_arrays_of_t5x(tmp_path):
  """Its files lack the metadata of arrays, which their specifications repeat."""
  folder = tmp_path / 'checkpoint_1'
  shutil.copytree(GOLDEN / 't5x' / 'tiny_t5' / 'checkpoint_1', folder)
  tree = inline.read_tree(str(folder / 'checkpoint'))
  assert tree['version'] == 3
  states = tree['optimizer']['state']['param_states']
  dtypes = {'bias': '<f4', 'kernel': '<f8'}
  for name, dtype in dtypes.items():
    metadata = {
      **states[name]['metadata'],
      'dtype': dtype,
      'order': 'C',
      'fill_value': None,
      'filters': None,
      'zarr_format': 2,
    }
    path = folder / states[name]['kvstore']['path'] / '.zarray'
    path.write_text(json.dumps(metadata))
  opened = arrays.open_arrays(
    str(folder),
    {name: files.kvstore(f'{folder}/state.param_states.{name}') for name in dtypes},
  )
  assert {name: leaf.shape for name, leaf in opened.items()} == {
    'bias': (5,),
    'kernel': (10, 5),
  }
  for name, leaf in opened.items():
    (chunk,) = (folder / f'state.param_states.{name}').glob('0*')
    values = np.frombuffer(gzip.decompress(chunk.read_bytes()), dtypes[name])
    assert 0.01 < values.min() <= values.max() <= 1
    np.testing.assert_array_equal(leaves.read_whole(leaf).ravel(), values)


@pytest.mark.parametrize('name', ['tiny_t5', 'tiny_orbax/1'])
def test_files_of_t5x_without_parameters(name):
  with pytest.raises(ValueError, match=r'has no parameters \(optimizer/target'):
    t5x.open_weights(GOLDEN / 't5x' / name)


# Layouts.


@pytest.mark.parametrize('layout', TREES)
def test_each_layout_has_its_configuration(tmp_path, layout):
  zeros = {name: np.zeros(shape, np.float32) for name, shape in TREES[layout].items()}
  weights = t5x.open_weights(write_file(tmp_path / 'checkpoint', zeros))
  assert weights.config == t5.T5Config(
    vocab_size=40,
    emb_dim=16,
    num_heads=2,
    head_dim=8,
    mlp_dim=32,
    num_encoder_layers=2,
    num_decoder_layers=3,
    mlp_activations=('relu',) if 'v1_0' in layout else ('gelu', 'linear'),
    logits_via_embedding='_tied' in layout,
  )
  assert weights.notes['layout'] == layout.split('_')[2]


@pytest.mark.parametrize('version', ['v1_0', 'v1_1'])
@pytest.mark.parametrize('is_tied', [True, False])
@pytest.mark.parametrize('layout', ['unrolled', 'scanned'])
def test_grid_of_layouts(tmp_path, stack, version, is_tied, layout):
  """Equal logits: T5X's own where it computed them, else those of the source."""
  flat = dict(golden(f'random_{version}_params'))
  source = layouts.infer_config({name: leaf.shape for name, leaf in flat.items()})
  if is_tied:
    flat.pop(HEAD, None)
  else:
    flat.setdefault(HEAD, flat['token_embedder/embedding'].T[:, ::-1].copy())
  stored = stack(flat) if layout == 'scanned' else flat
  if layout == 'scanned':
    assert (
      stored.keys() == TREES[f'{version}_scanned_{"un" * (not is_tied)}tied'].keys()
    )
  weights = t5x.open_weights(write_folder(tmp_path / 'checkpoint_5', stored, rows=5))
  assert len(weights.leaves) == len(flat)
  assert_equal(weights, flat)
  if weights.config == source:
    assert_golden(weights, f'random_{version}')
  else:
    assert weights.config.logits_via_embedding is is_tied
    example = golden(f'random_{version}')
    np.testing.assert_array_equal(
      logits(weights.config, leaves.restore(weights), example),
      logits(weights.config, nested(flat), example),
    )


def test_square_relative_bias(tmp_path, stack):
  """Heads == buckets == layers: no shape can tell an axis from another."""
  config = t5.T5Config(
    vocab_size=24,
    emb_dim=4,
    num_heads=4,
    head_dim=4,
    mlp_dim=4,
    num_encoder_layers=4,
    num_decoder_layers=1,
    relative_attention_num_buckets=4,
  )
  rng = np.random.default_rng(0)
  flat = {
    name: rng.normal(size=shape).astype(np.float32)
    for name, shape in leaves.expected_shapes(config).items()
  }
  example = {
    'encoder_input_tokens': rng.integers(1, 24, (1, 9)),
    'decoder_input_tokens': rng.integers(1, 24, (1, 9)),
  }
  expected = logits(config, nested(flat), example)
  unrolled = t5x.open_weights(write_folder(tmp_path / 'checkpoint_1', flat))
  scanned = t5x.open_weights(write_file(tmp_path / 'checkpoint_2', stack(flat)))
  for weights in (unrolled, scanned):
    assert weights.config == config
    found = logits(config, leaves.restore(weights), example)
    np.testing.assert_array_equal(found, expected)
  flat[BIAS] = flat[BIAS].T
  assert np.abs(logits(config, nested(flat), example) - expected).max() > 0.1


def test_layers_on_axis_0(tmp_path, stack, flat):
  flat.pop(BIAS.replace('encoder', 'decoder'))
  flat['decoder/relpos_bias/rel_embedding'] = golden('random_v1_1_params')[BIAS]
  weights = t5x.open_weights(write_file(tmp_path / 'x', stack(flat, axis=0)))
  assert_equal(weights, flat)


def test_blocks_of_stacked_layers(tmp_path, stack, flat):
  """Heads have 8 numbers each; the blocks begin and end within one."""
  weights = t5x.open_weights(write_file(tmp_path / 'x', stack(flat)))
  block = (slice(3, 13), slice(5, 11))
  for name, leaf in weights.leaves.items():
    index = block[: len(leaf.shape)]
    values = leaf.read(index)
    np.testing.assert_array_equal(values, flat[name][index], err_msg=name)


@pytest.mark.parametrize('layout', ['unrolled', 'scanned'])
def test_a_bias_per_layer(tmp_path, stack, flat, layout):
  if layout == 'scanned':
    stored = stack(flat)
    bias = stored['encoder/encoder/relpos_bias/rel_embedding']
  else:
    bias = np.stack([flat.pop(BIAS)] * 2)
    stored = {
      **flat,
      'encoder/layers_0/relpos_bias/rel_embedding': bias[0],
      'encoder/layers_1/relpos_bias/rel_embedding': bias[1],
    }
  weights = t5x.open_weights(write_file(tmp_path / 'x', stored))
  assert_equal(weights, golden('random_v1_1_params'))
  bias[1, 1] += 1
  with pytest.raises(ValueError, match=r'the layers of the encoder differ .* umT5'):
    t5x.open_weights(write_file(tmp_path / 'x', stored))


@pytest.mark.parametrize('name', ['t5_1_0_small', 'byt5_small'])
def test_configurations_of_published_shapes(name):
  config = t5.T5Config.from_size(name)
  assert layouts.infer_config(leaves.expected_shapes(config)) == config


# Versions and encodings.


@pytest.mark.parametrize('version', [0, 1, 2, 3])
@pytest.mark.parametrize('write', [write_file, write_folder])
def test_versions(tmp_path, flat, version, write):
  narrow = {name: leaf.astype(jnp.bfloat16) for name, leaf in flat.items()}
  is_old = version < 3
  stored = {n: v.view(np.uint16) if is_old else v for n, v in narrow.items()}
  weights = t5x.open_weights(write(tmp_path / 'checkpoint_5', stored, version))
  assert (weights.notes['version'], weights.notes['step']) == (version, 5)
  assert_equal(weights, narrow)


def test_arrays_that_flax_cut(tmp_path, flat, monkeypatch):
  monkeypatch.setattr('flax.serialization.MAX_CHUNK_SIZE', 100)
  weights = t5x.open_weights(write_file(tmp_path / 'x', flat))
  assert_equal(weights, flat)
  block = weights.leaves[NAME].read((slice(7, 19), slice(3, 4)))
  np.testing.assert_array_equal(block, flat[NAME][7:19, 3:4])


@pytest.mark.parametrize('driver', ['file', 'gfile', 'gcs'])
def test_drivers(tmp_path, flat, driver):
  folder = write_folder(tmp_path / 'checkpoint_5', flat, driver=driver)
  assert_equal(t5x.open_weights(folder), flat)


def test_specifications_before_tensorstore_0_1_14(tmp_path, flat):
  """They have the path beside the key-value store."""
  folder = write_folder(tmp_path / 'checkpoint_5', flat)
  data = flax.serialization.msgpack_restore((folder / 'checkpoint').read_bytes())
  spec = data['optimizer']['target']['decoder']['layers_1']['mlp']['wo']['kernel']
  spec['path'] = spec['kvstore'].pop('path').rstrip('/')
  (folder / 'checkpoint').write_bytes(flax.serialization.msgpack_serialize(data))
  assert_equal(t5x.open_weights(folder), flat)
