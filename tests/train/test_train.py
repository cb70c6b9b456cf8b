"""Runs from the command line: killed and resumed, fine-tuned, decoded, scored."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from specjax.checkpoints import store
from specjax.data import text
from specjax.models import t5
from specjax.train import evaluate, metrics, train
from specjax.train.config import (
  DataConfig,
  EvalConfig,
  FitConfig,
  LossConfig,
  TrainConfig,
  run_command,
)

CONFIG = """
from specjax.models.t5 import T5Config
from specjax.train.config import DataConfig, EvalConfig, FitConfig, TrainConfig

CONFIG = TrainConfig(
  model=T5Config(
    vocab_size=384, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32,
    num_encoder_layers=1, num_decoder_layers=1,
  ),
  fit=FitConfig(total_steps=40, warmup_steps=4, log_steps=2, checkpoint_seconds=0.0),
  data=DataConfig(
    mixture=(('pairs.tsv', 1.0), ('spans:text.txt', 1.5)),
    buckets=((24, 16),),
    tokens_per_batch=320,
    vocabulary='bytes',
  ),
  eval=EvalConfig(sources=('pairs.tsv',), num_examples=8),
)
"""
MODEL = t5.T5Config(
  vocab_size=384,
  emb_dim=16,
  num_heads=2,
  head_dim=8,
  mlp_dim=32,
  num_encoder_layers=1,
  num_decoder_layers=1,
)


@pytest.fixture
def place(tmp_path, monkeypatch):
  """A folder with a configuration and its data, and the working directory."""
  words = ('one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')
  lines = [f'say: {a} {b}\t{b}\n' for a in words for b in words]
  (tmp_path / 'pairs.tsv').write_text(''.join(lines))
  (tmp_path / 'text.txt').write_text(''.join(f'{a} fox, {a} dog.\n' for a in words))
  (tmp_path / 'config.py').write_text(CONFIG)
  monkeypatch.chdir(tmp_path)
  return tmp_path


def _start(folder, *arguments):
  # As users compile: the tests' own process leaves XLA's expensive passes out.
  return subprocess.Popen(
    [
      *(sys.executable, '-m', 'specjax.train', '--config', 'config.py'),
      *('--folder', folder, *arguments),
    ],
    env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def _finish(process):
  output, _ = process.communicate()
  assert process.returncode == 0, output
  return output


def _curve(folder):
  """All but the rate of tokens."""
  lines = metrics.read(folder)
  return [{k: v for k, v in line.items() if 'second' not in k} for line in lines]


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_it_had_not_been(place):
  killed = _start('killed')
  while len(list((place / 'killed' / 'state').glob('[0-9]'))) < 2:
    assert killed.poll() is None, killed.communicate()[0]
    time.sleep(0.01)
  killed.kill()
  killed.communicate()
  assert killed.returncode == -signal.SIGKILL
  steps = {path.name for path in (place / 'killed' / 'state').iterdir()}
  assert '40' not in steps
  assert 'step 40 saved' in _finish(_start('killed', '--resume'))
  _finish(_start('whole'))
  curve = _curve('whole')
  assert _curve('killed') == curve
  losses = [line['loss'] for line in curve if 'loss' in line]
  assert len(losses) == 20
  assert losses[-1] < losses[0] - 0.5
  whole, killed = (_state(place / folder) for folder in ('whole', 'killed'))
  assert len(whole) > 50  # parameters, their moments, step and checksum
  for one, other in zip(whole, killed, strict=True):
    np.testing.assert_array_equal(one, other)


def _state(folder):
  """All arrays of the last checkpoint, as they were saved."""
  with ocp.StandardCheckpointer() as checkpointer:
    return jax.tree.leaves(checkpointer.restore(folder / 'state' / '40' / 'default'))


def _config(**fields):
  base = {
    'model': MODEL,
    'fit': FitConfig(total_steps=2, warmup_steps=0, log_steps=1),
    'data': DataConfig(
      mixture=(('pairs.tsv', 1.0),), buckets=((24, 16),), vocabulary='bytes'
    ),
  }
  return TrainConfig(**{**base, **fields})


def test_fine_tuning_begins_with_the_checkpoint(place):
  """With a step size of almost nothing, what comes out is what went in."""
  params = train.init_params(MODEL, 7)
  store.save(place / 'begin.safetensors', params, MODEL)
  still = FitConfig(total_steps=1, learning_rate=1e-30, log_steps=1)
  narrow = dataclasses.replace(MODEL, emb_dim=8)  # the checkpoint's shape counts
  config = _config(model=narrow, fit=still, loss=LossConfig(label_smoothing=0.1))
  train.train(config, place / 'run', init='begin.safetensors')
  found = store.load(place / 'run' / 'model.safetensors')
  assert found.config == MODEL
  assert set(found.notes['data_sha256']) == {'pairs.tsv'}
  jax.tree.map(
    np.testing.assert_array_equal,
    found.params,
    store.load(place / 'begin.safetensors').params,
  )


def test_evaluation_decodes_with_the_loop(place):
  """Scores are those of the texts that plain greedy decoding gives."""
  params = train.init_params(MODEL, 3)
  vocabulary = text.byte_vocabulary()
  config = _config(
    # What random weights say has few characters and many bytes.
    data=DataConfig(
      mixture=(('pairs.tsv', 1.0),), buckets=((24, 24),), vocabulary='bytes'
    ),
    eval=EvalConfig(
      sources=('pairs.tsv',),
      num_examples=5,
      decode_examples=5,
      max_new_tokens=6,
      metrics=('exact_match',),
    ),
  )
  sources = [vocabulary.encode('say: one two'), vocabulary.encode('say: one three')]
  texts = evaluate.decode(MODEL, params, vocabulary, sources, max_new_tokens=6)
  logits = jax.jit(train.teacher_forcing(MODEL))
  for source, found in zip(sources, texts, strict=True):
    ids = []
    while len(ids) < 6 and vocabulary.eos_id not in ids:
      targets_BT = text.pad([[*ids, 2]], 6)
      logits_V = logits(params, text.pad([source], 24), targets_BT)[0, len(ids)]
      ids.append(int(np.argmax(logits_V)))
    assert found == vocabulary.decode(ids)
  measured = evaluate.make_evaluate(config, vocabulary)(params)
  assert measured['pairs.tsv/exact_match'] == 0
  assert 5 < measured['pairs.tsv/loss'] < 12
  # The references are now what the network says.
  (place / 'pairs.tsv').write_text(
    ''.join(
      f'{vocabulary.decode(source)}\t{found}\n'
      for source, found in zip(sources, texts, strict=True)
    )
  )
  measured = evaluate.make_evaluate(config, vocabulary)(params)
  assert measured['pairs.tsv/exact_match'] == 100


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--data', 'absent.tsv'], 'data: no file absent.tsv; check the path'),
    (['--data', 'pairs.tsv=x'], "data: 'pairs.tsv=x': 'x' is no weight; give a number"),
    (['--data', 'pairs.tsv=-1'], "mixture: 'pairs.tsv' has weight -1.0"),
    (['--data', 'cut.jsonl'], 'cut.jsonl, line 2: no JSON'),
    (['--init', 'absent'], 'weights: nothing is at'),
    (['--vocabulary', 'absent.model'], 'vocabulary: no file'),
    (['--dtype', 'float16'], "dtype='float16'"),
    (
      ['--mesh_model', '3'],
      'has size 2, which model=3 does not divide; give --mesh_model 1',
    ),
    (['--mesh_data', '9'], 'takes 9 devices and there are 8'),
    (['--valid', 'nothing'], "task: 'nothing' is unknown"),
  ],
)
def test_bad_input_is_one_line(place, capsys, monkeypatch, arguments, message):
  (place / 'cut.jsonl').write_text(
    '{"source": "a", "target": "b"}\n{"source": "a", "ta'
  )
  argv = ['train', '--config', 'config.py', '--folder', 'run', *arguments]
  monkeypatch.setattr('sys.argv', argv)
  with pytest.raises(SystemExit) as stop:
    run_command(train.main)
  assert stop.value.code == 2
  error = capsys.readouterr().err
  assert message in error
  assert error.count('\n') == 1
  assert not (place / 'run').exists() or not (place / 'run' / 'state').exists()
