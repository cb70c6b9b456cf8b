"""Each experiment runs at a tiny size and writes what its README shows."""

import importlib
import json

import pytest

PNG = b'\x89PNG\r\n\x1a\n'


def run(name, folder, *arguments):
  """Runs an experiment's main; returns its records."""
  module = importlib.import_module(f'experiments.{name}.__main__')
  module.main(['--output', str(folder), *arguments])
  lines = (folder / 'results.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


def has_picture(folder, name):
  return (folder / f'{name}.png').read_bytes().startswith(PNG)


def common():
  return importlib.import_module('experiments.common')


def coins():
  return importlib.import_module('experiments.coins')


def test_table1_gives_the_paper_s_figures_to_the_digit(tmp_path):
  records = run('table1', tmp_path, '--quick')
  assert len(records) == 6
  for each in records:
    assert each['operations_formula'] == each['operations_paper']
    assert each['speed_formula'] == each['speed_paper']
    distance = abs(each['speed_measured'] - each['speed_formula'])
    assert 0 < each['standard_error'] < 0.5
    assert distance < 4.5 * each['standard_error'] + 0.005


def test_figure3_is_the_planning_table(tmp_path):
  records = run('figure3', tmp_path)
  best = {(each['alpha'], each['c']): each for each in records}
  assert best[0.75, 0.02]['gamma'] == 9
  assert best[0.62, 0.05]['gamma'] == 4
  assert best[0.90, 0.10]['speedup'] == 3.43
  assert all(each['speedup'] <= each['oracle_speedup'] for each in records)
  assert all(each['gamma_rising_v'] <= each['gamma'] for each in records)
  assert has_picture(tmp_path, 'figure3')


def test_a_free_pair_of_known_alpha_is_exact_at_its_ends():
  for alpha, tokens in ((0.0, 1.0), (1.0, 3.0)):
    assert coins().measure_coins(alpha, 2, 2, 12) == (tokens, 0.0)


def test_results_are_whole_or_not_there(tmp_path):
  with pytest.raises(TypeError):
    common().write_records(tmp_path, [{'good': 1}, {'bad': object()}])
  assert not (tmp_path / 'results.jsonl').exists()


def test_another_pair_must_name_its_texts(tmp_path):
  name = tmp_path / 'other.py'
  name.write_text(
    'from specjax.config import PairConfig, RunConfig\n'
    f'CONFIG = RunConfig(pair=PairConfig(model={str(assets())!r}))\n'
  )
  with pytest.raises(ValueError, match=r'config: .*other\.py names no texts; give'):
    common().load_subject(str(name), 1)


def assets():
  from specjax import load

  return load.ASSETS


@pytest.mark.slow
@pytest.mark.parametrize('name', ['figure2', 'figure4'])
def test_pictures_of_theory(name, tmp_path):
  records = run(name, tmp_path, '--quick')
  measured = 'tokens' if name == 'figure2' else 'speedup'
  for each in records:
    distance = abs(each[f'{measured}_measured'] - each[f'{measured}_formula'])
    assert distance < 4.5 * each['standard_error'] + 0.001
  assert has_picture(tmp_path, name)
