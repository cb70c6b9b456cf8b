"""The training loop: it learns, is deterministic, and resumes where it stopped."""

import dataclasses
import errno
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from specjax.checkpoints import store
from specjax.data import corpus
from specjax.models import t5
from specjax.train import fit, metrics, optimizer, resuming, train
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


def _run(folder, config=FIT, resume=False, stop=None, loss_fn=_table_loss, **options):
  """Fits the table; with `stop`, ends after that many steps as a crash would."""

  def batches(start):
    for step, batch in enumerate(_batches(start), start):
      if step == stop:
        raise KeyboardInterrupt
      yield batch

  return fit.fit(
    config,
    loss_fn,
    _table(),
    batches,
    folder,
    export=lambda params, step: None,
    resume=resume,
    **options,
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
    _run(tmp_path / 'part', often, stop=23)
  assert [line['step'] for line in metrics.read(tmp_path / 'part')] == [10, 20]
  resumed = _run(tmp_path / 'part', often, resume=True)
  assert resumed.step == whole.step == 24
  jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
  jax.tree.map(np.testing.assert_array_equal, resumed.opt_state, whole.opt_state)
  assert np.abs(whole.params['table'] - _table()['table']).max() > 0.1
  curves = [
    [(line['step'], line['loss'], line['grad_norm']) for line in metrics.read(folder)]
    for folder in (tmp_path / 'whole', tmp_path / 'part')
  ]
  assert curves[0] == curves[1]
  assert [step for step, *_ in curves[0]] == [10, 20, 24]


def test_resume_without_checkpoint(tmp_path):
  with pytest.raises(ValueError, match=r'no checkpoint in .*start without --resume'):
    _run(tmp_path / 'empty', resume=True)


def test_a_run_is_not_overwritten(tmp_path):
  state = _run(tmp_path)
  with pytest.raises(ValueError, match='has a checkpoint of step 24; go on from it'):
    _run(tmp_path)
  finished = _run(tmp_path, resume=True)
  jax.tree.map(np.testing.assert_array_equal, finished.params, state.params)


OFTEN = dataclasses.replace(FIT, checkpoint_seconds=0.0, log_steps=4, total_steps=12)


def _exploding_loss(params, batch):
  """Not a number from the seventh step on."""
  loss = _table_loss(params, batch)
  return jnp.where(batch.sources_BE[0, 0] < 0, jnp.nan, loss)


def test_a_loss_that_is_not_finite(tmp_path):
  def batches(start):
    for step, batch in enumerate(_batches(start), start):
      sources_BE = -batch.sources_BE if step == 6 else batch.sources_BE
      yield corpus.Batch(sources_BE, batch.targets_BT)

  def run(resume):
    return fit.fit(
      OFTEN, _exploding_loss, _table(), batches, tmp_path,
      export=lambda params, step: None, resume=resume,
    )  # fmt: skip

  message = 'loss: nan with .*at step 7; lower .*step 4 is saved, go on .*--resume'
  for resume in (False, True):
    with pytest.raises(ValueError, match=message):
      run(resume)
  assert _run(tmp_path, OFTEN, resume=True).step == 12


def test_parameters_that_are_not_finite_are_not_saved(tmp_path):
  """The last step's loss is finite and what it makes of the parameters is not."""
  config = FitConfig(
    total_steps=1, learning_rate=3e38, warmup_steps=0, decay_fraction=0.0,
    optimizer='adamw', weight_decay=10.0,
  )  # fmt: skip
  message = r'params: not finite after step 1; lower .*nothing is saved'
  with pytest.raises(ValueError, match=message):
    _run(tmp_path, config)
  assert not list((tmp_path / 'state').glob('[0-9]*'))


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
  save = ocp.CheckpointManager.save

  def full(self, step, *args, **kwargs):
    if step > 4:
      raise OSError(errno.ENOSPC, 'No space left on device')
    return save(self, step, *args, **kwargs)

  monkeypatch.setattr(ocp.CheckpointManager, 'save', full)
  message = 'cannot write .*No space left.*free some space.*step 4 is saved, go on'
  with pytest.raises(ValueError, match=message):
    _run(tmp_path, OFTEN)
  monkeypatch.undo()
  _same(_run(tmp_path, OFTEN, resume=True), _run(tmp_path / 'whole', OFTEN))


def test_a_full_disk_of_metrics(tmp_path, monkeypatch):
  def full(self, step, values):
    raise OSError(errno.ENOSPC, 'No space left on device')

  monkeypatch.setattr(metrics.MetricsWriter, 'write', full)
  message = r'cannot write .* \(No space left on device\);.*nothing is saved yet'
  with pytest.raises(ValueError, match=message):
    _run(tmp_path, OFTEN)


def _same(one, other):
  jax.tree.map(np.testing.assert_array_equal, tuple(one), tuple(other))


def _damage(folder):
  """Changes one byte in the middle of the largest file of a step."""
  files = sorted(
    folder.rglob('*'), key=lambda path: path.is_file() and path.stat().st_size
  )
  data = bytearray(files[-1].read_bytes())
  data[len(data) // 2] ^= 0x10
  files[-1].write_bytes(bytes(data))


def test_a_damaged_checkpoint(tmp_path):
  state = _run(tmp_path, OFTEN)
  _damage(tmp_path / 'state' / '12')
  message = (
    'checkpoint of step 12 in .* is damaged .*delete .*/state/12 and go on from step 8'
  )
  with pytest.raises(ValueError, match=message):
    _run(tmp_path, OFTEN, resume=True)
  shutil.rmtree(tmp_path / 'state' / '12')
  _same(_run(tmp_path, OFTEN, resume=True), state)


def test_any_changed_element_changes_the_checksum():
  tree = {'a': np.arange(6, dtype=np.float32).reshape(2, 3), 'b': np.int32(3)}
  before = resuming.checksum(tree)
  assert before == resuming.checksum(jax.tree.map(np.copy, tree))
  for index in np.ndindex(2, 3):
    changed = tree['a'].copy()
    changed[index] = np.nextafter(changed[index], np.float32(9))
    assert before != resuming.checksum({**tree, 'a': changed})
  assert before != resuming.checksum({**tree, 'b': np.int32(4)})
  assert before != resuming.checksum({**tree, 'a': tree['a'][::-1]})


def test_another_run_is_not_resumed(tmp_path):
  identity = {'seed': 0, 'data': {'buckets': ((8, 8),)}}
  _run(tmp_path, OFTEN, identity=identity)
  _run(tmp_path, OFTEN, resume=True, identity=identity)
  with pytest.raises(ValueError, match=r'seed: 1 is not what the run in .* 0; resume'):
    _run(tmp_path, OFTEN, resume=True, identity={**identity, 'seed': 1})


def test_lines_of_steps_that_are_run_again_are_dropped(tmp_path):
  with metrics.MetricsWriter(tmp_path, 0) as writer:
    for step in (2, 4, 6):
      writer.write(step, {'loss': 1 / step})
  with (tmp_path / metrics.NAME).open('a') as file:
    file.write('{"step": 8, "lo')  # a process died
  with metrics.MetricsWriter(tmp_path, 4) as writer:
    writer.write(5, {'loss': 0.0})
  assert [line['step'] for line in metrics.read(tmp_path)] == [2, 4, 5]


def test_accumulated_parts_are_the_whole_batch(tmp_path):
  """Rows of different lengths, empty ones among them, and a number not divided."""

  def batches(start):
    tokens = np.triu(np.full((7, 6), 5, np.int32)) + np.eye(7, 6, dtype=np.int32)
    while True:
      yield corpus.Batch(tokens, tokens)

  def mean_loss(params, batch):
    logits_BTV = params['table'][train.shift_right(jnp.asarray(batch.targets_BT))]
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(
      logits_BTV, batch.targets_BT
    )
    real_BT = batch.targets_BT > 0
    return jnp.sum(losses_BT, where=real_BT) / jnp.sum(real_BT)

  def run(accumulate):
    config = dataclasses.replace(OFTEN, optimizer='adamw', accumulate=accumulate)
    folder = tmp_path / str(accumulate)
    state = fit.fit(
      config, mean_loss, _table(), batches, folder, export=lambda params, step: None
    )
    return state.params, [(x['loss'], x['grad_norm']) for x in metrics.read(folder)]

  whole = run(1)
  for accumulate in (2, 4):
    parts = run(accumulate)
    np.testing.assert_allclose(parts[1], whole[1], rtol=1e-5)
    np.testing.assert_allclose(parts[0]['table'], whole[0]['table'], atol=1e-5)


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
  schedule = optimizer.make_schedule(config)
  rates = {step: float(schedule(step)) for step in (0, 5, 10, 60, 80, 100, 110)}
  expected = {0: 0, 5: 0.25, 10: 0.5, 60: 0.5, 80: 0.25, 100: 0, 110: 0}
  assert rates == pytest.approx(expected)


def test_constant_and_inverse_root_rates():
  constant = optimizer.make_schedule(
    dataclasses.replace(FIT, warmup_steps=0, decay_fraction=0.0)
  )
  assert [float(constant(step)) for step in (0, 5, 23)] == pytest.approx([3e-2] * 3)
  root = optimizer.make_schedule(
    dataclasses.replace(FIT, schedule='rsqrt', learning_rate=1.0, warmup_steps=100)
  )
  rates = [float(root(step)) for step in (0, 100, 400)]
  assert rates == pytest.approx([0.1, 0.1, 0.05])


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
