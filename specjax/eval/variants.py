"""The paper's arithmetic beyond one independent draft: what else changes speed.

Leviathan, Kalman, Matias, ICML 2023 (arXiv 2211.17192). `theory` has the notation
and the main theorems; here are lenience (appendix A.5), beam search (A.4), drafts
whose acceptances depend on each other, and drafts of drafts (section 3.6).

The paper contradicts itself in two places, which a reader who recomputes it meets:

  Section 3.3 says that c was below 0.05 in all experiments; Table 4 has c = 0.11
  for T5-large.
  Appendix A.5 prints greedy lenience as p(x) <= l max p, which would accept what is
  unlikely. Its own numbers (alpha rises as l falls) need p(x) >= l max p.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax.eval import theory


def lenient_acceptance(p_V, q_V, lossy_lenience: float) -> float:
  """alpha of one prefix under lenience l: sum_x min(p(x) / l, q(x)); A.5.

  LOSSY: for l < 1 the output no longer has the target's law; see `lenient_law`.

  Args:
    p_V: float [V], the target's law.
    q_V: float [V], the draft's law.
    lossy_lenience: l in (0, 1]; 1 is exact.

  Example:
    >>> round(lenient_acceptance([0.5, 0.3, 0.2], [0.1, 0.3, 0.6], 1.0), 4)
    0.6
    >>> round(lenient_acceptance([0.5, 0.3, 0.2], [0.1, 0.3, 0.6], 0.5), 4)
    0.8
  """
  p_V, q_V = np.asarray(p_V, np.float64), np.asarray(q_V, np.float64)
  return float(np.minimum(p_V / _lenience(lossy_lenience), q_V).sum())


def lenient_law(p_V, q_V, lossy_lenience: float) -> np.ndarray:
  """The law that a token has under lenience l: Algorithm 1 with l q for q; A.5.

    min(p / l, q) + (1 - alpha_l) (p - l q)+ / (1 - l alpha_l)

  No token is likelier than p(x) / l, which is all that A.5 promises.

  Args:
    p_V: float [V], the target's law.
    q_V: float [V], the draft's law.
    lossy_lenience: l in (0, 1]; at 1 the law is p.

  Returns:
    float64 [V].

  Example:
    >>> lenient_law([0.5, 0.3, 0.2], [0.1, 0.3, 0.6], 1.0).round(4).tolist()
    [0.5, 0.3, 0.2]
    >>> lenient_law([0.5, 0.3, 0.2], [0.1, 0.3, 0.6], 0.5).round(4).tolist()
    [0.25, 0.35, 0.4]
  """
  p_V, q_V = np.asarray(p_V, np.float64), np.asarray(q_V, np.float64)
  scaled_V = _lenience(lossy_lenience) * q_V
  accepted_V = np.minimum(p_V / lossy_lenience, q_V)
  residual_V = np.maximum(p_V - scaled_V, 0.0)
  if residual_V.sum() <= 0:  # l = 1 and p = q: nothing is ever rejected
    return accepted_V
  rejected = max(1.0 - accepted_V.sum(), 0.0)
  return accepted_V + rejected * residual_V / residual_V.sum()


def beam_budget(beam: int, draft_beam: int, gamma: int) -> int:
  """Hypotheses that one target call scores with beam search: w + u gamma; A.4.

  The target keeps w hypotheses; the draft runs gamma steps with u >= w, and a step
  is accepted if the target's best w are among the draft's u.

  Args:
    beam: w >= 1.
    draft_beam: u >= w.
    gamma: integer >= 0.

  Raises:
    ValueError: a beam below 1, or a draft's narrower than the target's.

  Example:
    >>> beam_budget(4, 6, 3)
    22
  """
  if not 1 <= beam <= draft_beam:
    raise ValueError(
      f'draft_beam: {draft_beam} with beam {beam}; 1 <= beam <= draft_beam is needed'
    )
  return beam + draft_beam * theory.check_count(gamma)


def expected_tokens_at(rate_G) -> float:
  """Tokens per target call when acceptance depends on the place in the block.

    E = 1 + sum_i P(A_1 .. A_i) = 1 + sum_i prod_{j <= i} rate_j

  What remains of Eq. 1 without its assumption of independence.

  Args:
    rate_G: [gamma]; P(draft j is accepted | all before it were), such as accepted
      at j / judged at j of a measured run.

  Example:
    >>> round(expected_tokens_at([0.8] * 5), 4)  # independent: Eq. 1
    3.6893
    >>> expected_tokens_at([0.5, 1.0, 1.0])
    2.5
  """
  rate_G = np.atleast_1d(theory.check_fraction('rate_G', rate_G))
  return 1.0 + float(np.cumprod(rate_G).sum())


def expected_tokens_mixed(alpha_N, gamma: int) -> float:
  """Tokens per target call when alpha differs between texts: the mean of Eq. 1.

  Eq. 1 is convex in alpha, so that this is at least `expected_tokens` of the mean
  alpha: texts of one difficulty are the worst case.

  Args:
    alpha_N: [N] in [0, 1]; alpha of N equally likely texts (or passages).
    gamma: integer >= 0.

  Example:
    >>> expected_tokens_mixed([0.5, 1.0], 3), theory.expected_tokens(0.75, 3)
    (2.9375, 2.734375)
  """
  alpha_N = np.atleast_1d(theory.check_fraction('alpha_N', alpha_N))
  return float(np.mean(theory.expected_tokens(alpha_N, gamma)))


class Level(NamedTuple):
  """One model that drafts for the one above it.

  Attributes:
    alpha: its acceptance by the model above.
    gamma: tokens that it drafts per call of the model above.
    c: time of its step / time of a step of the model above.
    v: verify cost of the model above, as for `theory.speedup`.
  """

  alpha: float
  gamma: int
  c: float
  v: theory.Cost = 1.0


def multi_level_speedup(levels: Sequence[Level]) -> float:
  """Speedup when drafts are themselves drafted for (section 3.6).

  A draft that S' times speeds up costs c / S' a token:

    S = E(alpha, gamma) / (v + gamma c / S'),  S' = the same of the level below

  Args:
    levels: from the target's draft down; one level is `theory.speedup`.

  Raises:
    ValueError: no level, or one below whose speedup is 0.

  Example:
    >>> one, two = Level(0.8, 5, 0.2), Level(0.6, 2, 0.05)
    >>> round(multi_level_speedup([one]), 3), round(multi_level_speedup([one, two]), 3)
    (1.845, 2.363)
  """
  if not levels:
    raise ValueError('levels: none; give at least one')
  below = 1.0
  for level in reversed(levels):
    below = theory.speedup(level.alpha, level.gamma, level.c / below, level.v)
  return below


def _lenience(value: float) -> float:
  if not 0 < value <= 1:
    raise ValueError(f'lossy_lenience: {value:g}; a number in (0, 1] is needed')
  return value
