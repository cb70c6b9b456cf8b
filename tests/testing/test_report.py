"""The report: its verdict, its page, its files, and that it can say no."""

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from specjax.testing import mutants, report, suite, toy

LAW = np.array([0.5, 0.25, 0.125, 0.125])


def sample(counts, name='token, gamma 2', rate=0.5):
  return suite.judge(name, np.asarray(counts), LAW, rate)


def made(**fields):
  """A report without running anything."""
  fields = {
    'enumerations': [suite.Enumeration('token', 2, 6, True, 1e-16, 729)],
    'main': [sample([502, 248, 124, 126])],
    'sweep': [sample([498, 252, 126, 124], 'block, gamma 4, T 0.7, none')],
    'control': suite.MutantResult('control', 'no fault', '', -0.3),
    'mutants': [
      suite.MutantResult('accept always', 'power table 9', 'law', -400.0),
      suite.MutantResult('an impossible output', 'made up', 'law', -math.inf),
      suite.MutantResult('lenience 0.99', 'row 12', 'enumeration', -0.4, 'too small'),
    ],
    'seconds': 61.0,
    **fields,
  }
  return suite.Report(**fields)


SURVIVOR = suite.MutantResult('no stop', 'power table 15', '', -1.0)
FAILURES = {
  'wrong rational law': {
    'enumerations': [suite.Enumeration('token', 2, 6, False, 0.0, 729)]
  },
  'float law too far': {
    'enumerations': [suite.Enumeration('token', 2, 6, True, 2e-12, 729)]
  },
  'wrong sample': {'main': [sample([600, 150, 124, 126])]},
  'wrong rate': {'main': [sample([502, 248, 124, 126], rate=1e-9)]},
  'wrong configuration': {'sweep': [sample([600, 150, 124, 126])]},
  'rejected control': {
    'control': suite.MutantResult('control', 'no fault', 'law', -9.0)
  },
  'survivor': {'mutants': [SURVIVOR]},
}


def text_of(found):
  console = Console(width=100, record=True, file=io.StringIO())
  console.print(report.page(found))
  return console.export_text()


def test_a_right_report_passes():
  assert made().passed
  text = text_of(made())
  assert 'PASSED: 1 enumerations, 2 samples, mutants killed 3/3, 61 s' in text
  assert 'too small' in text
  assert 'impossible' in text


@pytest.mark.parametrize('name', FAILURES)
def test_any_failure_fails_the_report(name):
  found = made(**FAILURES[name])
  assert not found.passed
  assert 'FAILED' in text_of(found)
  assert report.summary(found)['passed'] is False


def test_survivors_are_named():
  found = made(mutants=[*made().mutants, SURVIVOR])
  assert 'survivor: no stop (power table 15)' in text_of(found)
  summary = report.summary(found)['mutants']
  assert (summary['killed'], summary['all']) == (3, 4)
  assert summary['survivors'] == ['no stop']


def test_file_is_strict_json():
  written = json.dumps(report.summary(made()), default=float, allow_nan=False)
  found = json.loads(written)
  assert found['samples'][0]['num_samples'] == 1000
  assert found['samples'][0]['tv_bound'] > found['samples'][0]['tv']
  assert found['mutants']['results'][1]['log10_p'] == report.FLOOR


@pytest.mark.parametrize(('statistic', 'df'), [(1200.0, 3), (1350.0, 255)])
def test_p_values_below_the_smallest_float(statistic, df):
  """The asymptotic formula continues what SciPy gives until it underflows."""

  def log10_p(x):
    return suite.log10_p(
      suite.chi_square([50, 50], [0.5, 0.5])._replace(statistic=x, df=df)
    )

  below, above = log10_p(statistic), log10_p(statistic + 600)
  assert math.isfinite(above)
  # The density falls by exp(-1/2) per unit, times a power of the statistic.
  power = (df / 2 - 1) * math.log10(1 + 600 / statistic)
  assert above == pytest.approx(below - 300 / math.log(10) + power, abs=0.2)


def test_picture(tmp_path):
  pytest.importorskip('matplotlib', reason='the picture needs matplotlib')
  assert report.picture(made(), tmp_path / 'exactness.png')
  assert (tmp_path / 'exactness.png').stat().st_size > 10_000


@pytest.mark.slow
def test_run_end_to_end(tmp_path, monkeypatch, capsys):
  """All parts once, with two mutants of each kind of compilation."""
  chosen = ('accept always', 'same keys every round')
  kept = tuple(mutant for mutant in mutants.MUTANTS if mutant.name in chosen)
  monkeypatch.setattr(mutants, 'MUTANTS', kept)
  monkeypatch.setattr(mutants, 'SLIGHT_MUTANTS', mutants.SLIGHT_MUTANTS[:1])
  monkeypatch.setattr(suite, 'enumerations', lambda: iter(made().enumerations))
  monkeypatch.setattr(suite, 'GAMMAS', ((1, 4),))
  code = report.main(['--samples', '20000', '--output', str(tmp_path)])
  found = json.loads((tmp_path / 'exactness.json').read_text())
  assert code == 0, capsys.readouterr().out
  assert found['passed']
  assert len(found['samples']) == 2 + 12
  assert found['mutants']['killed'] == found['mutants']['all'] == 4


@pytest.mark.parametrize('samples', ['0', '-5', '999'])
def test_refuses_too_few_samples(samples, capsys):
  with pytest.raises(SystemExit, match='2'):
    report.main(['--samples', samples])
  assert 'at least 1000' in capsys.readouterr().err


@pytest.mark.parametrize('count', [0, -1])
def test_the_suite_refuses_to_test_nothing(count):
  with pytest.raises(ValueError, match='nothing is tested'):
    toy.keys(count, 0)
  with pytest.raises(ValueError, match='nothing is tested'):
    suite.main_sample('token', count, 0)
