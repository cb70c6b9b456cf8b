"""Orbax: any mesh, all or nothing, and a training state as it was."""

import json
import os
import shutil
import time

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.checkpoints import leaves, orbax
from specjax.models import t5

CONFIG = t5.T5Config(
  vocab_size=16,
  emb_dim=8,
  num_heads=8,
  head_dim=4,
  mlp_dim=16,
  num_encoder_layers=1,
  num_decoder_layers=1,
)
NAME = 'decoder/layers_0/mlp/wo/kernel'
TOKENS = np.array([[3, 5, 7, 2, 1]])


def mesh_of(shape, names):
  devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
  return jax.sharding.Mesh(devices, names)


def shardings(mesh):
  """Every parameter over all axes: its last axis over the mesh's last, and so on."""
  names = tuple(reversed(mesh.axis_names))

  def sharding(shape):
    axes = [*names[: len(shape)]] + [None] * (len(shape) - len(names))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes[::-1]))

  shapes = leaves.expected_shapes(CONFIG)
  return {name: sharding(shape) for name, shape in shapes.items()}


@pytest.fixture(scope='module')
def flat():
  rng = np.random.default_rng(0)
  return {
    name: rng.normal(size=shape).astype(np.float32)
    for name, shape in leaves.expected_shapes(CONFIG).items()
  }


@pytest.fixture(scope='module')
def logits(flat):
  """Of parameters on one device, as numbers; and the function."""
  apply = jax.jit(t5.Transformer(CONFIG).apply)

  def run(params):
    on_host = jax.tree.map(np.asarray, params)
    return np.asarray(apply({'params': on_host}, TOKENS, TOKENS))

  return run


@pytest.fixture(scope='module')
def folder(flat, tmp_path_factory):
  """Saved from 8 devices."""
  folder = tmp_path_factory.mktemp('orbax') / 'a model'
  places = shardings(mesh_of((8,), ('model',)))
  params = {name: jax.device_put(value, places[name]) for name, value in flat.items()}
  nested = flax.traverse_util.unflatten_dict(params, sep='/')
  orbax.save(folder, nested, CONFIG, notes={'step': 7})
  return folder


@pytest.mark.parametrize(
  ('shape', 'names'),
  [
    ((1,), ('one',)),
    ((2,), ('model',)),
    ((4,), ('other',)),
    ((2, 4), ('x', 'y')),
    ((4, 2), ('data', 'model')),
  ],
)
def test_saved_on_8_devices_restored_on_any(folder, flat, logits, shape, names):
  weights = orbax.open_weights(folder)
  assert (weights.config, weights.notes) == (CONFIG, {'step': 7})
  places = shardings(mesh_of(shape, names))
  params = leaves.restore(weights, shardings=places)
  restored = flax.traverse_util.flatten_dict(params, sep='/')
  assert restored.keys() == flat.keys()
  for name, values in restored.items():
    assert values.sharding == places[name]
    np.testing.assert_array_equal(values, flat[name], err_msg=name)
  expected = logits(flax.traverse_util.unflatten_dict(flat, sep='/'))
  np.testing.assert_array_equal(logits(params), expected)


def test_round_trip_keeps_bfloat16(tmp_path, flat):
  narrow = {name: value.astype(jnp.bfloat16) for name, value in flat.items()}
  narrow[NAME] = np.zeros_like(narrow[NAME])
  params = flax.traverse_util.unflatten_dict(narrow, sep='/')
  orbax.save(tmp_path / 'x', params, CONFIG)
  weights = orbax.open_weights(tmp_path / 'x')
  assert weights.leaves.keys() == narrow.keys()
  for name, leaf in weights.leaves.items():
    values = leaves.read_whole(leaf)
    assert values.dtype == jnp.bfloat16
    np.testing.assert_array_equal(values, narrow[name])


def test_a_place_that_is_taken(folder, flat):
  params = flax.traverse_util.unflatten_dict(flat, sep='/')
  with pytest.raises(ValueError, match='a model exists; choose another place'):
    orbax.save(folder, params, CONFIG)
  del params['decoder']['layers_0']['mlp']['wo']
  with pytest.raises(ValueError, match=f'lacks {NAME}'):
    orbax.save(folder.parent / 'x', params, CONFIG)
  assert [path.name for path in folder.parent.iterdir()] == ['a model']


@pytest.fixture
def full_disk(monkeypatch):
  """Fails when a checkpoint that is complete is given its name."""

  def fail(*args, **kwargs):
    raise OSError(28, 'No space left on device')

  with monkeypatch.context() as context:
    context.setattr('pathlib.Path.rename', fail)
    context.setattr('os.rename', fail)
    yield context


def test_a_failed_save_leaves_nothing(tmp_path, flat, full_disk):
  params = flax.traverse_util.unflatten_dict(flat, sep='/')
  with pytest.raises(ValueError, match=r'cannot write .*No space left on device'):
    orbax.save(tmp_path / 'x', params, CONFIG)
  assert list(tmp_path.iterdir()) == []


def damage(folder, tmp_path, change):
  copy = tmp_path / 'copy'
  shutil.copytree(folder, copy)
  change(copy)
  return copy


def edit(path, change):
  value = json.loads(path.read_text())
  change(value)
  path.write_text(json.dumps(value))


@pytest.mark.parametrize(
  ('change', 'match'),
  [
    (lambda at: shutil.rmtree(at), 'no Orbax checkpoint of a T5: .*no such file'),
    (lambda at: (at / 'about/metadata').write_text('{'), 'no Orbax checkpoint'),
    (lambda at: (at / 'params/_METADATA').unlink(), 'no Orbax checkpoint of a T5'),
    (
      lambda at: edit(at / 'about/metadata', lambda about: about.update(format='x')),
      r"is no specjax\.t5\.orbax\.1 checkpoint \(format 'x'\)",
    ),
    (
      lambda at: edit(at / 'about/metadata', lambda about: about.pop('config')),
      "holds no valid configuration or names .*'config'",
    ),
    (
      lambda at: edit(
        at / 'about/metadata', lambda about: about['config'].update(mlp_dim=12)
      ),
      r'mlp/wi_0/kernel has shape \(8, 16\), expected \(8, 12\)',
    ),
    (
      lambda at: (at / 'params/manifest.ocdbt').unlink(),
      r'cannot read [\w/]+ \(.*; copy the checkpoint again',
    ),
    (lambda at: shutil.rmtree(at / 'params/d'), r'cannot read [\w/]+ \('),
  ],
)
def test_damages(folder, tmp_path, change, match):
  copy = damage(folder, tmp_path, change)
  with pytest.raises(ValueError, match=match) as error:
    leaves.restore(orbax.open_weights(copy))
  assert '\n' not in str(error.value)


# A training state.


def make_state(scale):
  params = {'w': jnp.full((8, 3), scale, jnp.bfloat16), 'b': jnp.float32(scale) / 3}
  return {
    'params': params,
    'optimizer': optax.adafactor(0.1).init(params),
    'key': jax.random.key(4),
    'step': 7,
    'loss': 1 / 3,
  }


def assert_same(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    if jnp.issubdtype(getattr(other, 'dtype', 'int32'), jax.dtypes.prng_key):
      one, other = jax.random.key_data(one), jax.random.key_data(other)
    assert getattr(one, 'dtype', type(one)) == getattr(other, 'dtype', type(other))
    np.testing.assert_array_equal(one, other)


def test_steps_of_training(tmp_path):
  with orbax.AsyncSaver(tmp_path / 'run', keep=2) as saver:
    assert saver.latest_step is None
    with pytest.raises(ValueError, match=r'step: None, but .*run has none'):
      saver.restore(make_state(0))
    for step in (1, 2, 30):
      saver.save(step, make_state(step))
      assert saver.latest_step == step
    saver.wait()
    with pytest.raises(ValueError, match=r'step: 30, but .* has step 30; give a later'):
      saver.save(30, make_state(3))
    with pytest.raises(ValueError, match=r'step: 1, but .*run has \[2, 30\]'):
      saver.restore(make_state(0), step=1)
    assert_same(saver.restore(make_state(0)), make_state(30))
    assert_same(saver.restore(make_state(0), step=2), make_state(2))
  # Another process goes on.
  with orbax.AsyncSaver(tmp_path / 'run') as saver:
    assert saver.latest_step == 30
    assert_same(saver.restore(make_state(0)), make_state(30))


def test_a_state_may_be_donated_while_it_is_written(tmp_path, monkeypatch):
  """Also `restore` waits for what is being written."""

  def slowly(*args):
    time.sleep(0.5)
    return rename(*args)

  rename = os.rename
  monkeypatch.setattr('os.rename', slowly)
  step = jax.jit(lambda w: w + 1, donate_argnums=0)
  state = jnp.arange(8.0)
  with orbax.AsyncSaver(tmp_path) as saver:
    saver.save(1, {'w': state})
    state = step(state)
    restored = saver.restore({'w': state})['w']
  np.testing.assert_array_equal(restored, np.arange(8.0))
  np.testing.assert_array_equal(state, np.arange(8.0) + 1)


def test_a_state_moves_to_another_mesh(tmp_path):
  spec = jax.sharding.PartitionSpec
  wide = jax.sharding.NamedSharding(mesh_of((8,), ('m',)), spec('m'))
  narrow = jax.sharding.NamedSharding(mesh_of((2,), ('other',)), spec(None, 'other'))
  values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
  with orbax.AsyncSaver(tmp_path) as saver:
    saver.save(1, {'w': jax.device_put(values, wide)})
    like = {'w': jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=narrow)}
    restored = saver.restore(like)['w']
  assert restored.sharding == narrow
  np.testing.assert_array_equal(restored, values)


def test_a_half_written_step_does_not_count(tmp_path, full_disk):
  saver = orbax.AsyncSaver(tmp_path)
  saver.save(1, make_state(1))
  with pytest.raises(ValueError, match=r'cannot write .*No space left on device'):
    saver.wait()
  full_disk.undo()
  assert [path.name for path in tmp_path.iterdir()] != []
  with orbax.AsyncSaver(tmp_path) as saver:
    assert saver.latest_step is None
    saver.save(1, make_state(1))
    assert_same(saver.restore(make_state(0)), make_state(1))
    assert [path.name for path in tmp_path.iterdir()] == ['1']


def test_keep(tmp_path):
  with pytest.raises(ValueError, match='keep: 0; give 1 or more'):
    orbax.AsyncSaver(tmp_path, keep=0)
