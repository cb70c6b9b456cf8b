"""Each experiment on a pair of its own, by --config, with --quick."""

import importlib
import json

import pytest

from specjax.core.loop import Source
from specjax.eval import theory

pytestmark = pytest.mark.slow

PNG = b'\x89PNG\r\n\x1a\n'


@pytest.fixture
def run(config, tmp_path):
  """name, arguments -> records; the picture must be there."""

  def run_(name, *arguments, picture=None):
    module = importlib.import_module(f'experiments.{name}.__main__')
    module.main(['--quick', '--config', config, '--output', str(tmp_path), *arguments])
    if picture:
      assert (tmp_path / f'{picture}.png').read_bytes().startswith(PNG)
    lines = (tmp_path / 'results.jsonl').read_text().splitlines()
    return [json.loads(line) for line in lines]

  return run_


def test_table2_4_factors_lead_from_the_expected_to_the_predicted_speedup(
  run, tmp_path
):
  records = run('table2_4', picture='table2_4')
  assert [each['T'] for each in records] == [0.0, 1.0]
  for each in records:
    alpha, gamma = each['alpha'], each['gamma']
    assert gamma == 2
    assert 0 <= alpha <= 1
    assert 1 <= each['tokens'] <= 3
    expected = theory.expected_tokens(alpha, gamma)
    assert each['x_tokens'] == pytest.approx(each['tokens'] / expected, abs=0.02)
    assert each['EXP'] == pytest.approx(
      expected / (each['v'] + gamma * each['c']), rel=0.05, abs=0.02
    )
  steps = (tmp_path / 'steps.jsonl').read_text().splitlines()
  assert [json.loads(step)['T'] for step in steps] == [0.0, 1.0]


def test_table3_measures_tables_and_the_draft(run):
  records = run('table3')
  drafts = ['unigram', 'bigram', 'draft']
  assert [each['draft'] for each in records] == 2 * drafts
  assert all(0 <= each['alpha'] <= 1 for each in records)


def test_table5_is_exact_at_one_and_says_where_it_is_lossy(run):
  exact, lossy = run('table5', picture='table5_lossy')
  assert (exact['lossy_lenience'], exact['law']) == (1.0, 'exact')
  assert (lossy['lossy_lenience'], lossy['law']) == (0.5, 'LOSSY')
  assert exact['tv_from_target'] == 0 < lossy['tv_from_target']
  assert exact['alpha'] < lossy['alpha']


def test_table5_is_lossy_only_when_asked(run, tmp_path):
  (record,) = run('table5', '--lossy_lenience', '1')
  assert record['law'] == 'exact'
  assert not (tmp_path / 'table5_lossy.png').exists()
  with pytest.raises(ValueError, match=r'lossy_lenience: 1.5; give numbers in'):
    run('table5', '--lossy_lenience', '1.5')


def test_figure1_shows_what_the_loop_did(run):
  (record,) = run('figure1', picture='figure1')
  assert len(record['pieces']) == len(record['sources']) == record['tokens']
  assert record['rounds'] == sorted(record['rounds'])
  assert record['rounds'][-1] == record['target_calls']
  supplied = [source for source in record['sources'] if source != Source.ACCEPTED]
  # Each call supplies a token, but the last one if it ends with an accepted EOS.
  assert record['target_calls'] - len(supplied) in (0, 1)


def test_figure5_has_a_span_for_each_step(run):
  *speculative, plain = run('figure5', picture='figure5')
  assert plain['gamma'] == 0
  assert plain['target_calls'] == plain['tokens']
  for each in speculative:
    assert each['tokens'] == plain['tokens']
    kinds = [kind for kind, _ in each['spans']]
    assert kinds.count('target step') == each['target_calls']
    assert kinds.count('draft step') == each['gamma'] * each['target_calls']


@pytest.mark.slow
def test_compare_rules_agree_where_nothing_is_random(run):
  records = run('compare_rules', picture='compare_rules')
  (greedy,) = [each for each in records if each['T'] == 0]
  assert greedy['token'] == greedy['block'] >= 1
  assert greedy['gain'] == 0
  assert len(records) == 3


def test_drafters_are_those_that_the_pair_has(run):
  records = run('drafters', picture='drafters')
  assert [each['method'] for each in records] == ['draft_model', 'ngram', 'table']
  for each in records:
    assert each['tokens_per_call'] <= 1 + each['drafted_per_call'] <= 3
  assert records[1]['c'] == 0


def test_workloads_of_one_task_are_not_mixed(run):
  records = run('workloads', picture='workloads')
  assert [each['method'] for each in records] == ['draft_model', 'ngram']
  for each in records:
    assert each['workload'] == 'texts'
    assert each['mixing'] is None
    assert each['live'] == 1  # nobody waits alone
    assert each['tokens_per_round'] == each['tokens_per_call']


def test_auto_stands_beside_every_fixed_gamma(run):
  records = run('auto', picture='auto')
  assert [each['method'] for each in records] == ['draft_model', 'ngram']
  for each in records:
    assert list(each['fixed']) == ['0', '1', '2']
    assert each['fixed']['0'] == 1
    best = max(each['fixed'].values())
    assert each['fixed'][str(each['best_gamma'])] == best
    # One turn: its ratios are those of the same times.
    assert each['time_over_best'] == pytest.approx(best / each['auto'], rel=0.01)
    assert each['last_choice'] in (0, 1, 2)
  with pytest.raises(ValueError, match='workloads: text; give some of texts'):
    run('auto', '--workloads', 'text')


def test_concurrency_measures_each_batch(run):
  records = run('concurrency', picture='concurrency')
  assert [each['method'] for each in records] == ['draft_model', 'ngram']
  for each in records:
    gamma, tokens = each['gamma'], each['tokens_per_call']
    expected = theory.speedup_of(tokens, gamma, each['c'], each['v'])
    assert each['S'] == pytest.approx(expected, rel=0.02, abs=0.02)
  with pytest.raises(ValueError, match=r'batches: 0; give 1 or more'):
    run('concurrency', '--batches', '0')
  with pytest.raises(ValueError, match=r'task: other; the pair has texts'):
    run('concurrency', '--task', 'other')
