"""What a text costs in each method, measured in the programs that decode.

  time of a batch = start + number of rounds x round

The same texts run to a short and to a long budget. Budgets are arrays, so that
nothing compiles for it; and both models are found in the processor's caches, or not,
just as they are when texts are decoded, which is not so for steps timed alone. The
start is the rest: encoders, caches, and the call.
"""

import argparse
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments import common
from specjax import generation
from specjax.eval import steps
from specjax.eval.interleave import Clock, Samples, interleave, ratio
from specjax.pair import Pair

CLOCKS: dict[str, Clock] = {'wall': time.perf_counter, 'cpu': time.process_time}


def parser(name: str, description: str, **defaults: int) -> argparse.ArgumentParser:
  """`common.pair_parser` with `--clock`."""
  result = common.pair_parser(name, description, **defaults)
  result.add_argument(
    '--clock',
    choices=list(CLOCKS),
    default='wall',
    help='cpu: time on the processor, for machines that others use too; keep the '
    'process on one core then (taskset -c 0)',
  )
  return result


class Cost(NamedTuple):
  """Seconds of a batch, a value for each turn.

  Attributes:
    start: once.
    round: each round.
  """

  start: Samples
  round: Samples

  def predict(self, num_starts: float, num_rounds: float) -> Samples:
    """Seconds of so many batches with so many rounds in all."""
    pairs = zip(self.start.values, self.round.values, strict=True)
    return Samples(tuple(num_starts * a + num_rounds * b for a, b in pairs))


class Work(NamedTuple):
  """What decoding batches took, in counts.

  Attributes:
    outputs: of all texts.
    num_batches: each starts once.
    num_rounds: of all batches.
    live: share of rows that were not yet done, over all rounds.
  """

  outputs: list[generation.Generation]
  num_batches: int
  num_rounds: int
  live: float

  @property
  def num_tokens(self) -> int:
    return sum(len(each.ids) for each in self.outputs)


def work_of(pair: Pair, run: common.Run) -> Work:
  outputs, num_rounds, num_rows = [], 0, 0
  for batch, state in zip(run.batches, run.run(), strict=True):
    outputs += generation.read_rows(state, batch.indices, pair.vocabulary)
    num_rounds += int(state.step)
    num_rows += int(state.step) * batch.inputs_BE.shape[0]
  live = sum(each.num_target_calls for each in outputs) / num_rows
  ordered = sorted(outputs, key=lambda each: each.index)
  return Work(ordered, len(run.batches), num_rounds, live)


def measure(
  pair: Pair,
  runs: Mapping[Any, common.Run],
  repeats: int,
  *,
  budgets: Sequence[int] = (8, 104),
  others: Mapping[Any, Callable[[], Any]] | None = None,
  clock: str = 'wall',
) -> tuple[dict[Any, Cost], dict[Any, Samples]]:
  """Costs of the first batch of each run.

  Args:
    pair: decodes.
    runs: by method; their texts are forced to their budgets.
    repeats: turns.
    budgets: short and long.
    others: more to time in the same turns.
    clock: a name of `CLOCKS`.

  Returns:
    The costs of `runs`, and the times of `others`.
  """
  timed: dict[Any, Callable[[], Any]] = {}
  num_rounds = {}
  for name, run in runs.items():
    for budget in budgets:
      timed[name, budget] = functools.partial(_to_budget, pair, run, budget)
      num_rounds[name, budget] = int(timed[name, budget]().step)
  others = {('other', name): run for name, run in (others or {}).items()}
  times, _ = interleave({**timed, **others}, repeats, CLOCKS[clock])
  short, long = budgets
  costs = {}
  for name in runs:
    few, many = num_rounds[name, short], num_rounds[name, long]
    pairs = zip(times[name, short].values, times[name, long].values, strict=True)
    round_ = tuple(max(b - a, 1e-9) / (many - few) for a, b in pairs)
    starts = zip(times[name, short].values, round_, strict=True)
    start = tuple(max(a - few * each, 0.0) for a, each in starts)
    costs[name] = Cost(Samples(start), Samples(round_))
  return costs, {name: times['other', name] for _, name in others}


def _to_budget(pair: Pair, run: common.Run, budget: int):
  batch = run.batches[0]
  budget_B = jnp.full(batch.inputs_BE.shape[0], budget, jnp.int32)
  sampling = batch.sampling._replace(
    min_new_tokens_B=budget_B, max_new_tokens_B=budget_B
  )
  return pair.decode(run.params, batch._replace(sampling=sampling), run.static)


def v_of(plain: Cost, verify: Cost) -> float:
  """Verifying G + 1 tokens over a plain step.

  Args:
    plain: of method 'none'.
    verify: of 'ngram' with G tokens: looking them up costs next to nothing.
  """
  return ratio(verify.round, plain.round).median


def c_of(plain: Cost, verify: Cost, method: Cost, gamma: int) -> float:
  """A draft step over a plain step: what a round has beyond verifying, over G."""
  costs = (method, verify, plain)
  turns = zip(*(each.round.values for each in costs), strict=True)
  return max(float(np.median([(a - b) / gamma / x for a, b, x in turns])), 0.0)


def predict(plain: Cost, method: Cost, plain_work: Work, work: Work) -> Samples:
  """Speedup a token that costs and counts promise, turn by turn."""
  ratios = ratio(
    plain.predict(plain_work.num_batches, plain_work.num_rounds),
    method.predict(work.num_batches, work.num_rounds),
  )
  return _scaled(ratios, work.num_tokens / plain_work.num_tokens)


def speedup(plain: Samples, ours: Samples, plain_work: Work, work: Work) -> Samples:
  """Measured speedup a token (sampled texts differ in length), turn by turn."""
  return _scaled(ratio(plain, ours), work.num_tokens / plain_work.num_tokens)


def _scaled(samples: Samples, factor: float) -> Samples:
  return Samples(tuple(factor * value for value in samples.values))


def alone(
  pair: Pair, run: common.Run, repeats: int, clock: str = 'wall'
) -> dict[str, float]:
  """c and v of steps timed alone, and what a round costs beyond (docs/metrics.md)."""
  batch, static = run.batches[0], run.static
  names = ('target', 'drafter', 'verifier', 'warp', 'max_len')
  arguments = (run.params, batch.inputs_BE, batch.sampling)
  options: dict[str, Any] = {'repeats': repeats, 'clock': CLOCKS[clock]}
  options |= {name: static[name] for name in names}
  with pair.precision():
    times = steps.measure_steps(*arguments, **options)
    overhead = steps.loop_overhead(*arguments, **options)
  return {
    'c_alone': round(times.c, 3),
    'v_alone': round(times.v, 2),
    'loop': round(overhead.loop.median, 2),
    'memory': round(overhead.memory.median, 2),
  }
