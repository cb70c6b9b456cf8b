"""Evidence that may be watched, and what a pass certifies.

A p-value is valid at one sample size, fixed beforehand. An e-value is valid at any
stopping time and accumulates over nights; a bound on the total variation says how
far the sampled law can be from the enumerated one although every test has passed.
"""

from collections.abc import Sequence

import numpy as np
from scipy import special

from specjax.testing.chi_square import checked

CONCENTRATIONS = (1e2, 1e3, 1e4, 1e5)


def log_e_value(
  counts_K, law_K, concentrations: Sequence[float] = CONCENTRATIONS
) -> float:
  """log of an e-value against the law: large if another law explains more.

  The likelihood of a Dirichlet mixture around the law over that of the law,

    E_n = mean_A  Gamma(A) / Gamma(A + n)
          prod_k Gamma(A p_k + n_k) / (Gamma(A p_k) p_k^n_k)

  Under the law E_n is a martingale with mean 1 in n, so by Ville's inequality
  P(sup_n E_n >= 1 / level) <= level: counts may be added and looked at as often as
  one likes, and the law rejected as soon as E_n reaches 1 / level.

  Args:
    counts_K: integers >= 0, [K]; all observations so far, in any order.
    law_K: probabilities, [K]; sums to 1.
    concentrations: A > 0, small for alternatives that are far off.

  Returns:
    log E_n; inf as soon as a cell of probability 0 is observed.

  Raises:
    ValueError: as for `chi_square`, or a concentration that is not positive.
  """
  counts_K, law_K = checked(counts_K, law_K)
  if not concentrations or not min(concentrations) > 0:
    raise ValueError(f'concentrations: {concentrations}; must be positive numbers')
  possible_K = law_K > 0
  if counts_K[~possible_K].any():
    return float('inf')
  count_K, p_K = counts_K[possible_K], law_K[possible_K] / law_K.sum()
  total = count_K.sum()
  log_terms = [
    special.gammaln(a)
    - special.gammaln(a + total)
    + (special.gammaln(a * p_K + count_K) - special.gammaln(a * p_K)).sum()
    for a in concentrations
  ]
  log_mixture = special.logsumexp(log_terms) - np.log(len(concentrations))
  return float(log_mixture - (count_K * np.log(p_K)).sum())


def certified_tv(counts_K, law_K, error: float = 1e-6) -> float:
  """An upper bound of TV(sampled law, law) that errs with probability <= `error`.

    TV(P, law) <= TV(counts / n, law) + sqrt(log(1 / error) / (2 n))

  since TV(., law) is convex, E TV(counts / n, law) >= TV(P, law), and one sample
  moves TV(counts / n, law) by 1 / n at most (McDiarmid). No asymptotics, and no
  assumption about P but that samples are independent.

  Args:
    counts_K: integers >= 0, [K]; if outputs outside of the law's cells are
      possible, the last cell must hold them (`count_outputs` does so).
    law_K: probabilities, [K].
    error: in (0, 1).

  Returns:
    The bound, in (0, 1].

  Raises:
    ValueError: as for `chi_square`, or an error outside of (0, 1).
  """
  counts_K, law_K = checked(counts_K, law_K)
  if not 0 < error < 1:
    raise ValueError(f'error: {error}; must be in (0, 1), such as 1e-6')
  total = counts_K.sum()
  observed = 0.5 * np.abs(counts_K / total - law_K).sum()
  return float(min(observed + np.sqrt(np.log(1 / error) / (2 * total)), 1.0))


def samples_for_tv(bound: float, num_cells: int, error: float = 1e-6) -> int:
  """How many samples certify `bound` when the sampled law is right.

  An upper bound: TV(counts / n, law) <= sqrt((K - 1) / n) / 2 in the mean, and
  sqrt(log(1 / error) / (2 n)) more with probability >= 1 - error.

  Example:
    >>> samples_for_tv(0.02, 256) > samples_for_tv(0.05, 256)
    True

  Raises:
    ValueError: a bound or an error outside of (0, 1), or fewer than two cells.
  """
  if not 0 < bound < 1 or not 0 < error < 1 or num_cells < 2:
    raise ValueError(
      f'bound: {bound}, error: {error}, num_cells: {num_cells}; bound and error must'
      ' be in (0, 1), and there must be at least two cells'
    )
  scale = 0.5 * np.sqrt(num_cells - 1) + 2 * np.sqrt(np.log(1 / error) / 2)
  return int(np.ceil((scale / bound) ** 2))
