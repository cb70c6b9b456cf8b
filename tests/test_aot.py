"""`python -m specjax.aot`: options, errors, and the page, without the TPU compiler."""

import io
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from specjax import aot as command
from specjax.command import aot_page, aot_study
from specjax.command.aot_config import AotConfig, parse
from specjax.parallel import aot, topology
from specjax.parallel.mesh import everywhere, make_mesh


def test_help_starts_no_jax():
  program = (
    'import sys\n'
    'from specjax import aot\n'
    'try:\n'
    '  aot.main(["--help"])\n'
    'except SystemExit as done:\n'
    '  assert done.code == 0\n'
    'from jax._src import xla_bridge\n'
    'assert not xla_bridge.backends_are_initialized()\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', program], capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  for option in ('--topology', '--gamma', '--sweep', '--serialize', '--alpha'):
    assert option in done.stdout


def test_a_configuration_gives_the_defaults():
  config = parse(['--config', 'paper/cnndm_base_t1@v5e-8', '--max_source', '128'])
  assert (config.target, config.draft) == ('t5_1_1_xxl', 't5_1_1_base')
  assert (config.topology, config.num_speculative_tokens) == ('v5e-8', 3)
  assert (config.max_source, config.dtype) == (128, 'bfloat16')
  assert parse(['--config', 'flan_t5/xl_small@v4']).target == 't5_1_1_xl'


def test_sweeps():
  assert AotConfig(sweep='gamma=1..4').gammas == [1, 2, 3, 4, 7]
  assert AotConfig(sweep='gamma=7').gammas == [7]
  assert AotConfig().gammas == [7]


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--topology', 'v9:1x1'], "topology: 'v9:1x1' is unknown; did you mean "),
    (['--config', 'paper/ende_small_t0@h200'], "topology: 'h200' is unknown; known:"),
    (['--config', 'embedded'], "model: 'embedded' is no published checkpoint"),
    (['--target', 't5_1_1_xx'], "unknown T5 size 't5_1_1_xx'; did you mean"),
    (['--draft', 'byt5_small'], 'draft: byt5_small has 384 logits, t5_1_1_xxl 32128'),
    (['--topology', 'v4-8', '--mesh_data', '3'], 'mesh: 3,1 on v4:2x2x1, which has 4'),
    (['--mesh_model', '2'], 'which has 1 chip; give two sizes'),
    (['--sweep', 'gamma=5..2'], "sweep: 'gamma=5..2'; give gamma=A..B"),
    (['--sweep', 'gamma=1..200'], 'num_speculative_tokens: 200 is more than'),
    (['--gamma', '0'], 'specjax: gamma: 0; give 1 or more'),
    (['--alpha', '1.5'], 'alpha: 1.5; a probability'),
    (['--topologie', 'v4'], '--topologie: unknown option; did you mean --topology?'),
    (['--output', '/nowhere/x.json'], 'output: cannot write /nowhere/x.json'),
  ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
  assert command.main(arguments) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert message in line


def test_a_gamma_chosen_while_decoding_is_no_program(tmp_path, capsys):
  path = tmp_path / 'chosen.py'
  path.write_text(
    'from specjax.config import RunConfig, SpeculationConfig\n'
    "CONFIG = RunConfig(speculation=SpeculationConfig(num_speculative_tokens='auto'))\n"
  )
  assert command.main(['--config', str(path)]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert "'auto' in" in line
  assert 'give --gamma an integer instead of --config' in line


def test_without_the_compiler(monkeypatch, capsys):
  monkeypatch.setattr(topology, 'has_compiler', lambda: False)
  assert command.main([]) == 2
  assert "pip install 'specjax[aot]'" in capsys.readouterr().err


@pytest.fixture(scope='module')
def facts():
  """A loop and a step compiled here, in the place of a pair's."""
  whole = everywhere(make_mesh(1, 1))
  shapes = (
    {'w': jax.ShapeDtypeStruct((128, 128), jnp.float32)},
    jax.ShapeDtypeStruct((1, 128), jnp.float32),
  )

  def step(params, x):
    return x @ params['w']

  def loop(params, x):
    return jax.lax.while_loop(lambda x: jnp.sum(x) < 1, lambda x: step(params, x), x)

  def compiled(function):
    placed = ({'w': whole}, whole)
    program = aot.compile_program(function.__name__, function, shapes, placed)
    return aot_study.gather(program)

  return compiled(step), compiled(loop)


def make_study(facts, config, chip=topology.V4):
  step, loop = facts
  widths = [2, 5, 8]
  place = topology.find('v4:1x1x1')._replace(chip=chip)
  steps = dict.fromkeys(('plain', 'draft', 'target_encoder', 'draft_encoder'), step)
  steps.update({f'verify_{width}': step._replace(cycles=3) for width in widths})
  steps['plain'] = step._replace(cycles=2)
  found = {'loop': loop, 'plain_loop': loop, **steps}
  return aot_study.conclude(config, place, (1, 1), found, widths)


def test_a_study_as_json(facts):
  study = make_study(facts, AotConfig(sweep='gamma=1..7'))
  found = json.loads(json.dumps(aot_study.to_dict(study)))
  assert found['memory']['spare'] == 32 * 2**30 - found['memory']['needed']
  assert found['memory']['fits'] is True
  assert found['compiler_estimates']['v'] == 1.5
  assert found['programs']['loop']['weight_bytes_read'] == 128 * 128 * 4
  assert found['programs']['loop']['host_transfers'] == []
  assert [each['gamma'] for each in found['predictions']] == [*range(1, 8)]
  # Every step is the same one here: c = v = 1.
  assert found['predictions'][6]['c'] == found['predictions'][6]['v'] == 1.0
  assert found['best_gamma'] == study.best.gamma
  bytes_ = found['programs']['plain']['bytes_read']
  bytes_ += found['programs']['plain']['bytes_written']
  assert found['roofline']['plain']['memory'] == pytest.approx(bytes_ / 1.2e12)


def page(study):
  console = Console(width=170, file=io.StringIO(), record=True)
  console.print(aot_page.table(study))
  for line in aot_page.lines(study):
    console.print(line, markup=False, highlight=False, soft_wrap=True)
  return console.export_text()


def test_the_page(facts, tmp_path):
  study = make_study(facts, AotConfig(sweep='gamma=1..7'))
  text = page(study)
  assert 'memory: fits; ' in text
  assert 'host transfers in the loop: 0' in text
  assert 'the paper measured c = 0.02' in text
  assert 'best gamma of gamma=1..7: ' in text
  assert aot_page.picture(study, tmp_path / 'aot.png')
  assert (tmp_path / 'aot.png').read_bytes().startswith(b'\x89PNG')


def test_a_pair_that_does_not_fit_says_by_how_many_bytes(facts):
  study = make_study(facts, AotConfig(), topology.V4._replace(hbm_bytes=1000))
  needed = study.facts['loop'].program.memory.total
  text = page(study)
  assert f'memory: does not fit; {needed - 1000} bytes too few; split' in text
  assert 'the loop waits' not in text


def test_the_exit_code_says_what_is_wrong(facts, monkeypatch, tmp_path, capsys):
  config = AotConfig(output=str(tmp_path / 'aot.json'))

  def run_with(study):
    monkeypatch.setattr(aot_study, 'run', lambda config, note: study)
    return aot_page.show(config)

  study = make_study(facts, config)
  assert run_with(study) == 0
  assert json.loads((tmp_path / 'aot.json').read_text())['best_gamma'] == 7
  loop = study.facts['loop']._replace(host_transfers=('callback',))
  waiting = study._replace(facts={**study.facts, 'loop': loop})
  assert run_with(waiting) == 1
  assert 'host transfers in the loop: 1 (callback)' in capsys.readouterr().out
