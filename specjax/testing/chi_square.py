"""One-sample goodness-of-fit tests of counts against an exact law.

The null hypothesis is simple (the law is enumerated, not estimated), so the
sample must consist of independent draws: one cell per sequence, never one per
token of a sequence.
"""

from typing import NamedTuple

import numpy as np
from scipy import stats


class Result(NamedTuple):
  """Outcome of a test.

  Attributes:
    statistic: Pearson's sum of (count - expected)^2 / expected, or G; inf if a
      cell of probability 0 was observed.
    df: number of cells after pooling, less one.
    p_value: probability of a statistic at least as large under the law.
    num_samples: n.
    tv: total variation distance of the observed frequencies from the law; of
      order sqrt(cells / n) even under the law.
  """

  statistic: float
  df: int
  p_value: float
  num_samples: int
  tv: float


def checked(counts_K, law_K) -> tuple[np.ndarray, np.ndarray]:
  """Counts and law as float64 vectors.

  Raises:
    ValueError: shapes differ, counts are not integers >= 0, there are no samples,
      or the law is negative or does not sum to 1.
  """
  counts_K = np.asarray(counts_K, np.float64)
  law_K = np.asarray(law_K, np.float64)
  if counts_K.ndim != 1 or counts_K.shape != law_K.shape:
    raise ValueError(
      f'counts have shape {counts_K.shape}, the law {law_K.shape}: one vector each'
    )
  if not (counts_K >= 0).all() or (counts_K != np.round(counts_K)).any():
    raise ValueError('counts: must be integers >= 0, not frequencies')
  if counts_K.sum() == 0:
    raise ValueError('counts: no samples, nothing was tested')
  if not (law_K >= 0).all() or abs(law_K.sum() - 1) > 1e-6:
    raise ValueError(f'law: must be >= 0 and sum to 1, sums to {law_K.sum()}')
  return counts_K, law_K


def _pearson(observed_K, expected_K) -> float:
  return float(((observed_K - expected_K) ** 2 / expected_K).sum())


def _likelihood_ratio(observed_K, expected_K) -> float:
  seen_K = observed_K > 0
  ratio_K = observed_K[seen_K] / expected_K[seen_K]
  return max(float(2 * (observed_K[seen_K] * np.log(ratio_K)).sum()), 0.0)


def g_test(counts_K, law_K, min_expected: float = 5.0) -> Result:
  """The likelihood-ratio test, G = 2 sum n_k log(n_k / (n p_k)).

  Asymptotically the same as Pearson's; a second opinion that weighs missing
  observations more. Pooling, arguments, result and errors are those of
  `chi_square`, with G as the statistic.
  """
  return _test(_likelihood_ratio, counts_K, law_K, min_expected)


def chi_square(counts_K, law_K, min_expected: float = 5.0) -> Result:
  """Pearson's test of `counts_K` against `law_K`.

  Cells with an expected count below `min_expected` are pooled, smallest first,
  until the pool reaches it. Cells of probability 0 are not pooled: a single
  observation there has p-value 0.

  Args:
    counts_K: integers >= 0, [K]; observations per cell.
    law_K: probabilities, [K]; sums to 1.
    min_expected: least expected count of a cell.

  Returns:
    A `Result`.

  Raises:
    ValueError: shapes differ, no samples, the law is negative or does not sum to
      1, or fewer than two cells are left to compare.

  Example:
    >>> chi_square([48, 52], [0.5, 0.5]).df
    1
  """
  return _test(_pearson, counts_K, law_K, min_expected)


def _test(statistic_of, counts_K, law_K, min_expected) -> Result:
  counts_K, law_K = checked(counts_K, law_K)
  num_samples = counts_K.sum()
  tv = float(0.5 * np.abs(counts_K / num_samples - law_K).sum())
  possible_K = law_K > 0
  order_K = np.argsort(law_K[possible_K], kind='stable')
  expected_K = (law_K[possible_K] * num_samples)[order_K]
  observed_K = counts_K[possible_K][order_K]
  # Cells are sorted, so the pool is a prefix: all small cells, and as many more
  # as it takes to reach the least expected count.
  num_small = int((expected_K < min_expected).sum())
  if num_small:
    num_pooled = max(
      num_small, int(np.searchsorted(np.cumsum(expected_K), min_expected)) + 1
    )
    expected_K = np.append(expected_K[num_pooled:], expected_K[:num_pooled].sum())
    observed_K = np.append(observed_K[num_pooled:], observed_K[:num_pooled].sum())
  df = expected_K.size - 1
  if df < 1:
    raise ValueError(
      f'law: {expected_K.size} cell is left of {law_K.size} after pooling for'
      f' {int(num_samples)} samples: draw more samples, or compare exactly'
    )
  if counts_K[~possible_K].any():
    return Result(np.inf, df, 0.0, int(num_samples), tv)
  statistic = statistic_of(observed_K, expected_K)
  return Result(
    statistic, df, float(stats.chi2.sf(statistic, df)), int(num_samples), tv
  )


def assert_law(counts_K, law_K, level: float = 1e-6) -> Result:
  """Raises unless the counts are compatible with the law at the given level.

  Args:
    counts_K: as for `chi_square`.
    law_K: as for `chi_square`.
    level: probability of a false alarm. With fixed seeds the outcome is
      reproducible; another seed after a failure would void the level.

  Returns:
    The `Result`.

  Raises:
    AssertionError: the p-value is below the level; the message shows the cells
      that deviate most.
    ValueError: as for `chi_square`.
  """
  result = chi_square(counts_K, law_K)
  if result.p_value >= level:
    return result
  counts_K, law_K = np.asarray(counts_K), np.asarray(law_K)
  expected_K = law_K * result.num_samples
  deviation_K = np.abs(counts_K - expected_K) / np.sqrt(np.maximum(expected_K, 1.0))
  worst = np.argsort(-deviation_K)[:6]
  cells = ', '.join(
    f'cell {k}: {int(counts_K[k])} for {expected_K[k]:.1f} expected' for k in worst
  )
  raise AssertionError(
    f'chi-square {result.statistic:.1f} with {result.df} degrees of freedom,'
    f' p {result.p_value:.2g} < {level:g}, TV {result.tv:.4f},'
    f' n {result.num_samples}; {cells}'
  )


def count_outputs(tokens_BS, length_B, law) -> tuple[np.ndarray, np.ndarray]:
  """Counts the loop's outputs, cell by cell of an enumerated law.

  Args:
    tokens_BS: int, a batch of buffers; slot 0 is the start token.
    length_B: int, emitted tokens with the start token.
    law: output (a tuple of ids) -> probability, as `enumerate_law` gives it.

  Returns:
    counts_K and law_K; the last cell is "any other output", of probability 0.
  """
  tokens_BS, length_B = np.asarray(tokens_BS), np.asarray(length_B)
  longest = max(len(output) for output in law)
  if (length_B > longest + 1).any():
    longest = int(length_B.max()) - 1
  place_L = np.arange(longest)
  padded_BL = np.where(
    place_L < length_B[:, None] - 1, tokens_BS[:, 1 : longest + 1], -1
  )
  base = max(int(padded_BL.max()), max(max(output) for output in law)) + 2
  if base**longest >= 2**62:
    raise ValueError(f'{longest} tokens of {base - 1} ids: too many cells to count')
  weight_L = base**place_L
  code_B = ((padded_BL + 1) * weight_L).sum(axis=1)
  codes_K = np.array(
    [sum((t + 1) * base**i for i, t in enumerate(output)) for output in law]
  )
  order_K = np.argsort(codes_K)
  at_B = np.minimum(np.searchsorted(codes_K, code_B, sorter=order_K), len(law) - 1)
  cell_B = np.where(codes_K[order_K[at_B]] == code_B, order_K[at_B], len(law))
  counts_K = np.bincount(cell_B, minlength=len(law) + 1)
  return counts_K, np.append(np.fromiter(law.values(), np.float64), 0.0)
