"""E-value and certificate: mean and level under the law, power against another."""

import itertools

import numpy as np
import pytest
from scipy import stats

from specjax.core import verify
from specjax.testing import enumerate_law, mutants, tables
from specjax.testing.chi_square import chi_square
from specjax.testing.evidence import certified_tv, log_e_value, samples_for_tv

LAW = np.array([0.4, 0.3, 0.2, 0.1])


def test_mean_of_the_e_value_is_one():
  """By enumeration of all counts of six samples: no simulation."""
  mean = 0.0
  for counts in itertools.product(range(7), repeat=3):
    if sum(counts) == 6:
      law = LAW[:3] / LAW[:3].sum()
      mass = stats.multinomial.pmf(counts, 6, law)
      mean += mass * np.exp(log_e_value(counts, law, (0.5, 3.0, 100.0)))
  assert mean == pytest.approx(1.0, abs=1e-12)


def test_e_value_is_a_martingale():
  """E[E_{n+1} | counts] = E_n, for every state of the counts."""
  for counts in ([3, 0, 1, 2], [0, 0, 0, 9], [40, 30, 20, 10]):
    after = [np.exp(log_e_value(np.add(counts, row), LAW)) for row in np.eye(4)]
    assert LAW @ after == pytest.approx(np.exp(log_e_value(counts, LAW)), rel=1e-9)


def test_watching_does_not_raise_the_level():
  rng = np.random.default_rng(0)
  level, alarms, num_runs = 0.05, 0, 400
  for _ in range(num_runs):
    counts, peak = np.zeros(4), -np.inf
    for _ in range(40):
      counts = counts + rng.multinomial(50, LAW)
      peak = max(peak, log_e_value(counts, LAW, (10.0, 100.0, 1000.0)))
    alarms += peak >= np.log(1 / level)
  # Ville: at most 20 expected; a p-value watched 40 times would alarm in a third.
  assert stats.binom.sf(alarms - 1, num_runs, level) > 1e-3


def mutant_law(num_tokens=4):
  p, q = map(tables.conditional, tables.random_pair(5, 4, agreement=0.65))
  fields = {'vocab_size': 4, 'num_draft': 2, 'num_tokens': num_tokens, 'order': 1}
  faulty = enumerate_law.loop_law(mutants.FAULTY_RULES['lenience 0.9'], p, q, **fields)
  exact = enumerate_law.target_law(p, 4, num_tokens)
  assert (
    enumerate_law.max_difference(
      enumerate_law.loop_law(verify.token_rule, p, q, **fields), exact
    )
    < 1e-5
  )
  law = np.array(list(exact.values()))
  wrong = np.array([faulty[y] for y in exact])
  return law / law.sum(), wrong / wrong.sum()


def test_power_against_lenience():
  law, wrong = mutant_law()
  rng = np.random.default_rng(0)
  counts, right_counts = np.zeros(law.size), np.zeros(law.size)
  stopped = None
  for night in range(1, 51):
    counts = counts + rng.multinomial(10_000, wrong)
    right_counts = right_counts + rng.multinomial(10_000, law)
    assert log_e_value(right_counts, law) < np.log(1e6)
    if log_e_value(counts, law) >= np.log(1e6):
      stopped = night
      break
  assert stopped is not None
  assert chi_square(counts, law).p_value < 1e-6


def test_an_impossible_observation_is_final():
  assert log_e_value([5, 5, 1], [0.5, 0.5, 0.0]) == np.inf
  assert np.isfinite(log_e_value([5, 5, 0], [0.5, 0.5, 0.0]))


@pytest.mark.parametrize('num_samples', [200, 20_000])
def test_certificate_holds(num_samples):
  """Of 2000 certificates of error 1% about a wrong law, at most a few are wrong."""
  rng = np.random.default_rng(0)
  other = np.array([0.36, 0.32, 0.22, 0.1])
  tv = 0.5 * np.abs(other - LAW).sum()
  bounds = [
    certified_tv(rng.multinomial(num_samples, other), LAW, error=0.01)
    for _ in range(2000)
  ]
  assert stats.binom.sf(sum(b < tv for b in bounds) - 1, 2000, 0.01) > 1e-3
  # And it says something: within 0.2 or 0.02 of the truth.
  assert np.mean(bounds) < tv + 2.5 / np.sqrt(num_samples)


def test_size_of_sample_for_a_certificate():
  law = np.full(256, 1 / 256)
  num_samples = samples_for_tv(0.01, 256)
  counts = np.random.default_rng(0).multinomial(num_samples, law)
  assert certified_tv(counts, law) < 0.01
  assert certified_tv(np.random.default_rng(0).multinomial(4_500_000, law), law) < 0.005


@pytest.mark.parametrize('evidence', [log_e_value, certified_tv])
@pytest.mark.parametrize(
  ('counts', 'law', 'message'),
  [
    ([0, 0], [0.5, 0.5], 'no samples'),
    ([5, 5], [0.5, 0.6], 'sum to 1'),
    ([5, 5], [0.5, np.nan], 'must be >= 0'),
    ([5, np.nan], [0.5, 0.5], 'integers >= 0'),
    ([5, 5, 5], [0.5, 0.5], 'one vector each'),
    ([0.5, 0.5], [0.5, 0.5], 'not frequencies'),
  ],
)
def test_refuses(evidence, counts, law, message):
  with pytest.raises(ValueError, match=message):
    evidence(counts, law)


def test_refuses_senseless_options():
  with pytest.raises(ValueError, match='concentrations'):
    log_e_value([5, 5], [0.5, 0.5], ())
  with pytest.raises(ValueError, match='error: 0'):
    certified_tv([5, 5], [0.5, 0.5], error=0)
  with pytest.raises(ValueError, match='bound: 2'):
    samples_for_tv(2, 256)
