"""Times that a chip's published figures promise, from what compiled steps do.

A step takes as long as the slower of its arithmetic and its traffic with main memory,
and then its collectives, which wait for it and which it waits for. What it leaves out
is latency: the start of each operation, and everything between programs. So it is a
lower bound, a good one for steps that stream gigabytes and a poor one for those that
read little in many small operations.
"""

from collections.abc import Mapping
from typing import NamedTuple

from specjax.eval import theory
from specjax.parallel.hlo_facts import Collective
from specjax.parallel.topology import Chip

# One hop between neighbours: https://jax-ml.github.io/scaling-book/sharding
HOP_SECONDS = 1e-6


class Work(NamedTuple):
  """What one device does in a step.

  Attributes:
    flops: operations, a multiply-add is two.
    nbytes: to and from main memory.
    collectives: communication.
  """

  flops: float
  nbytes: float
  collectives: tuple[Collective, ...] = ()


class Bound(NamedTuple):
  """Seconds that a step takes at least, by what it waits for."""

  compute: float
  memory: float
  network: float

  @property
  def seconds(self) -> float:
    return max(self.compute, self.memory) + self.network

  @property
  def limit(self) -> str:
    """'compute', 'memory' or 'network', whichever is longest."""
    return max(self._fields, key=lambda name: getattr(self, name))


class Prediction(NamedTuple):
  """What speculation promises at one gamma; `eval.theory` has the formulas.

  Attributes:
    gamma: drafted tokens a round.
    c: time of a draft step / of a plain step.
    v: time of verifying gamma + 1 tokens / of a plain step.
    tokens: expected tokens of a round.
    ms_per_token: milliseconds.
    speedup: over plain decoding, encoders left out.
  """

  gamma: int
  c: float
  v: float
  tokens: float
  ms_per_token: float
  speedup: float


def bound(work: Work, chip: Chip) -> Bound:
  """Seconds of a step on a chip, in bfloat16."""
  return Bound(
    work.flops / chip.bf16_flops,
    work.nbytes / chip.hbm_bandwidth,
    sum(each.times * collective_seconds(each, chip) for each in work.collectives),
  )


def collective_seconds(collective: Collective, chip: Chip) -> float:
  """Around a ring in both directions; small ones wait for hops, not for bandwidth.

  Example:
    >>> from specjax.parallel.topology import V4
    >>> once = Collective('all-reduce', 131072, 4, 1, '')
    >>> round(1e6 * collective_seconds(once, V4), 2)  # microseconds
    6.18
  """
  devices = collective.group
  if devices < 2:
    return 0.0
  if collective.kind == 'collective-permute':
    return HOP_SECONDS + collective.nbytes / chip.link_bandwidth
  passes = 2 if collective.kind == 'all-reduce' else 1
  moved = passes * collective.nbytes * (devices - 1) / devices
  return passes * (devices // 2) * HOP_SECONDS + moved / (2 * chip.link_bandwidth)


def predict(
  alpha: float, plain: float, draft: float, verify: Mapping[int, float]
) -> list[Prediction]:
  """What each gamma promises.

  Args:
    alpha: expected acceptance probability, in [0, 1].
    plain: seconds of a plain step.
    draft: seconds of a draft step.
    verify: seconds of verifying gamma + 1 tokens, by gamma >= 1.

  Returns:
    In the order of `verify`.

  Raises:
    ValueError: alpha or a time is out of range.

  Example:
    >>> (row,) = predict(0.75, 0.010, 0.0002, {7: 0.010})
    >>> row.c, row.v, round(row.speedup, 1)
    (0.02, 1.0, 3.2)
  """
  if plain <= 0:
    raise ValueError(f'plain: {plain}; a positive number of seconds is needed')
  predictions = []
  for gamma, seconds in verify.items():
    c, v = draft / plain, seconds / plain
    speedup = theory.speedup(alpha, gamma, c, v)
    tokens = theory.expected_tokens(alpha, gamma)
    ms_per_token = 1000 * plain / speedup
    predictions.append(Prediction(gamma, c, v, tokens, ms_per_token, speedup))
  return predictions


def best(predictions: list[Prediction]) -> Prediction:
  """The one of the largest speedup; ties go to the smaller gamma."""
  return max(predictions, key=lambda each: (each.speedup, -each.gamma))
