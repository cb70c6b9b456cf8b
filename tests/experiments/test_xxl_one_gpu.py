"""The one-GPU experiment at a tiny size: fields and arithmetic, never times."""

import json

import pytest

from experiments.xxl_one_gpu import __main__ as command
from experiments.xxl_one_gpu import files, measure, pair, worker
from specjax.eval import theory

TINY = ['--target', 'tiny', '--draft', 'tiny', '--gamma', '2']
SIZE = pair.sizes('tiny', 'tiny', gamma=2)


pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def path(tmp_path_factory):
  return tmp_path_factory.mktemp('results') / 'part.json'


@pytest.fixture(scope='module')
def record(path):
  sections = measure.sections('main', SIZE)
  return worker.run(sections, pair.Bench(SIZE), path, stop_at=1, clock=lambda: 0)


def test_every_section_of_the_main_worker_runs(record, path):
  sections = record['sections']
  assert list(sections) == [
    'bandwidth', 'build', 'plain', 'draft', 'verify_2', 'loop', 'encoder', 'best_gamma'
  ]  # fmt: skip
  assert {name: part.get('reason') for name, part in sections.items()} == dict.fromkeys(
    sections
  )
  assert json.loads(path.read_text()) == json.loads(json.dumps(record))
  assert record['machine']['platform'] == 'cpu'


def test_arithmetic(record):
  part = record['sections']
  plain, draft, verify = part['plain'], part['draft'], part['verify_2']
  rate = part['bandwidth']['bytes_per_second']
  assert rate == max(part['bandwidth']['by_size'].values())
  # A decoder layer: 6 attention kernels and 3 of the feed-forward block, 3 norms; a
  # norm, a head, 32 buckets for 2 heads. Caches: 16 slots (12 tokens, gamma and 2), 8
  # sources, keys and values; the sources' float32 bias.
  weights = 6 * 16 * 16 + 3 * 16 * 32 + 4 * 16 + 16 * 32 + 2 * 32
  caches = 2 * (16 + 8) * 16
  assert plain['bytes'] == 2 * (weights + caches) + 4 * 8
  assert plain['floor_ms'] == pytest.approx(1e3 * plain['bytes'] / rate)
  assert plain['over_floor'] == pytest.approx(plain['ms'] / plain['floor_ms'])
  assert draft['c'] == pytest.approx(draft['ms'] / plain['ms'])
  assert verify['v'] == pytest.approx(verify['ms'] / plain['ms'])
  assert part['loop']['gamma'] == verify['gamma'] == 2
  assert part['loop']['timing_only']
  for alpha, found in part['loop']['alpha'].items():
    c, v = draft['c'], verify['v']
    assert found['predicted'] == pytest.approx(theory.speedup(float(alpha), 2, c, v))
    per_call = found['tokens_per_call']
    expected = per_call / (v + 2 * c)
    assert found['predicted_from_tokens'] == pytest.approx(expected)
    assert found['ms'] * per_call == pytest.approx(found['round_ms'])
    assert found['speedup'] == pytest.approx(plain['ms'] / found['ms'])
  tokens = [each['tokens_per_call'] for each in part['loop']['alpha'].values()]
  assert tokens == sorted(tokens)
  assert 1 < tokens[0] < tokens[-1] <= 3


def test_the_page_shows_it(record):
  results = {
    'arguments': {'target': 'tiny', 'draft': 'tiny', 'temperature': 0.0},
    'machine': {'kind': 'card', 'driver': '1.2', 'jax': '3', 'jaxlib': '3'},
    'size': {'source': 8, 'tokens': 12, 'gammas': (2,)},
    'workers': {
      'main': record,
      'int8': {'sections': {'int8': {'status': 'failed', 'reason': 'no qwix'}}},
    },
  }
  page = files.markdown(results)
  v, c = (
    record['sections'][name][x] for name, x in (('verify_2', 'v'), ('draft', 'c'))
  )
  assert f'| v(2) | {v:.3f} (' in page
  assert f'| c | {c:.3f} |' in page
  assert 'one card' in page
  assert 'Driver 1.2' in page
  assert page.endswith('Not run:\n\n- int8: int8: failed, no qwix\n')


def test_what_does_not_fit_and_what_fails_is_named(path):

  def good(bench, found):
    return {'found': sorted(found)}

  def bad(bench, found):
    raise MemoryError('too\nlarge')

  sections = {'one': good, 'two': bad, 'three': good, 'four': good}
  clock = iter([0, 0, 1, 2, 2, 3, 3, 3, 4, 9]).__next__
  found = worker.run(sections, None, path, stop_at=4, clock=clock)['sections']
  assert found['one']['status'] == 'done'
  assert found['two']['reason'] == 'MemoryError: too'
  assert found['three']['found'] == ['one']
  assert found['four'] == {'status': 'not run', 'reason': 'the time was over before'}


def test_a_process_that_is_out_of_time_loses_nothing(tmp_path):
  output = ['--output', str(tmp_path / 'new'), '--minutes', '0.01']
  assert command.main([*TINY, *output, '--workers', 'exactness']) == 0
  results = json.loads((tmp_path / 'new' / 'results.json').read_text())
  assert [name for name, _ in files.not_run(results)] == [
    'exactness: tables',
    'exactness: identity',
  ]
  assert 'exactness: tables' in (tmp_path / 'new' / 'results.md').read_text()


def test_a_flag_that_xla_does_not_know_is_reported(tmp_path, monkeypatch):
  monkeypatch.setitem(command.WORKERS, 'int8', '--xla_gpu_none_such=1')
  output = ['--output', str(tmp_path), '--minutes', '2']
  assert command.main([*TINY, *output, '--workers', 'int8']) == 0
  results = json.loads((tmp_path / 'results.json').read_text())
  ((name, reason),) = files.not_run(results)
  assert name == 'int8: int8'
  assert 'failed, ' in reason
  assert '--xla_gpu_none_such=1' in reason


def test_bad_arguments(tmp_path, capsys):
  assert command.main(['--target', 'byt5_xl', '--output', str(tmp_path)]) == 2
  assert 't5_1_1_small has 32128 ids, byt5_xl has 384' in capsys.readouterr().err
  with pytest.raises(SystemExit):
    command.main([*TINY[:4], '--gamma', '0', '--output', str(tmp_path)])


def test_the_whole_command(tmp_path):
  output = ['--output', str(tmp_path), '--minutes', '10']
  workers = ['main', 'exactness', 'buffers_while', 'buffers_off']
  assert command.main([*TINY, *output, '--workers', *workers]) == 0
  results = json.loads((tmp_path / 'results.json').read_text())
  assert list(files.not_run(results)) == []
  exactness = results['workers']['exactness']['sections']
  assert exactness['tables']['passed']
  assert exactness['identity']['equal_rows'] == exactness['identity']['rows']
  assert 0 < exactness['identity']['accepted'] < exactness['identity']['drafted']
