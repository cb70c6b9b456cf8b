"""Training on a mesh: the same losses, and everything lies in shards."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from specjax.data import corpus
from specjax.models import t5
from specjax.parallel.mesh import make_mesh
from specjax.train import fit, loss, metrics, optimizer, train
from specjax.train.config import FitConfig

MODEL = t5.T5Config(
  vocab_size=16,
  emb_dim=16,
  num_heads=2,
  head_dim=8,
  mlp_dim=32,
  num_encoder_layers=1,
  num_decoder_layers=1,
  logits_via_embedding=True,
)
ADAMW = FitConfig(
  total_steps=4,
  learning_rate=1e-2,
  warmup_steps=0,
  log_steps=1,
  optimizer='adamw',
  clip_norm=1.0,
)


def _batches(start):
  """Copying, in 6 rows: a mesh and accumulation fill them up to a multiple."""
  while True:
    rng = np.random.default_rng(start)
    tokens = rng.integers(3, 16, (6, 5), dtype=np.int32)
    tokens[:, -1] = 1
    yield corpus.Batch(tokens, tokens)
    start += 1


def _train(folder, mesh, config=ADAMW):
  state = fit.fit(
    config,
    loss.cross_entropy(MODEL),
    train.init_params(MODEL, 0, mesh),
    _batches,
    folder,
    export=lambda params, step: None,
    mesh=mesh,
  )
  return state, [line['loss'] for line in metrics.read(folder)]


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
  return _train(tmp_path_factory.mktemp('alone'), None)


@pytest.mark.parametrize(
  ('data', 'model', 'accumulate'),
  [
    pytest.param(2, 1, 1, marks=pytest.mark.slow),
    pytest.param(1, 2, 1, marks=pytest.mark.slow),
    (2, 2, 2),
  ],
)
def test_a_mesh_trains_as_one_device(tmp_path, alone, data, model, accumulate):
  mesh = make_mesh(data, model)
  config = dataclasses.replace(ADAMW, accumulate=accumulate)
  state, losses = _train(tmp_path, mesh, config)
  expected_state, expected = alone
  np.testing.assert_allclose(losses, expected, rtol=1e-4)
  assert losses[-1] < losses[0] - 0.1
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=2e-3),
    state.params,
    expected_state.params,
  )
  moments = optax.tree.get(state.opt_state, 'mu')
  for tree in (state.params, moments):
    kernel = tree['encoder']['layers_0']['mlp']['wi_0']['kernel']
    assert kernel.sharding.shard_shape(kernel.shape) == (16, 32 // model)
    assert len(kernel.sharding.device_set) == data * model


@pytest.mark.slow
def test_a_run_goes_on_on_other_devices(tmp_path):
  short = dataclasses.replace(ADAMW, total_steps=2)
  saved, _ = _train(tmp_path, make_mesh(1, 2), short)
  params = train.init_params(MODEL, 1, make_mesh(2, 1))
  state = fit.fit(
    short,
    loss.cross_entropy(MODEL),
    params,
    _batches,
    tmp_path,
    export=lambda params, step: None,
    mesh=make_mesh(2, 1),
    resume=True,
  )
  kernel = state.params['encoder']['layers_0']['mlp']['wi_0']['kernel']
  assert state.step == 2
  assert kernel.sharding.mesh.shape['data'] == 2
  saved = jax.tree.leaves(saved.params)
  for one, other in zip(jax.tree.leaves(state.params), saved, strict=True):
    np.testing.assert_array_equal(one, other)


def test_adafactors_means_are_whole_and_its_moments_split():
  model = t5.T5Config.from_size('t5_1_1_small', num_encoder_layers=1)
  shapes = jax.eval_shape(lambda: train.init_params(model, 0))
  mesh = make_mesh(2, 2)
  adafactor = optimizer.make_optimizer(FitConfig(total_steps=1))
  placed = optimizer.param_shardings(shapes, mesh)
  found = optimizer.state_shardings(adafactor, shapes, placed, mesh)
  state = jax.eval_shape(adafactor.init, shapes)
  leaves = zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True)
  sizes = {(leaf.shape, sharding.shard_shape(leaf.shape)) for leaf, sharding in leaves}
  assert ((1024,), (1024,)) in sizes  # a mean over rows of a 512 x 1024 kernel
  assert ((), ()) in sizes
  assert ((6, 32), (3, 32)) in sizes  # relative positions, too small to factor
