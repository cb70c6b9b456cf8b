"""Distillation from a user's checkpoints and files, by the command."""

import json
import sys

import numpy as np
import pytest

from specjax.checkpoints import store
from specjax.core import warp as warps
from specjax.load import load_pair
from specjax.testing import tiny_pair
from specjax.train import distill, select
from specjax.train.config import run_command
from specjax.train.train import find_vocabulary


@pytest.fixture
def files(tmp_path):
  """A pair of tiny T5s over bytes and two files of texts."""
  pair = tiny_pair.write_tiny_pair(tmp_path / 'pair')
  for name, words in (('own.tsv', ('ab', 'ba', 'aab')), ('held.tsv', ('bb', 'abb'))):
    (tmp_path / name).write_text(''.join(f'{word}\t{word}\n' for word in words))
  return pair


def distil(files, *options, config='embedded_draft'):
  folder = files.parent
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, 'argv', [
      'distill', '--config', str(config), '--target', str(files / 'target.safetensors'),
      '--folder', str(folder / 'run'), '--vocabulary', 'bytes',
      '--data', str(folder / 'own.tsv'), *options,
    ])  # fmt: skip
    run_command(distill.main)
  return folder / 'run'


@pytest.mark.parametrize('whose', ['fixed', 'target'])
def test_a_users_draft_on_a_users_texts(files, whose, capsys):
  held = files.parent / 'held.tsv'
  config = files.parent / 'config.py'
  config.write_text(
    'from specjax.models.t5 import T5Config\n'
    'from specjax.train.config import DataConfig, DistillConfig, FitConfig\n'
    'CONFIG = DistillConfig(\n'
    '  T5Config.from_size("t5_1_1_small"),\n'
    '  FitConfig(2, warmup_steps=0),\n'
    '  DataConfig(buckets=((8, 8),), tokens_per_batch=64),\n'
    ')\n'
  )
  folder = distil(
    files, '--valid', str(held), '--init', str(files / 'draft.safetensors'),
    '--divergence', 'tvd', '--texts', whose, '--c', '0.1', config=config,
  )  # fmt: skip
  lines = (folder / 'scores.jsonl').read_text().splitlines()
  scores = [json.loads(line) for line in lines]
  assert [each['step'] for each in scores] == [0, 2]
  assert 'step 0: alpha' in capsys.readouterr().out
  # The first is the given draft's alpha, on the held-out file.
  pair = load_pair(files)
  vocabulary, _ = find_vocabulary('bytes', None)
  prompts = select.held_out(
    pair.target,
    pair.params.target,
    vocabulary,
    pair.encode(['bb', 'abb']),
    temperature=1.0,
    seed=0,
  )
  models = {'target': pair.target, 'draft': pair.draft}
  alpha = select.measure_alpha(
    pair.params, prompts, **models, warp=warps.make_warp(vocabulary.size, 1)
  )
  assert scores[0]['alpha'] == pytest.approx(alpha, abs=1e-5)
  model = store.load(folder / 'model.safetensors')
  assert model.config == pair.draft_config
  before = pair.params.draft['decoder']['logits_dense']['kernel']
  assert np.abs(model.params['decoder']['logits_dense']['kernel'] - before).max() > 1e-3
  assert (folder / 'answers.npz').is_file() == (whose == 'target')


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (['--divergence', 'tvd'], 'eval.sources: alpha is measured on held-out sources'),
    (['--init', 'draft.safetensors'], 'init: draft.safetensors without a recipe; give'),
    ([], 'own.tsv without a recipe; give --divergence'),
    (['--target', 'nowhere', '--divergence', 'tvd'], 'nowhere'),
  ],
)
def test_bad_orders_are_one_line(files, options, message, capsys):
  with pytest.raises(SystemExit) as caught:
    distil(files, *options)
  assert caught.value.code == 2
  error = capsys.readouterr().err
  assert error.startswith('error: ')
  assert message in error
  assert error.count('\n') == 1
