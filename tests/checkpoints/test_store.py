"""The single-file store: round trip, and one clear error for every damage."""

import json

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specjax.checkpoints import store
from specjax.checkpoints.leaves import expected_shapes
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


@pytest.fixture(scope='module')
def params():
  tokens = jnp.zeros((1, 1), jnp.int32)
  return t5.Transformer(CONFIG).init(jax.random.key(0), tokens, tokens)['params']


@pytest.fixture
def path(tmp_path, params):
  path = tmp_path / 'a pair' / 'model.safetensors'
  path.parent.mkdir()
  store.save(path, params, CONFIG, notes={'step': 7})
  return path


def _tamper(path, change, **metadata):
  """Writes the file again with `change(leaves)` applied."""
  with safetensors.safe_open(path, 'np') as file:
    kept = file.metadata()
  params = store.load(path, dtype='bfloat16').params
  leaves = flax.traverse_util.flatten_dict(params, sep='/')
  change(leaves)
  path.write_bytes(safetensors.numpy.save(leaves, {**kept, **metadata}))


def test_round_trip_rounds_to_bfloat16(path, params):
  checkpoint = store.load(path)
  assert checkpoint.config == CONFIG
  assert checkpoint.notes == {'step': 7}
  expected = jax.tree.map(
    lambda leaf: np.asarray(leaf.astype(jnp.bfloat16).astype(jnp.float32)), params
  )
  jax.tree.map(np.testing.assert_array_equal, checkpoint.params, expected)
  assert jax.tree.structure(checkpoint.params) == jax.tree.structure(dict(params))


def test_round_trip_in_float32_is_exact(tmp_path, params):
  store.save(tmp_path / 'x.safetensors', params, CONFIG, dtype='float32')
  loaded = store.load(tmp_path / 'x.safetensors')
  jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
  narrow = store.load(tmp_path / 'x.safetensors', dtype='bfloat16')
  dtypes = {leaf.dtype for leaf in jax.tree.leaves(narrow.params)}
  assert dtypes == {jnp.dtype('bfloat16')}


@pytest.mark.parametrize('spelling', ['relative', 'symlink', 'home'])
def test_paths(path, tmp_path, monkeypatch, spelling):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('HOME', str(tmp_path))
  (tmp_path / 'link').symlink_to(path)
  given = {
    'relative': './a pair/model.safetensors',
    'symlink': 'link',
    'home': '~/a pair/model.safetensors',
  }[spelling]
  assert store.load(given).config == CONFIG


def test_expected_shapes_are_t5xs_names(params):
  shapes = expected_shapes(CONFIG)
  leaves = flax.traverse_util.flatten_dict(dict(params), sep='/')
  assert shapes == {name: leaf.shape for name, leaf in leaves.items()}
  assert shapes[NAME] == (16, 8)


@pytest.mark.parametrize('size', [0, 5, 8, 200, -1])
def test_cut_file(path, size):
  path.write_bytes(path.read_bytes()[:size])
  with pytest.raises(ValueError, match='is damaged or cut') as error:
    store.load(path)
  assert str(path) in str(error.value)
  assert '\n' not in str(error.value)


def test_one_flipped_bit(path):
  data = bytearray(path.read_bytes())
  data[-9] ^= 1
  path.write_bytes(data)
  with pytest.raises(ValueError, match='hash differs'):
    store.load(path)


def test_missing_file(tmp_path):
  with pytest.raises(ValueError, match=r'cannot read .*absent.*check the path'):
    store.load(tmp_path / 'absent.safetensors')


def test_missing_parameter(path):
  _tamper(path, lambda leaves: leaves.pop(NAME))
  with pytest.raises(ValueError, match=rf'lacks {NAME} \(16, 8\)'):
    store.load(path)


def test_surplus_parameter(path):
  _tamper(path, lambda leaves: leaves.update(extra=leaves[NAME]))
  with pytest.raises(ValueError, match='surplus tensor extra'):
    store.load(path)


def test_transposed_parameter(path):
  _tamper(path, lambda leaves: leaves.update({NAME: leaves[NAME].T.copy()}))
  with pytest.raises(
    ValueError, match=rf'{NAME} has shape \(8, 16\), expected \(16, 8'
  ):
    store.load(path)


def test_values_that_are_not_finite(path):
  _tamper(path, lambda leaves: leaves[NAME].__setitem__((0, 0), np.nan))
  with pytest.raises(ValueError, match=f'{NAME} has values that are not finite'):
    store.load(path)


def test_other_dtype(path):
  change = lambda leaves: leaves.update({NAME: leaves[NAME].astype(np.float16)})  # noqa: E731
  _tamper(path, change)
  with pytest.raises(ValueError, match=f'{NAME} has dtype F16'):
    store.load(path)


def test_foreign_file(path):
  path.write_bytes(safetensors.numpy.save({'shared.weight': np.ones(3, np.float32)}))
  with pytest.raises(ValueError, match=r'is no specjax\.t5\.1 file'):
    store.load(path)


@pytest.mark.parametrize(
  'config', ['', '{', '[]', json.dumps({**CONFIG.to_dict(), 'emb_dim': -8})]
)
def test_bad_configuration(path, config):
  _tamper(path, lambda leaves: None, config=config)
  with pytest.raises(ValueError, match='holds no valid configuration'):
    store.load(path)


def test_save_refuses_params_of_another_shape(tmp_path, params):
  other = t5.T5Config.from_dict({**CONFIG.to_dict(), 'num_decoder_layers': 1})
  with pytest.raises(ValueError, match='surplus tensor decoder/layers_1'):
    store.save(tmp_path / 'x.safetensors', params, other)
  with pytest.raises(ValueError, match="dtype='float16'"):
    store.save(tmp_path / 'x.safetensors', params, CONFIG, dtype='float16')
  assert list(tmp_path.iterdir()) == []


def test_failed_save_leaves_the_old_file(path, params, monkeypatch):
  before = path.read_bytes()

  def fail(source, destination):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr('os.replace', fail)
  with pytest.raises(ValueError, match='No space left on device'):
    store.save(path, params, CONFIG)
  assert path.read_bytes() == before
  assert list(path.parent.iterdir()) == [path]


def test_unwritable_place(tmp_path, params):
  with pytest.raises(ValueError, match='cannot write'):
    store.save(tmp_path / 'absent' / 'x.safetensors', params, CONFIG)
