"""Timing whole runs: compiled first, synchronised, and measured in turns.

Turns go A B C A B C ..., so that a machine that slows down slows all alike, and
ratios are taken within a turn. `steps` times the parts of a round the same way.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.eval import theory

Clock = Callable[[], float]


class Samples(NamedTuple):
  """Repeated measurements of one quantity.

  Attributes:
    values: one for each repeat, in the order of measurement.
  """

  values: tuple[float, ...]

  @property
  def median(self) -> float:
    return float(np.median(self.values))

  @property
  def low(self) -> float:
    """The lower quartile."""
    return float(np.quantile(self.values, 0.25))

  @property
  def high(self) -> float:
    """The upper quartile."""
    return float(np.quantile(self.values, 0.75))


def ratio(numerator: Samples, denominator: Samples) -> Samples:
  """Quotients within each turn."""
  pairs = zip(numerator.values, denominator.values, strict=True)
  return Samples(tuple(a / b for a, b in pairs))


def added(*terms: Samples) -> Samples:
  """Sums within each turn."""
  turns = zip(*(each.values for each in terms), strict=True)
  return Samples(tuple(sum(turn) for turn in turns))


class StepTimes(NamedTuple):
  """Seconds per step of a batch, from `steps.measure_steps`.

  Attributes:
    num_draft: gamma.
    target_step: one plain step: extend by 1 token, warp, draw, commit.
    verify_step: a round whose draft is given: extend by gamma + 1 tokens, warp,
      verify, commit.
    proposal: the drafter's proposal of gamma tokens.
    round: a whole speculative round.
    target_encode: the target's encoder and cache, once per batch.
    draft_encode: the drafter's.
  """

  num_draft: int
  target_step: Samples
  verify_step: Samples
  proposal: Samples
  round: Samples
  target_encode: Samples
  draft_encode: Samples

  @property
  def c(self) -> float:
    """Time of one draft step, proposal / gamma, over that of one target step."""
    return ratio(self.proposal, self.target_step).median / self.num_draft

  @property
  def v(self) -> float:
    """Time of a verify step over that of one target step."""
    return ratio(self.verify_step, self.target_step).median

  @property
  def excess(self) -> float:
    """Time of a round over that of proposal and verify step: ideally 1."""
    return ratio(self.round, added(self.proposal, self.verify_step)).median

  def predict(self, alpha: float) -> float:
    """`theory.speedup` with the measured c and v."""
    return theory.speedup(alpha, self.num_draft, self.c, self.v)

  def as_dict(self) -> dict[str, Any]:
    """Medians in milliseconds and the ratios, for JSON."""
    times = self._asdict()
    num_draft = times.pop('num_draft')
    milliseconds = {f'{name}_ms': 1e3 * each.median for name, each in times.items()}
    return {
      'num_draft': num_draft,
      **milliseconds,
      'c': self.c,
      'v': self.v,
      'excess': self.excess,
    }


class Overhead(NamedTuple):
  """What a round costs beyond its parts, from `steps.loop_overhead`; ideally 1.

  Attributes:
    total: time of a round / that of gamma draft steps and one verification, each
      timed alone; the product of the two below.
    loop: time of a round / that of drafting and verifying in turns without the
      loop: what the loop itself adds.
    memory: time of drafting and verifying in turns / that of each alone: what
      the two models' weights cost by evicting each other from the machine's
      caches, with any loop.
  """

  total: Samples
  loop: Samples
  memory: Samples


class Speedup(NamedTuple):
  """Speculative against plain decoding, from `measure_speedup`.

  Attributes:
    speculative: seconds of each warm run.
    baseline: seconds of each warm run.
    speculative_compile: seconds that its first call took longer than the median.
    baseline_compile: likewise.
  """

  speculative: Samples
  baseline: Samples
  speculative_compile: float
  baseline_compile: float

  @property
  def ratios(self) -> Samples:
    """Baseline / speculative within each turn; above 1 speculation pays."""
    return ratio(self.baseline, self.speculative)


def interleave(
  runs: Mapping[str, Callable[[], Any]],
  repeats: int,
  clock: Clock = time.perf_counter,
  before: Callable[[str], None] = lambda name: None,
) -> tuple[dict[str, Samples], dict[str, float]]:
  """Times runs in turns.

  Args:
    runs: by name; what a run returns is waited for.
    repeats: turns, >= 1.
    clock: returns seconds; replace it in tests.
    before: called with the name of each run before it is timed.

  Returns:
    The warm times of each run, and the time of each one's first call.

  Raises:
    ValueError: repeats < 1.
  """
  if repeats < 1:
    raise ValueError(f'repeats: {repeats}; at least 1 is needed')

  def timed(name: str) -> float:
    before(name)
    start = clock()
    jax.block_until_ready(runs[name]())
    return clock() - start

  first = {name: timed(name) for name in runs}
  values: dict[str, list[float]] = {name: [] for name in runs}
  for _ in range(repeats):
    for name in runs:
      values[name].append(timed(name))
  return {name: Samples(tuple(each)) for name, each in values.items()}, first


def measure_speedup(
  run_speculative: Callable[[], Any],
  run_baseline: Callable[[], Any],
  repeats: int = 5,
  clock: Clock = time.perf_counter,
) -> Speedup:
  """Runs both in turns, A B A B, after one call each that compiles.

  Args:
    run_speculative: decodes; returns arrays to wait for.
    run_baseline: decodes the same without drafts.
    repeats: turns, >= 1.
    clock: returns seconds; replace it in tests.
  """
  runs = {'speculative': run_speculative, 'baseline': run_baseline}
  warm, first = interleave(runs, repeats, clock)

  def compile_time(name):
    return max(first[name] - warm[name].median, 0.0)

  return Speedup(
    warm['speculative'],
    warm['baseline'],
    compile_time('speculative'),
    compile_time('baseline'),
  )
