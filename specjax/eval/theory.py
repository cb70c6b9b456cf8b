"""The paper's arithmetic of speed: what alpha, c, v and gamma promise.

Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative
Decoding", ICML 2023 (arXiv 2211.17192), sections 3.1 to 3.5. Floats and NumPy
only. Notation:

  alpha   expected acceptance probability of a drafted token (Definition 3.1)
  gamma   drafted tokens per target call; 0 is plain decoding
  c       time of one draft step / time of one target step (Definition 3.7)
  v       time of verifying gamma + 1 tokens / time of one target step

The paper takes v = 1, which TPUs and GPUs come near as long as they wait for
memory. CPUs do not, so every formula of time takes v, and equals the paper's at
the default. Tokens are taken to be accepted independently of each other, the
paper's own simplification: measured counts need not follow it. `variants` has
what replaces it, lenience, beam search and drafts of drafts.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Cost = float | Sequence[float] | Callable[[int], float]


def expected_tokens(alpha, gamma: int):
  """Tokens that one target call emits: Eq. 1.

    E = (1 - alpha^(gamma + 1)) / (1 - alpha) = 1 + alpha + ... + alpha^gamma

  Args:
    alpha: float or array, in [0, 1].
    gamma: integer >= 0.

  Returns:
    float or array in [1, gamma + 1].

  Raises:
    ValueError: alpha or gamma out of range, here and in every function below.

  Example:
    >>> round(expected_tokens(0.8, 5), 4)
    3.6893
    >>> expected_tokens(1.0, 7)
    8.0
  """
  alpha = check_fraction('alpha', alpha)
  return sum((alpha**i for i in range(1, check_count(gamma) + 1)), alpha * 0 + 1.0)


def token_law(alpha: float, gamma: int) -> np.ndarray:
  """Law of the number of tokens of one target call: the capped geometric.

    P(L = l) = alpha^(l-1) (1 - alpha) for l <= gamma,  P(L = gamma + 1) = alpha^gamma

  (section 3.1; its mean is `expected_tokens`).

  Args:
    alpha: in [0, 1].
    gamma: integer >= 0.

  Returns:
    float64 [gamma + 1]; entry i is P(L = i + 1).

  Example:
    >>> token_law(0.5, 2).tolist()
    [0.5, 0.25, 0.25]
  """
  alpha, gamma = check_fraction('alpha', alpha), check_count(gamma)
  law = alpha ** np.arange(gamma + 1) * (1.0 - alpha)
  law[gamma] = alpha**gamma
  return law


def acceptance(p_V, q_V) -> float:
  """beta = sum_x min(p(x), q(x)) = 1 - D_LK(p, q): Theorem 3.5 and Lemma 3.3.

  The probability that a token drawn from q is accepted for the target law p;
  alpha is its mean over prefixes (Corollary 3.6).

  Args:
    p_V: float [V], a law.
    q_V: float [V], a law.

  Example:
    >>> round(acceptance([0.5, 0.3, 0.2], [0.6, 0.3, 0.1]), 4)
    0.9
  """
  return float(np.minimum(np.asarray(p_V), np.asarray(q_V)).sum())


def verify_cost(v: Cost, gamma: int) -> float:
  """v(gamma), from a number, a sequence indexed by gamma, or a function.

  v(0) is 1 by definition: a target call without drafts is a plain step.

  Raises:
    ValueError: v <= 0 or not finite; a sequence that does not reach gamma.

  Example:
    >>> verify_cost(1.7, 0), verify_cost(1.7, 4), verify_cost([1, 1.5, 1.6], 2)
    (1.0, 1.7, 1.6)
  """
  gamma = check_count(gamma)
  if gamma == 0:
    return 1.0
  if callable(v):
    value = float(v(gamma))
  elif np.ndim(v) == 0:
    value = float(v)  # type: ignore[arg-type]
  elif gamma < len(v):  # type: ignore[arg-type]
    value = float(v[gamma])  # type: ignore[index]
  else:
    raise ValueError(
      f'v: {len(v)} values, none for gamma {gamma};'  # type: ignore[arg-type]
      ' give v(0) to v(gamma), or a number, or a function of gamma'
    )
  if not 0 < value < np.inf:
    raise ValueError(f'v: {value:g} for gamma {gamma}; a positive number is needed')
  return value


def speedup(alpha, gamma: int, c: float, v: Cost = 1.0):
  """Walltime of plain decoding / walltime of speculative decoding.

    S = (1 - alpha^(gamma + 1)) / ((1 - alpha) (v + gamma c))

  Theorem 3.8 when v = 1. gamma = 0 is plain decoding: S = 1 whatever v says.

  Args:
    alpha: float or array, in [0, 1].
    gamma: integer >= 0.
    c: >= 0.
    v: > 0; a number, a sequence indexed by gamma, or a function of gamma.

  Returns:
    float or array.

  Example:
    >>> round(speedup(0.75, 7, 0.02), 1)  # Table 4, EnDe, T5-small, T = 0
    3.2
    >>> round(speedup(0.75, 7, 0.02, v=2.0), 1)
    1.7
  """
  return speedup_of(expected_tokens(alpha, gamma), gamma, c, v)


def speedup_of(tokens_per_call, gamma: int, c: float, v: Cost = 1.0):
  """`speedup` with measured tokens per call in the place of Eq. 1.

    S = tokens / (v + gamma c)

  The right prediction where tokens are not accepted independently, or where a
  round may propose fewer than gamma tokens (prompt lookup).

  Example:
    >>> speedup_of(3.0, 4, 0.0, v=1.5)
    2.0
  """
  return tokens_per_call / (verify_cost(v, gamma) + check_count(gamma) * _cost('c', c))


def optimal_gamma(alpha: float, c: float, v: Cost = 1.0, max_gamma: int = 32) -> int:
  """The gamma of the largest `speedup` (section 3.5); 0 is "do not speculate".

  Ties go to the smaller gamma, so that alpha = c = 1 gives 0.

  Args:
    alpha: in [0, 1].
    c: >= 0.
    v: as for `speedup`; a sequence limits the search to its length.
    max_gamma: largest gamma to consider; with c = 0 and v constant it is the
      answer whenever speculation pays at all.

  Example:
    >>> optimal_gamma(0.75, 0.02), optimal_gamma(0.75, 0.02, v=4.5)
    (9, 0)
    >>> optimal_gamma(1.0, 1.0)
    0
  """
  last = check_count(max_gamma, 'max_gamma')
  if not callable(v) and np.ndim(v) > 0:
    last = min(last, len(v) - 1)  # type: ignore[arg-type]
  best, best_speedup = 0, 1.0
  for gamma in range(1, last + 1):
    value = speedup(alpha, gamma, c, v)
    if value > best_speedup * (1 + 1e-12):  # rounding does not break a tie
      best, best_speedup = gamma, value
  return best


def speedup_bound(alpha: float, c: float) -> float:
  """Corollary 3.9: what some gamma reaches at least, at v = 1.

  If alpha > c, gamma = 1 already gives (1 + alpha) / (1 + c) > 1. If alpha <= c,
  no gamma helps, and the answer is 1.

  Example:
    >>> round(speedup_bound(0.6, 0.1), 3), speedup_bound(0.1, 0.2)
    (1.455, 1.0)
  """
  alpha, c = check_fraction('alpha', alpha), _cost('c', c)
  return (1.0 + alpha) / (1.0 + c) if alpha > c else 1.0


def oracle_speedup(alpha, c: float):
  """The speedup if an oracle told how many drafts will be accepted (section 3.5).

    E = 1 / (1 - alpha),  S = 1 / (1 - alpha + alpha c)

  It drafts alpha / (1 - alpha) tokens per call on average and none in vain; v = 1.
  No fixed gamma reaches it, nor any scheme that must draft before it knows.

  Args:
    alpha: float or array, in [0, 1); 1 only with c > 0.
    c: >= 0.

  Example:
    >>> round(oracle_speedup(0.9, 0.1), 2), round(speedup(0.9, 10, 0.1), 2)
    (5.26, 3.43)
  """
  alpha = check_fraction('alpha', alpha)
  time = 1.0 - alpha * (1.0 - _cost('c', c))
  if np.min(time) <= 0:
    raise ValueError('alpha: 1 with c: 0; the oracle drafts for ever, give c > 0')
  return 1.0 / time


def accesses(alpha, gamma: int):
  """Factor by which reads of the target's weights and cache change: section 3.4.

  Each call reads them once, whatever it verifies: 1 / `expected_tokens`.

  Example:
    >>> round(accesses(0.8, 5), 3)
    0.271
  """
  return 1.0 / expected_tokens(alpha, gamma)


def operations(alpha, gamma: int, c_hat: float = 0.0):
  """Factor by which the number of arithmetic operations grows: Theorem 3.11.

    (1 - alpha) (gamma c_hat + gamma + 1) / (1 - alpha^(gamma + 1))

  Args:
    alpha: float or array, in [0, 1].
    gamma: integer >= 0.
    c_hat: operations per token of the draft / of the target (Definition 3.10).

  Example:
    >>> round(operations(0.8, 5), 2)  # Table 1
    1.63
  """
  work = check_count(gamma) * _cost('c_hat', c_hat) + gamma + 1.0
  return work / expected_tokens(alpha, gamma)


def check_fraction(name: str, value) -> Any:
  """`value` as float or float64 array; a ValueError that names it if not in [0, 1]."""
  value = np.asarray(value, np.float64)
  if not np.all((value >= 0) & (value <= 1)):
    raise ValueError(f'{name}: {value}; a probability in [0, 1] is needed')
  return float(value) if value.ndim == 0 else value


def check_count(value, name: str = 'gamma') -> int:
  """`value` as int; a ValueError that names it if it is no integer >= 0."""
  try:
    count = operator.index(value)
  except TypeError:
    raise ValueError(f'{name}: {value}; an integer >= 0 is needed') from None
  if count < 0:
    raise ValueError(f'{name}: {count}; an integer >= 0 is needed')
  return count


def _cost(name: str, value) -> float:
  value = float(value)
  if not 0 <= value < np.inf:
    raise ValueError(f'{name}: {value:g}; a finite number >= 0 is needed')
  return value
