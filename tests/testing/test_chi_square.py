"""The goodness-of-fit test: its level, its power, and what it refuses."""

import numpy as np
import pytest
from scipy import stats

from specjax.testing.chi_square import assert_law, chi_square, count_outputs, g_test

LAW = np.array([0.4, 0.3, 0.2, 0.1])


def test_agrees_with_scipy():
  counts = np.array([48, 30, 15, 7])
  result = chi_square(counts, LAW)
  expected = stats.chisquare(counts, LAW * 100)
  assert result.statistic == pytest.approx(expected.statistic)
  assert result.p_value == pytest.approx(expected.pvalue)
  assert result.df == 3
  assert result.num_samples == 100
  assert result.tv == pytest.approx(0.08)


def test_p_values_are_uniform_under_the_law():
  rng = np.random.default_rng(0)
  p_values = [chi_square(rng.multinomial(5000, LAW), LAW).p_value for _ in range(2000)]
  assert stats.kstest(p_values, 'uniform').pvalue > 1e-6


def test_g_test_agrees_with_scipy_and_has_its_level():
  counts = np.array([48, 30, 15, 7])
  result, expected = (
    g_test(counts, LAW),
    stats.power_divergence(counts, LAW * 100, 0, 0, 0),
  )
  assert result.statistic == pytest.approx(expected.statistic)
  assert result.p_value == pytest.approx(expected.pvalue)
  rng = np.random.default_rng(0)
  p_values = [g_test(rng.multinomial(5000, LAW), LAW).p_value for _ in range(2000)]
  assert stats.kstest(p_values, 'uniform').pvalue > 1e-6
  assert g_test([50_000, 0, 0, 50_000], [0.5, 0, 0, 0.5]).p_value == 1.0
  assert g_test([50_000, 1, 0, 50_000], [0.5, 0, 0, 0.5]).p_value == 0.0
  with pytest.raises(ValueError, match='no samples'):
    g_test([0, 0], [0.5, 0.5])


def test_detects_another_law():
  counts = np.random.default_rng(0).multinomial(100_000, [0.41, 0.29, 0.2, 0.1])
  assert chi_square(counts, LAW).p_value < 1e-6
  with pytest.raises(AssertionError, match=r'p .* < 1e-06.*cell 0'):
    assert_law(counts, LAW)


def test_pools_small_cells():
  law = np.array([0.5, 0.46, 0.01, 0.01, 0.01, 0.01])
  result = chi_square([50, 46, 1, 1, 1, 1], law)
  # The four cells of one expected observation reach 5 with the help of a fifth.
  assert result.df == 1
  assert result.statistic == pytest.approx(0.0)
  assert chi_square([500, 460, 10, 10, 10, 10], law).df == 5


def test_an_impossible_observation_has_p_value_zero():
  law = np.array([0.5, 0.5, 0.0])
  assert chi_square([50, 50, 0], law).p_value == 1.0
  assert chi_square([50_000, 50_000, 1], law).p_value == 0.0


@pytest.mark.parametrize(
  ('counts', 'law', 'message'),
  [
    ([0, 0], [0.5, 0.5], 'no samples'),
    ([5, 5], [0.5, 0.6], 'sum to 1'),
    ([5, 5], [1.5, -0.5], 'must be >= 0'),
    ([5, 5], [0.5, np.nan], 'must be >= 0'),
    ([5, 5, 5], [0.5, 0.5], 'one vector each'),
    ([0.5, 0.5], [0.5, 0.5], 'not frequencies'),
    ([-1, 5], [0.5, 0.5], 'integers >= 0'),
    ([100, 0], [1.0, 0.0], '1 cell is left'),
    ([2, 2], [0.5, 0.5], '1 cell is left'),
  ],
)
def test_refuses(counts, law, message):
  with pytest.raises(ValueError, match=message):
    chi_square(counts, law)


def test_count_outputs():
  law = {(1,): 0.5, (0, 1): 0.25, (0, 0): 0.25}
  tokens_BS = np.array(
    [
      [0, 1, 0, 0],  # (1,)
      [0, 0, 1, 0],  # (0, 1)
      [0, 0, 1, 9],  # (0, 1): what lies behind the end does not count
      [0, 0, 0, 0],  # (0, 0)
      [0, 0, 0, 0],  # (0,): too short, not a cell
      [0, 0, 1, 1],  # (0, 1, 1): too long
    ]
  )
  counts_K, law_K = count_outputs(tokens_BS, np.array([2, 3, 3, 3, 2, 4]), law)
  assert counts_K.tolist() == [1, 2, 1, 2]
  assert law_K.tolist() == [0.5, 0.25, 0.25, 0.0]
