"""The training loop: it learns, is deterministic, and resumes where it stopped."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.checkpoints import store
from specjax.data import corpus
from specjax.models import t5
from specjax.train import fit, train
from specjax.train.config import (
  DistillConfig,
  FitConfig,
  TrainConfig,
  load_config,
  run_command,
)

CONFIGS = Path(__file__).parents[2] / 'configs'
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
FIT = FitConfig(total_steps=24, learning_rate=3e-2, warmup_steps=5, log_steps=10)


def _batches(start):
  """Copying: the target is the source."""
  step = start
  while True:
    rng = np.random.default_rng(step)
    tokens = rng.integers(3, 16, (16, 6), dtype=np.int32)
    tokens[:, -1] = 1
    yield corpus.Batch(tokens, tokens)
    step += 1


def _table_loss(params, batch):
  """A bigram table, which compiles faster than a T5 and trains the same way."""
  logits_BTV = params['table'][train.shift_right(jnp.asarray(batch.targets_BT))]
  return optax.softmax_cross_entropy_with_integer_labels(
    logits_BTV, batch.targets_BT
  ).mean()


def _table():
  return {'table': jax.random.normal(jax.random.key(0), (16, 16))}


def _run(folder, config=FIT, resume=False, stop=None):
  """Fits the table; with `stop`, ends after that many steps as a crash would."""

  def batches(start):
    for step, batch in enumerate(_batches(start), start):
      if step == stop:
        raise KeyboardInterrupt
      yield batch

  return fit.fit(
    config,
    _table_loss,
    _table(),
    batches,
    folder,
    export=lambda params, step: None,
    resume=resume,
  )


def test_a_t5_learns(tmp_path):
  loss_fn = jax.jit(train.cross_entropy(MODEL))
  params = train.init_params(MODEL, 0)
  exported = {}
  state = fit.fit(
    FIT,
    loss_fn,
    params,
    _batches,
    tmp_path,
    export=lambda params, step: exported.update({step: params}),
  )
  assert state.step == 24
  assert list(exported) == [24]
  unseen = next(_batches(10_000))
  assert loss_fn(exported[24], unseen) < loss_fn(params, unseen) - 0.5


def test_resumed_run_equals_an_uninterrupted_one(tmp_path):
  whole = _run(tmp_path / 'whole')
  often = dataclasses.replace(FIT, checkpoint_seconds=0.0)
  with pytest.raises(KeyboardInterrupt):
    _run(tmp_path / 'part', often, stop=12)
  resumed = _run(tmp_path / 'part', often, resume=True)
  assert resumed.step == whole.step == 24
  jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
  jax.tree.map(np.testing.assert_array_equal, resumed.opt_state, whole.opt_state)
  assert np.abs(whole.params['table'] - _table()['table']).max() > 0.1


def test_resume_without_checkpoint(tmp_path):
  with pytest.raises(ValueError, match=r'no checkpoint in .*start without --resume'):
    _run(tmp_path / 'empty', resume=True)


def test_a_run_is_not_overwritten(tmp_path):
  state = _run(tmp_path)
  with pytest.raises(ValueError, match='has a checkpoint of step 24; go on from it'):
    _run(tmp_path)
  finished = _run(tmp_path, resume=True)
  jax.tree.map(np.testing.assert_array_equal, finished.params, state.params)


def test_cross_entropy_ignores_padding_and_matches_the_definition():
  params = train.init_params(MODEL, 1)
  batch = next(_batches(0))
  padded = corpus.Batch(
    np.pad(batch.sources_BE, ((0, 3), (0, 4))),
    np.pad(batch.targets_BT, ((0, 3), (0, 5))),
  )
  loss_fn = jax.jit(train.cross_entropy(MODEL, z_loss=0.0))
  np.testing.assert_allclose(loss_fn(params, padded), loss_fn(params, batch), rtol=1e-5)
  inputs_BT = np.pad(batch.targets_BT, ((0, 0), (1, 0)))[:, :-1]
  network = jax.jit(t5.Transformer(MODEL).apply)
  logits_BTV = network({'params': params}, batch.sources_BE, inputs_BT)
  logp_BTV = np.asarray(jax.nn.log_softmax(logits_BTV))
  chosen_BT = np.take_along_axis(logp_BTV, batch.targets_BT[..., None], -1)
  np.testing.assert_allclose(loss_fn(params, batch), -chosen_BT.mean(), rtol=1e-5)


def test_schedule_rises_holds_and_falls():
  config = FitConfig(
    total_steps=100, learning_rate=0.5, warmup_steps=10, decay_fraction=0.4
  )
  schedule = fit.make_schedule(config)
  rates = {step: float(schedule(step)) for step in (0, 5, 10, 60, 80, 100, 110)}
  expected = {0: 0, 5: 0.25, 10: 0.5, 60: 0.5, 80: 0.25, 100: 0, 110: 0}
  assert rates == pytest.approx(expected)


@pytest.mark.parametrize(
  ('field', 'value'),
  [('total_steps', 0), ('learning_rate', float('nan')), ('decay_fraction', 1.5)],
)
def test_bad_schedule_names_the_field(field, value):
  with pytest.raises(ValueError, match=f'{field}={value}'):
    dataclasses.replace(FIT, **{field: value})


@pytest.mark.parametrize(
  ('name', 'kind'), [('target', TrainConfig), ('draft', DistillConfig)]
)
def test_configs_are_those_of_the_embedded_weights(name, kind):
  config = load_config(CONFIGS / f'embedded_{name}.py', kind)
  weights = corpus.CORPUS_PATH.with_name(f'{name}.safetensors')
  checkpoint = store.load(weights)
  assert checkpoint.config == config.model
  assert checkpoint.notes['step'] == config.fit.total_steps
  assert checkpoint.notes['seed'] == config.fit.seed


def test_load_config_errors(tmp_path):
  with pytest.raises(ValueError, match='no file'):
    load_config(tmp_path / 'absent.py', TrainConfig)
  (tmp_path / 'empty.py').write_text('"""Nothing."""\n')
  with pytest.raises(ValueError, match='has no CONFIG of type TrainConfig'):
    load_config(tmp_path / 'empty.py', TrainConfig)


def test_bad_input_is_one_line_and_code_2(capsys, monkeypatch, tmp_path):
  argv = ['train', '--config', 'configs/absent.py', '--folder', str(tmp_path)]
  monkeypatch.setattr('sys.argv', argv)
  with pytest.raises(SystemExit) as stop:
    run_command(train.main)
  assert stop.value.code == 2
  error = capsys.readouterr().err
  assert error == (
    'error: config: no file configs/absent.py; configurations lie in configs/\n'
  )


def test_shift_right():
  shifted = train.shift_right(jnp.array([[5, 6, 1, 0]]))
  np.testing.assert_array_equal(shifted, [[0, 5, 6, 1]])
