"""Does speculation pay, which term is to blame if not, and what would be better.

Everything follows from measured alpha, c and v by the paper's formulas, or with tokens
per call as counted where drafts are not accepted independently or not always found:

  alpha <= c          no gamma pays on any machine (Corollary 3.9): the draft is
                      too dear (c) or agrees too seldom (alpha)
  1 / (1 - alpha)     what free drafts and free verification could reach at most
  v                   what verifying costs here; the paper takes 1
  excess              what a round costs beyond its parts: the loop itself
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from specjax.eval import theory

_NEAR = 1.05  # a gain below 5 % is not worth another gamma
_DEAR = 1.25  # a term that costs a fifth of the time is worth a sentence


class Diagnosis(NamedTuple):
  """What `diagnose` finds; all speedups are over plain decoding.

  Attributes:
    gamma: the gamma in use.
    predicted: from alpha, c and v at gamma.
    measured: as given, or None.
    best_gamma: the best by theory with the same c, 0 for "do not speculate".
    best: its predicted speedup, 1 for gamma 0.
    best_gamma_at_v1: the same if verifying cost one step (v = 1).
    best_at_v1: its predicted speedup.
    limit: 1 / (1 - alpha), inf for alpha = 1.
    blame: 'alpha', 'c', 'v', 'loop' or 'nothing'; the term to blame for a loss, or
      for a fifth or more of the time where speculation pays.
    pays: whether the measured speedup, or else the predicted one, is above 1.
  """

  gamma: int
  predicted: float
  measured: float | None
  best_gamma: int
  best: float
  best_gamma_at_v1: int
  best_at_v1: float
  limit: float
  blame: str
  pays: bool


def interpolated(v: float, gamma: int) -> theory.Cost:
  """v for every gamma from one measurement: a straight line from v(0) = 1.

  Example:
    >>> interpolated(2.0, 4)(2)
    1.5
  """
  return lambda other: max(1.0 + (v - 1.0) * other / gamma, min(v, 1.0))


def diagnose(
  alpha: float,
  c: float,
  v: theory.Cost,
  gamma: int,
  measured: float | None = None,
  *,
  tokens: Callable[[int], float] | None = None,
  excess: float = 1.0,
  max_gamma: int = 16,
) -> Diagnosis:
  """Finds the term that costs most, and the best gamma.

  Args:
    alpha: in [0, 1]; measured (`metrics.alpha`) or estimated.
    c: >= 0; time of a draft step / of a target step.
    v: v(gamma) as measured: a number is taken to grow linearly with gamma; a
      sequence or function gives v for every gamma.
    gamma: >= 1; the gamma in use.
    measured: measured speedup, if there is one.
    tokens: gamma -> tokens per target call, in the place of Eq. 1 at `alpha`;
      `metrics.Summary.block_efficiency_at` of a run.
    excess: time of a round / time of its parts.
    max_gamma: largest gamma to recommend.

  Raises:
    ValueError: a value out of range, or gamma 0: nothing to diagnose.
  """
  if gamma == 0:
    raise ValueError('gamma: 0; plain decoding needs no diagnosis, give gamma >= 1')
  at_gamma = theory.verify_cost(v, gamma)
  is_number = isinstance(v, int | float)
  every_v = interpolated(at_gamma, gamma) if is_number else v
  if tokens is None:
    tokens = functools.partial(theory.expected_tokens, alpha)
  predicted = theory.speedup_of(tokens(gamma), gamma, c, at_gamma)
  last = max_gamma
  if not is_number and not callable(v):
    last = min(last, len(v) - 1)  # type: ignore[arg-type]

  def best_with(v):
    speedups = [
      theory.speedup_of(tokens(each), each, c, v) if each else 1.0
      for each in range(last + 1)
    ]
    # Rounding breaks no tie, and ties go to the smaller gamma.
    best_gamma = max(
      range(last + 1), key=lambda each: (round(speedups[each], 12), -each)
    )
    return best_gamma, speedups[best_gamma]

  best_gamma, best = best_with(every_v)
  best_gamma_at_v1, best_at_v1 = best_with(1.0)
  limit = 1.0 / (1.0 - alpha) if alpha < 1 else float('inf')

  # What each term costs at this gamma: the gain if it alone were ideal.
  round_cost = at_gamma + gamma * c
  losses = {
    'v': round_cost / (1.0 + gamma * c),
    'c': round_cost / at_gamma,
    'loop': excess,
  }
  pays = (predicted if measured is None else measured) > 1.0
  if alpha <= c:
    # No machine helps; of the two, blame the one whose cure would do more.
    blame = 'c' if c and limit >= 1.0 / c else 'alpha'
  elif limit < 1.5:
    blame = 'alpha'
  else:
    blame = max(losses, key=lambda name: losses[name])
    if losses[blame] <= (_DEAR if pays else 1.0):
      blame = 'nothing'
  return Diagnosis(
    gamma,
    predicted,
    measured,
    best_gamma,
    best,
    best_gamma_at_v1,
    best_at_v1,
    limit,
    blame,
    pays,
  )


def explain(
  alpha: float,
  c: float,
  v: theory.Cost,
  gamma: int,
  measured: float | None = None,
  *,
  tokens: Callable[[int], float] | None = None,
  excess: float = 1.0,
  max_gamma: int = 16,
) -> str:
  """`diagnose` in plain words: a verdict, a reason, and an advice.

  Arguments are those of `diagnose`.

  Example:
    >>> for line in explain(alpha=1.0, c=1.0, v=1.0, gamma=4).splitlines():
    ...   print(line[:55])
    Speculation does not pay: 1.00x predicted with gamma 4.
    A draft step costs 1.00 target steps (c) and alpha is 1
    Use gamma 0 (plain decoding), or a cheaper draft: a sma
  """
  found = diagnose(
    alpha,
    c,
    v,
    gamma,
    measured,
    tokens=tokens,
    excess=excess,
    max_gamma=max_gamma,
  )
  value = f'{found.predicted:.2f}x predicted'
  if measured is not None:
    value = f'{measured:.2f}x measured, {value},'
  verdict = 'pays' if found.pays else 'does not pay'
  lines = [f'Speculation {verdict}: {value} with gamma {gamma}.']
  at_gamma = theory.verify_cost(v, gamma)
  reason = _reason(found, alpha, c, at_gamma, excess)
  if measured is not None and found.predicted > measured * _DEAR:
    reason.append(
      f'Measured is {measured / found.predicted:.0%} of predicted: alpha, c and v leave'
      ' out the encoders, the loop itself and rows that wait for the last one.'
    )
  return '\n'.join([*lines, *reason, _advice(found)])


def _reason(found: Diagnosis, alpha, c, v, excess) -> list[str]:
  gamma = found.gamma
  if found.blame == 'alpha' and alpha <= c:
    return [
      f'The draft agrees too seldom: alpha {alpha:.2f} is not above c {c:.2f}, and'
      ' then no gamma pays on any machine.'
    ]
  if found.blame == 'alpha':
    return [
      f'The draft agrees too seldom: with alpha {alpha:.2f} even free drafts and free'
      f' verification would give no more than {found.limit:.2f}x.'
    ]
  if found.blame == 'c' and alpha <= c:
    return [
      f'A draft step costs {c:.2f} target steps (c) and alpha is {alpha:.2f}: with'
      ' alpha <= c no gamma pays on any machine.'
    ]
  if found.blame == 'c':
    return [
      f'Drafting is dear: a draft step costs {c:.2f} target steps (c), {gamma} of'
      f' them {gamma * c:.2f}, where verifying costs {v:.2f} (v).'
    ]
  if found.blame == 'v':
    same = f'with gamma {found.best_gamma_at_v1} the same pair would give'
    return [
      f'Verifying {gamma + 1} tokens costs {v:.2f} one-token steps on this machine'
      f' (v). At v = 1, which TPUs and GPUs come near, {same} {found.best_at_v1:.2f}x.'
    ]
  if found.blame == 'loop':
    return [
      f'The loop itself is to blame: a round takes {excess:.2f} times as long as'
      ' its drafting and verifying alone.'
    ]
  return []


def _advice(found: Diagnosis) -> str:
  if found.best_gamma == 0 and found.pays:
    return (
      f'Gamma {found.gamma} pays all the same, which these three figures alone do not'
      ' predict: the measured speedup counts.'
    )
  if found.best_gamma == 0:
    remedy = {
      'alpha': 'a draft that agrees more often: a larger or a distilled one',
      'c': 'a cheaper draft: a smaller model, or prompt lookup (c near 0)',
      'v': 'prompt lookup (c near 0) where the output repeats the source',
    }.get(found.blame)
    return 'Use gamma 0 (plain decoding)' + (f', or {remedy}.' if remedy else '.')
  if found.best > found.predicted * _NEAR:
    return (
      f'Gamma {found.best_gamma} would be better: {found.best:.2f}x by theory,'
      f' where gamma {found.gamma} gives {found.predicted:.2f}x.'
    )
  if not found.pays:
    return 'By theory no other gamma is better: use plain decoding here.'
  return f'Gamma {found.gamma} is a good choice for these numbers.'
