"""Several processes: real ones, and what is said when they do not meet.

Joining is done by a command of its own, since JAX can be initialised once only and
ends the process when its peers do not come.
"""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from specjax.parallel import distributed
from specjax.testing.tiny_pair import write_tiny_pair
from specjax.testing.tiny_t5 import tiny_t5

# What a TPU VM sets, on a machine that is none.
TPU_LIKE = {
  'TPU_WORKER_HOSTNAMES': '10.0.0.1,10.0.0.2',
  'TPU_WORKER_ID': '1',
  'TPU_NAME': 'slice',
  'CLOUD_TPU_TASK_ID': '1',
}
JOIN = (
  'import sys\n'
  'from specjax.parallel import distributed\n'
  'try:\n'
  '  distributed.initialize(*eval(sys.argv[1]), timeout=int(sys.argv[2]))\n'
  'except ValueError as error:\n'
  '  sys.exit(str(error))\n'
)


def environment(**variables):
  """This process's without what names processes, devices and platforms."""
  dropped = ('TPU', 'JAX', 'XLA', 'CLOUD_TPU', 'SLURM', 'OMPI', 'MEGASCALE')
  kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
  return {**kept, **variables}


def start(argv, **variables):
  return subprocess.Popen(
    [sys.executable, *argv],
    env=environment(**variables),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def join(arguments=(), timeout=2, **variables):
  """Exit code, stderr and seconds of a process that tries to join others."""
  began = time.perf_counter()
  process = start(['-c', JOIN, repr(arguments), str(timeout)], **variables)
  _, error = process.communicate(timeout=60)
  return process.returncode, error, time.perf_counter() - began


def free_port():
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    return listener.getsockname()[1]


def test_variables_of_a_tpu_without_one():
  """Said at once: nothing waits for hosts that the environment makes up."""
  code, error, _ = join(timeout=50, **TPU_LIKE)
  assert code == 1
  (line,) = error.strip().splitlines()
  assert line.startswith(
    'multi_host: no TPU slice, Slurm or Open MPI job is found here'
  )
  assert 'TPU_WORKER_HOSTNAMES, TPU_NAME' in line
  assert 'no TPU is attached' in line
  assert '--coordinator_address' in line


def test_a_peer_that_does_not_come():
  address = f'127.0.0.1:{free_port()}'
  code, error, seconds = join((address, 2, 1), timeout=2)
  assert code == 2
  (line,) = error.strip().splitlines()
  assert line.startswith(
    f'specjax: multi_host: the processes did not meet at {address}'
  )
  assert 'within 2 s' in line
  assert seconds < 40


@pytest.mark.parametrize(
  ('arguments', 'variables', 'words'),
  [
    (
      (None, 2, 1),
      {},
      'coordinator_address: missing; give all of coordinator_address,',
    ),
    (('host:1', None, 1), {}, 'num_processes: missing'),
    ((), {'JAX_COORDINATOR_ADDRESS': 'host:1'}, 'num_processes: missing'),
    (('host', 2, 1), {}, r"coordinator_address: 'host'; give host:port"),
    (('host:port', 2, 1), {}, r"coordinator_address: 'host:port'; give host:port"),
    (('host:1', 2, 2), {}, 'process_id: 2; give 0 to 1'),
    (('host:1', 0, 0), {}, 'num_processes: 0; give 1 or more'),
    (('host:1',), {'JAX_NUM_PROCESSES': 'two', 'JAX_PROCESS_ID': '0'}, "'two'"),
  ],
)
def test_what_is_missing_or_wrong_is_named(arguments, variables, words, monkeypatch):
  for name in ('COORDINATOR_ADDRESS', 'NUM_PROCESSES', 'PROCESS_ID'):
    monkeypatch.delenv(f'JAX_{name}', raising=False)
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  with pytest.raises(ValueError, match=words):
    distributed.initialize(*arguments)


def decode(folder, output, *options, devices, **variables):
  texts = [f'--prompt={text}' for text in ('hello', 'abc abc', 'xyz')]
  argv = ['-m', 'specjax.run', '--model', folder, '--output', output, *texts, *options]
  argv += ['--temperature', '1', '--max_new_tokens', '8', '--gamma', '2', '--no_trace']
  flags = f'--xla_force_host_platform_device_count={devices}'
  return start(argv, JAX_PLATFORMS='cpu', XLA_FLAGS=flags, **variables)


@pytest.mark.slow
@pytest.mark.parametrize('variables', [{}, TPU_LIKE], ids=['plain', 'tpu_like'])
def test_two_processes_decode_what_one_does(variables, tmp_path):
  """One program on two processes of two devices; the first alone speaks."""
  shape = {'vocab_size': 384, 'num_heads': 8, 'head_dim': 2, 'mlp_dim': 32}
  target, draft = tiny_t5(0, 1, **shape), tiny_t5(1, 1, **shape)
  folder = str(write_tiny_pair(tmp_path / 'pair', target=target, draft=draft))
  alone = decode(folder, str(tmp_path / 'alone.jsonl'), devices=1)
  expected, error = alone.communicate(timeout=200)
  assert alone.returncode == 0, error
  address = f'127.0.0.1:{free_port()}'
  processes = []
  for index in range(2):
    options = ['--mesh_data=2', '--mesh_model=2', '--join_seconds=100']
    options += [f'--coordinator_address={address}', '--num_processes=2']
    output = str(tmp_path / f'{index}.jsonl')
    options.append(f'--process_id={index}')
    processes.append(decode(folder, output, *options, devices=2, **variables))
  said = [process.communicate(timeout=200) for process in processes]
  assert [process.returncode for process in processes] == [0, 0], said
  # What gloo itself prints is not ours; its threads may cut each other's lines.
  lines = [
    [
      line
      for line in out.splitlines()
      if '[Gloo]' not in line and 'peer ranks' not in line
    ]
    for out, _ in said
  ]
  assert lines == [expected.splitlines(), []]
  assert 'mesh: data 2 x model 2 on 4 cpu devices, 2 processes' in said[0][1]
  assert 'mesh:' not in said[1][1]
  assert not (tmp_path / '1.jsonl').exists()
  records = [read_texts(tmp_path / name) for name in ('alone.jsonl', '0.jsonl')]
  assert records[0] == records[1]
  assert len(records[0]) == 3


@pytest.mark.slow
def test_processes_that_were_told_different_things(tmp_path):
  """They would wait for each other for ever."""
  address = f'127.0.0.1:{free_port()}'
  processes = []
  for index in range(2):
    options = [f'--coordinator_address={address}', '--num_processes=2']
    options += [f'--process_id={index}', f'--seed={index}', '--mesh_model=2']
    output = str(tmp_path / 'out.jsonl')
    processes.append(decode('embedded', output, *options, devices=1))
  said = [process.communicate(timeout=200)[1] for process in processes]
  assert [process.returncode for process in processes] == [2, 2], said
  for error in said:
    assert 'specjax: input or options: differs between the processes; ' in error
  assert not list(tmp_path.iterdir())


def read_texts(path):
  """Everything but log-probabilities, whose last bits may differ."""
  records = map(json.loads, path.read_text(encoding='utf-8').splitlines())
  texts = [record for record in records if record['record'] == 'text']
  return [{k: v for k, v in text.items() if k != 'logprobs'} for text in texts]


def test_one_process_is_the_main_one(capsys):
  assert distributed.is_main()
  with distributed.only_main_speaks():
    print('heard')
  assert capsys.readouterr().out == 'heard\n'
  distributed.check_equal('input', ['any'])
