"""T5X checkpoints as files: paths, damages, blocks, and writing."""

import os
import shutil

import flax.serialization
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints import files, inline, leaves, t5x
from specjax.models import t5

CONFIG = t5.T5Config(
  vocab_size=16,
  emb_dim=8,
  num_heads=2,
  head_dim=4,
  mlp_dim=16,
  num_encoder_layers=1,
  num_decoder_layers=2,
)
NAME = 'decoder/layers_1/mlp/wo/kernel'
ARRAY = 'target.decoder.layers_1.mlp.wo.kernel'


@pytest.fixture(scope='module')
def flat():
  rng = np.random.default_rng(0)
  return {
    name: rng.normal(size=shape).astype(np.float32)
    for name, shape in leaves.expected_shapes(CONFIG).items()
  }


@pytest.fixture(scope='module')
def template(flat, tmp_path_factory):
  arrays = {name: leaves.array_leaf(values) for name, values in flat.items()}
  path = tmp_path_factory.mktemp('template') / 'checkpoint_7'
  t5x.write(path, leaves.Weights(CONFIG, arrays, {}), step=7)
  return path


@pytest.fixture
def weights(flat):
  arrays = {name: leaves.array_leaf(values) for name, values in flat.items()}
  return leaves.Weights(CONFIG, arrays, {})


@pytest.fixture
def folder(tmp_path, template):
  return shutil.copytree(template, tmp_path / 'a run' / 'checkpoint_7')


def change_target(folder, change):
  """Writes the msgpack file again with `change(target)` applied."""
  path = folder / 'checkpoint'
  tree = flax.serialization.msgpack_restore(path.read_bytes())
  change(tree['optimizer']['target'])
  path.write_bytes(flax.serialization.msgpack_serialize(tree))


def assert_equal(weights, flat):
  assert weights.leaves.keys() == flat.keys()
  for name, leaf in weights.leaves.items():
    np.testing.assert_array_equal(leaves.read_whole(leaf), flat[name], err_msg=name)


# Places.


@pytest.mark.parametrize(
  'path',
  [
    '{root}/a run/checkpoint_7',
    '{root}/a run/checkpoint_7/',
    '{root}/a run/checkpoint_7/checkpoint',
    '{root}/a run',
    './a run/checkpoint_7',
    'a run/../a run/checkpoint_7/',
    '~/a run/checkpoint_7',
    'link',
    'link/',
    'file link',
  ],
)
def test_paths(folder, tmp_path, flat, monkeypatch, path):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('HOME', str(tmp_path))
  (tmp_path / 'link').symlink_to(folder)
  (tmp_path / 'file link').symlink_to(folder / 'checkpoint')
  weights = t5x.open_weights(path.format(root=tmp_path))
  assert weights.notes['path'] == str(folder / 'checkpoint')
  assert_equal(weights, flat)


def test_the_newest_complete_one(folder, weights):
  run = folder.parent
  t5x.write(run / 'checkpoint_12', weights, step=12)
  (run / 'checkpoint_100' / ARRAY).mkdir(parents=True)
  (run / 'checkpoint_100' / ARRAY / '.zarray').touch()
  (run / 'checkpoint_200.tmp-1').mkdir()
  (run / 'events.out').write_bytes(b'')
  notes = t5x.open_weights(run).notes
  assert notes['path'] == str(run / 'checkpoint_12' / 'checkpoint')
  assert (notes['step'], notes['skipped']) == (12, ['checkpoint_100'])


def test_a_folder_of_single_files(tmp_path, flat):
  target = flax.traverse_util.unflatten_dict(flat, sep='/')
  tree = {'version': 1, 'optimizer': {'state': {}, 'target': target}}
  data = flax.serialization.msgpack_serialize(tree)
  for step in (2, 10):
    (tmp_path / f'checkpoint_{step}').write_bytes(data)
  weights = t5x.open_weights(tmp_path)
  assert weights.notes['path'] == str(tmp_path / 'checkpoint_10')
  assert weights.notes['step'] is None
  assert_equal(weights, flat)


def test_no_checkpoint(tmp_path):
  (tmp_path / 'checkpoint_3').mkdir()
  (tmp_path / 'checkpoint_3' / 'PINNED').touch()
  with pytest.raises(ValueError, match=r'no T5X checkpoint \(checkpoint_3: incomplete'):
    t5x.open_weights(tmp_path)
  with pytest.raises(ValueError, match=r'absent holds no T5X checkpoint; give a'):
    t5x.open_weights(tmp_path / 'absent')


# Damages: one line that names the parameter.


def raises(match):
  return pytest.raises(ValueError, match=rf'^weights: [^\n]*{match}[^\n]*$')


def test_missing_metadata(folder):
  (folder / ARRAY / '.zarray').unlink()
  with raises(rf'cannot read {NAME} \(.*\.zarray" does not exist\); copy the check'):
    t5x.open_weights(folder)


def test_damaged_metadata(folder):
  (folder / ARRAY / '.zarray').write_text('{')
  with raises(rf'cannot read {NAME} \(.*Invalid JSON'):
    t5x.open_weights(folder)


@pytest.mark.parametrize('damage', ['missing', 'cut', 'flipped'])
def test_damaged_chunk(folder, damage):
  chunk = folder / ARRAY / '0.0'
  data = chunk.read_bytes()
  if damage == 'missing':
    chunk.unlink()
  elif damage == 'cut':
    chunk.write_bytes(data[:-9])
  else:
    chunk.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
  opened = t5x.open_weights(folder)
  with raises(rf'{folder}.*cannot read {NAME} \('):
    leaves.restore(opened)


@pytest.mark.parametrize('size', [0, 1, 30, 500, -1])
def test_cut_msgpack(folder, size):
  path = folder / 'checkpoint'
  path.write_bytes(path.read_bytes()[:size])
  with pytest.raises(ValueError, match=r'cannot read|is damaged or cut at') as error:
    t5x.open_weights(folder)
  assert str(path) in str(error.value)
  assert '\n' not in str(error.value)


def test_cut_file_of_arrays_names_the_parameter(tmp_path, flat):
  target = flax.traverse_util.unflatten_dict(flat, sep='/')
  tree = {'version': 3, 'optimizer': {'target': target}}
  data = flax.serialization.msgpack_serialize(tree)
  middle = data.index(flat[NAME].tobytes()) + 20
  (tmp_path / 'x').write_bytes(data[:middle])
  with raises(f'x is damaged or cut at optimizer/target/{NAME}; copy'):
    t5x.open_weights(tmp_path / 'x')


@pytest.mark.parametrize('data', [b'\xc1', b'\x05', b'hello', b'\x81\xa1a'])
def test_no_msgpack(tmp_path, data):
  (tmp_path / 'x').write_bytes(data)
  with raises(''):
    t5x.open_weights(tmp_path / 'x')


def test_checkpoint_of_tensorflow(tmp_path):
  (tmp_path / 'checkpoint').write_text('model_checkpoint_path: "model.ckpt-1000"')
  with raises("is TensorFlow's; convert it with"):
    t5x.open_weights(tmp_path)


@pytest.mark.parametrize('version', [4, -1, '3'])
def test_unknown_version(folder, version):
  path = folder / 'checkpoint'
  tree = flax.serialization.msgpack_restore(path.read_bytes())
  path.write_bytes(flax.serialization.msgpack_serialize({**tree, 'version': version}))
  with raises(rf'has version {version!r}, known are 0 to 3'):
    t5x.open_weights(folder)


def test_missing_parameter(folder):
  change_target(folder, lambda target: target['decoder']['layers_1']['mlp'].pop('wo'))
  with raises(rf'lacks {NAME} \(16, 8\)'):
    t5x.open_weights(folder)


def test_surplus_parameter(folder):
  change_target(folder, lambda target: target.update(adapter=np.ones((2, 2), 'f4')))
  with raises('surplus tensor adapter'):
    t5x.open_weights(folder)


@pytest.mark.parametrize(
  ('value', 'match'),
  [
    (np.ones((8, 16), np.float32), r'has shape \(8, 16\), expected \(16, 8\)'),
    (np.ones((16, 8), np.int8), 'has dtype int8, expected one of float32'),
    (np.full((16, 8), np.inf, np.float32), 'has values that are not finite'),
    (None, 'is neither an array nor a Zarr specification'),
    ({'driver': 'n5', 'kvstore': {'path': 'x'}}, 'is neither an array nor a Zarr'),
    ({'driver': 'zarr', 'kvstore': {}}, r'cannot read .* \(.*Invalid file path'),
  ],
)
def test_wrong_parameter(folder, value, match):
  def change(target):
    target['decoder']['layers_1']['mlp']['wo']['kernel'] = value

  change_target(folder, change)
  with raises(f'{NAME}.*{match}' if 'cannot' not in match else match) as error:
    leaves.restore(t5x.open_weights(folder))
  assert NAME in str(error.value)


def test_another_model(folder):
  def rename(target):
    target['shared'] = target.pop('token_embedder')

  change_target(folder, rename)
  with raises('lacks token_embedder/embedding; its parameters are not those of a T5'):
    t5x.open_weights(folder)


def test_heads_that_do_not_divide(folder):
  def change(target):
    target['encoder']['relpos_bias']['rel_embedding'] = np.ones((3, 32), np.float32)

  change_target(folder, change)
  with raises('8 columns, no multiple of the 3 heads of encoder/relpos_bias'):
    t5x.open_weights(folder)


def test_given_configuration(folder):
  fields = CONFIG.to_dict()
  silu = t5.T5Config.from_dict({**fields, 'mlp_activations': ['silu', 'linear']})
  assert t5x.open_weights(folder, config=silu).config == silu
  wide = t5.T5Config.from_dict({**fields, 'num_heads': 4})
  with raises(r'kernel has shape \(8, 8\), expected \(8, 16\)'):
    t5x.open_weights(folder, config=wide)


# Blocks.


def test_a_block_reads_its_chunks_only(tmp_path, weights, flat, monkeypatch):
  monkeypatch.setattr(t5x, '_CHUNK_BYTES', 128)
  folder = tmp_path / 'checkpoint_1'
  t5x.write(folder, weights)
  chunks = {path.name for path in (folder / ARRAY).iterdir()}
  assert chunks == {'.zarray', '0.0', '1.0', '2.0', '3.0'}
  for name in ('0.0', '3.0'):
    (folder / ARRAY / name).unlink()
  leaf = t5x.open_weights(folder).leaves[NAME]
  block = leaf.read((slice(5, 11), slice(2, 8)))
  np.testing.assert_array_equal(block, flat[NAME][5:11, 2:8])
  with pytest.raises(ValueError, match=f'cannot read {NAME}'):
    leaf.read((slice(11, 13), slice(2, 8)))


def test_a_block_of_one_file_reads_its_rows_only(tmp_path, flat, monkeypatch):
  target = flax.traverse_util.unflatten_dict(flat, sep='/')
  tree = {'version': 3, 'optimizer': {'target': target}}
  path = tmp_path / 'x'
  path.write_bytes(flax.serialization.msgpack_serialize(tree))
  leaf = t5x.open_weights(path).leaves[NAME]
  sizes = []

  def read(*args):
    data = files_read(*args)
    sizes.append(len(data))
    return data

  files_read = files.read
  monkeypatch.setattr(inline.files, 'read', read)
  block = leaf.read((slice(5, 8), slice(1, 4)))
  np.testing.assert_array_equal(block, flat[NAME][5:8, 1:4])
  assert sizes == [3 * 8 * 4]


def test_restore_into_shards(folder, flat):
  mesh = jax.make_mesh((2, 4), ('x', 'y'))
  spec = {
    2: jax.sharding.PartitionSpec('y', 'x'),
    1: jax.sharding.PartitionSpec(('x', 'y')),
  }
  opened = t5x.open_weights(folder)
  shardings = {
    name: jax.sharding.NamedSharding(
      mesh,
      jax.sharding.PartitionSpec() if 'relpos' in name else spec[len(leaf.shape)],
    )
    for name, leaf in opened.leaves.items()
  }
  params = leaves.restore(opened, shardings=shardings)
  for name, values in flax.traverse_util.flatten_dict(params, sep='/').items():
    assert values.sharding == shardings[name]
    np.testing.assert_array_equal(values, flat[name])
  kernel = params['decoder']['layers_1']['mlp']['wo']['kernel']
  assert {shard.data.shape for shard in kernel.addressable_shards} == {(4, 4)}


# Writing.


@pytest.mark.parametrize('dtype', [None, 'float32', 'bfloat16'])
def test_round_trip(tmp_path, weights, flat, dtype):
  t5x.write(tmp_path / 'checkpoint_3', weights, step=3, dtype=dtype)
  first = t5x.open_weights(tmp_path)
  assert (first.config, first.notes['step']) == (CONFIG, 3)
  expected = {
    name: values.astype(jnp.dtype(dtype or 'float32')) for name, values in flat.items()
  }
  assert_equal(first, expected)
  assert {leaf.dtype for leaf in first.leaves.values()} == {jnp.dtype(dtype or 'f4')}
  t5x.write(tmp_path / 'checkpoint_4', first, step=3)
  assert_equal(t5x.open_weights(tmp_path / 'checkpoint_4'), expected)
  written = [
    {
      path.relative_to(root): path.read_bytes()
      for path in root.rglob('*')
      if path.is_file()
    }
    for root in (tmp_path / 'checkpoint_3', tmp_path / 'checkpoint_4')
  ]
  assert written[0] == written[1]


def test_zeros_are_written(tmp_path, weights):
  """A chunk that is left out for being zero would be taken for a lost one."""
  zeros = leaves.array_leaf(np.zeros((16, 8), np.float32))
  weights.leaves[NAME] = zeros
  t5x.write(tmp_path / 'checkpoint_0', weights)
  leaf = t5x.open_weights(tmp_path).leaves[NAME]
  np.testing.assert_array_equal(leaves.read_whole(leaf), np.zeros((16, 8)))


def test_a_failed_write_leaves_nothing(tmp_path, weights):
  def read(index):
    raise ValueError('weights: the source is damaged at its end')

  weights.leaves[NAME] = weights.leaves[NAME]._replace(read=read)
  with pytest.raises(ValueError, match='the source is damaged'):
    t5x.write(tmp_path / 'checkpoint_0', weights)
  assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_taken(folder, weights):
  before = sorted(folder.rglob('*'))
  with raises('checkpoint_7 exists; choose another place'):
    t5x.write(folder, weights)
  with raises('cannot write .*No such file.*; choose a folder'):
    t5x.write(folder / 'absent' / 'checkpoint_7', weights)
  assert sorted(folder.rglob('*')) == before
  assert os.listdir(folder.parent) == ['checkpoint_7']


def test_arguments_of_write(tmp_path, weights):
  with pytest.raises(ValueError, match="dtype='float16': weights are"):
    t5x.write(tmp_path / 'x', weights, dtype='float16')
  with pytest.raises(ValueError, match='step: -1; give 0 or more'):
    t5x.write(tmp_path / 'x', weights, step=-1)
  del weights.leaves[NAME]
  with raises(f'lacks {NAME}'):
    t5x.write(tmp_path / 'x', weights)
  assert list(tmp_path.iterdir()) == []
