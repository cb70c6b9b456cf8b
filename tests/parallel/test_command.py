"""The command line's part: meshes that it makes, and the script for a slice."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import pytest

from specjax.command import devices
from specjax.config import IOConfig, ParallelConfig, RunConfig

SCRIPT = pathlib.Path(__file__).parents[2] / 'scripts' / 'tpu_slice.sh'
TEXTS = ['text']


def config(**fields):
  return RunConfig(parallel=ParallelConfig(**fields), io=IOConfig(batch_size=8))


def test_one_device_is_no_mesh(capsys):
  plain = config()
  assert devices.start(plain, TEXTS) == (plain, None)
  assert capsys.readouterr().err == ''


def test_a_mesh_is_made_and_told(capsys):
  asked = config(mesh_data=4, mesh_model=2)
  told, mesh = devices.start(asked, [*TEXTS, 'another'])
  assert told == asked
  assert dict(mesh.shape) == {'data': 4, 'model': 2}
  assert capsys.readouterr().err == (
    'mesh: data 4 x model 2 on 8 cpu devices, 1 process; the draft is whole on every '
    'device\n'
  )


@pytest.mark.parametrize(
  ('fields', 'remedy'),
  [
    ({'batch_size': 1}, 'raise --batch_size'),
    ({'stream': True}, 'leave out --stream'),
    ({}, 'give more texts'),
  ],
)
def test_copies_are_told(fields, remedy, capsys):
  asked = config(mesh_data=4, mesh_model=1, shard_draft=True)
  asked = dataclasses.replace(asked, io=dataclasses.replace(asked.io, **fields))
  devices.start(asked, TEXTS)
  first, second = capsys.readouterr().err.splitlines()
  assert first.endswith('the draft is split too')
  assert second.startswith('one text at a time: the 4 groups of the data axis all ')
  assert remedy in second


def test_several_processes_need_texts():
  with pytest.raises(ValueError, match='input: missing; several processes decode'):
    devices.start(config(multi_host=True), None)


@pytest.mark.parametrize('field', ['mesh_data', 'mesh_model', 'join_seconds'])
def test_bad_numbers_are_refused(field):
  with pytest.raises(ValueError, match=f'{field}: 0; give 1 or more'):
    ParallelConfig(**{field: 0})


def run_script(tmp_path, *arguments, **variables):
  """With a gcloud that runs --command as a worker's shell would."""
  fake = tmp_path / 'gcloud'
  fake.write_text(
    f'#!{sys.executable}\n'
    'import subprocess, sys\n'
    'print(*sys.argv[1:-1])\n'
    'command = sys.argv[-1].removeprefix("--command=")\n'
    'subprocess.run(["bash", "-c", command], check=True)\n'
  )
  fake.chmod(0o755)
  path = f'{tmp_path}:{os.environ["PATH"]}'
  return subprocess.run(
    ['bash', str(SCRIPT), *arguments],
    env={**os.environ, 'PATH': path, **variables},
    capture_output=True,
    text=True,
    check=False,
  )


def test_the_script_runs_the_same_words_on_every_worker(tmp_path):
  show = 'import os, sys; print(os.getcwd()); print(sys.argv[1:])'
  words = ['ende: a "b" $HOME', "it's", '*']
  argv = ['python3', '-c', show, *words]
  directory = tmp_path / 'a place'
  directory.mkdir()
  done = run_script(
    tmp_path, 'slice', 'zone-b', *argv, TPU_DIRECTORY=str(directory), TPU_PROJECT='mine'
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines() == [
    'compute tpus tpu-vm ssh slice --zone=zone-b --worker=all --project=mine',
    str(directory),
    repr(words),
  ]


def test_the_script_says_how_it_is_used(tmp_path):
  done = run_script(tmp_path, 'slice', 'zone-b')
  assert done.returncode == 2
  assert 'scripts/tpu_slice.sh NAME ZONE COMMAND...' in done.stderr
  assert done.stdout == ''
