"""The paper's formulas, against its own tables and against direct evaluation."""

import doctest

import numpy as np
import pytest

from specjax.eval import theory

# Table 1 of the paper: (alpha, gamma, operations, speed), c = c_hat = 0.
TABLE_1 = [
  (0.6, 2, 1.53, 1.96),
  (0.7, 3, 1.58, 2.53),
  (0.8, 2, 1.23, 2.44),
  (0.8, 5, 1.63, 3.69),
  (0.9, 2, 1.11, 2.71),
  (0.9, 10, 1.60, 6.86),
]

# Table 4 of the paper: (alpha, gamma, c, EXP).
TABLE_4 = [
  (0.75, 7, 0.02, 3.2),
  (0.80, 7, 0.04, 3.3),
  (0.82, 7, 0.11, 2.5),
  (0.62, 7, 0.02, 2.3),
  (0.68, 5, 0.04, 2.4),
  (0.71, 3, 0.11, 2.0),
  (0.65, 5, 0.02, 2.4),
  (0.73, 5, 0.04, 2.6),
  (0.74, 3, 0.11, 2.0),
  (0.53, 5, 0.02, 1.9),
  (0.55, 3, 0.04, 1.8),
  (0.56, 3, 0.11, 1.6),
]


def test_doctests():
  result = doctest.testmod(theory)
  assert result.attempted >= 10
  assert result.failed == 0


@pytest.mark.parametrize(('alpha', 'gamma', 'operations', 'speed'), TABLE_1)
def test_table_1_to_the_digit(alpha, gamma, operations, speed):
  assert f'{theory.operations(alpha, gamma):.2f}' == f'{operations:.2f}'
  assert f'{theory.speedup(alpha, gamma, 0.0):.2f}' == f'{speed:.2f}'


@pytest.mark.parametrize(('alpha', 'gamma', 'c', 'expected'), TABLE_4)
def test_table_4_predictions(alpha, gamma, c, expected):
  # The paper prints alpha and c rounded to two digits and EXP to one: its value
  # must lie between the predictions at the ends of the rounding intervals.
  low = theory.speedup(alpha - 0.005, gamma, c + 0.005)
  high = theory.speedup(alpha + 0.005, gamma, c - 0.005)
  assert low - 0.05 <= expected <= high + 0.05
  assert high - low < 0.3


@pytest.mark.parametrize('alpha', [0.0, 0.3, 0.999999, 1.0])
@pytest.mark.parametrize('gamma', [0, 1, 4])
def test_token_law_is_a_law_with_the_mean_of_eq_1(alpha, gamma):
  law = theory.token_law(alpha, gamma)
  assert law.shape == (gamma + 1,)
  assert law.min() >= 0
  assert law.sum() == pytest.approx(1.0, abs=1e-12)
  mean = (law * np.arange(1, gamma + 2)).sum()
  assert mean == pytest.approx(theory.expected_tokens(alpha, gamma), abs=1e-12)


def test_token_law_is_what_sequential_coins_give():
  coins = np.random.default_rng(0).random((200_000, 3)) < 0.7
  tokens = np.cumprod(coins, axis=1).sum(axis=1) + 1
  law = theory.token_law(0.7, 3)
  counts = np.bincount(tokens, minlength=5)[1:]
  sigma = np.sqrt(len(tokens) * law * (1 - law))
  assert np.all(np.abs(counts - len(tokens) * law) < 4 * sigma)


def test_arrays_of_alpha():
  alpha = np.array([0.0, 0.5, 1.0])
  np.testing.assert_allclose(theory.expected_tokens(alpha, 2), [1.0, 1.75, 3.0])
  np.testing.assert_allclose(theory.speedup(alpha, 2, 0.5), [0.5, 0.875, 1.5])
  np.testing.assert_allclose(theory.expected_tokens(alpha, 0), [1.0, 1.0, 1.0])


def test_v_as_number_sequence_and_function():
  by_number = theory.speedup(0.8, 2, 0.1, v=1.6)
  assert theory.speedup(0.8, 2, 0.1, v=[1.0, 1.5, 1.6]) == by_number
  assert theory.speedup(0.8, 2, 0.1, v=lambda gamma: 1.4 + 0.1 * gamma) == by_number
  assert by_number == pytest.approx(2.44 / 1.8)


def test_gamma_0_is_plain_decoding_at_any_v():
  assert theory.speedup(0.3, 0, 0.9, v=3.0) == 1.0
  assert theory.operations(0.3, 0, 0.9) == 1.0


def test_optimal_gamma_is_the_best_of_all():
  for alpha in (0.1, 0.53, 0.8, 0.95):
    for c in (0.0, 0.05, 0.4):
      for v in (1.0, 2.1):
        best = theory.optimal_gamma(alpha, c, v, max_gamma=20)
        every = [theory.speedup(alpha, gamma, c, v) for gamma in range(21)]
        assert every[best] == pytest.approx(max(every))


def test_optimal_gamma_of_planning_table():
  # Section 3.5: argmax of Theorem 3.8, evaluated apart.
  assert [theory.optimal_gamma(0.62, c) for c in (0.01, 0.05, 0.11)] == [7, 4, 3]
  assert [theory.optimal_gamma(0.90, c) for c in (0.01, 0.05, 0.11)] == [24, 13, 9]


def test_optimal_gamma_stops_at_the_end_of_a_sequence():
  assert theory.optimal_gamma(0.9, 0.0, v=[1.0, 1.0, 1.0]) == 2


def test_a_copy_of_the_target_as_draft_never_pays():
  assert theory.optimal_gamma(1.0, 1.0) == 0
  assert theory.speedup(1.0, 4, 1.0) == pytest.approx(1.0)
  assert theory.speedup(1.0, 4, 1.0, v=1.2) < 1.0


@pytest.mark.parametrize('c', [0.0, 0.2, 0.7])
@pytest.mark.parametrize('alpha', [0.0, 0.2, 0.5, 0.9, 1.0])
def test_corollary_3_9_and_its_converse(alpha, c):
  best = max(theory.speedup(alpha, gamma, c) for gamma in range(65))
  if alpha > c:
    assert best >= theory.speedup_bound(alpha, c) > 1
    assert theory.optimal_gamma(alpha, c) > 0
  else:
    assert best == pytest.approx(1.0)
    assert theory.speedup_bound(alpha, c) == 1
    assert theory.optimal_gamma(alpha, c) == 0


def test_acceptance_is_one_minus_total_variation():
  rng = np.random.default_rng(1)
  p, q = rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(5))
  middle = (p + q) / 2
  divergence = np.abs(p - middle).sum()  # D_LK of Definition 3.2
  assert theory.acceptance(p, q) == pytest.approx(1 - divergence)
  assert theory.acceptance([1, 0], [0, 1]) == 0
  assert theory.acceptance(p, p) == pytest.approx(1)


@pytest.mark.parametrize(
  ('call', 'name'),
  [
    (lambda: theory.expected_tokens(1.1, 2), 'alpha: 1.1'),
    (lambda: theory.expected_tokens(-0.1, 2), 'alpha: -0.1'),
    (lambda: theory.expected_tokens(float('nan'), 2), 'alpha: nan'),
    (lambda: theory.expected_tokens(np.array([0.5, 2.0]), 2), 'alpha: '),
    (lambda: theory.expected_tokens(0.5, -1), 'gamma: -1'),
    (lambda: theory.token_law(0.5, 1.5), 'gamma: 1.5'),
    (lambda: theory.speedup(0.5, 2, -0.1), 'c: -0.1'),
    (lambda: theory.speedup(0.5, 2, float('inf')), 'c: inf'),
    (lambda: theory.speedup(0.5, 2, 0.1, v=0.0), 'v: 0 for gamma 2'),
    (lambda: theory.speedup(0.5, 2, 0.1, v=float('nan')), 'v: nan for gamma 2'),
    (lambda: theory.speedup(0.5, 2, 0.1, v=[1.0, 1.1]), 'v: 2 values'),
    (lambda: theory.operations(0.5, 2, -1.0), 'c_hat: -1'),
    (lambda: theory.optimal_gamma(0.5, 0.1, max_gamma=-1), 'max_gamma: -1'),
  ],
)
def test_out_of_range_is_named(call, name):
  with pytest.raises(ValueError, match=r'needed|give') as error:
    call()
  assert str(error.value).startswith(name)
