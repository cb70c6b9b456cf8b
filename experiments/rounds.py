"""What a text costs in each method, measured in the programs that decode.

  time of a text = start + number of rounds x round

The same text runs to a short and to a long budget. Budgets are arrays, so that
nothing compiles for it; and both models are found in the processor's caches, or not,
just as they are when texts are decoded, which is not so for steps timed alone. The
start is the rest: encoders, caches, and the call.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments import common
from specjax.eval import steps
from specjax.eval.bench import Samples, interleave, ratio
from specjax.pair import Pair


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


def measure(
  pair: Pair,
  runs: Mapping[str, common.Run],
  repeats: int,
  *,
  budgets: Sequence[int] = (8, 104),
  others: Mapping[Hashable, Callable[[], Any]] | None = None,
) -> tuple[dict[str, Cost], dict[Hashable, Samples]]:
  """Costs of the first batch of each run.

  Args:
    pair: decodes.
    runs: by method; their texts are forced to their budgets.
    repeats: turns.
    budgets: short and long.
    others: more to time in the same turns.

  Returns:
    The costs of `runs`, and the times of `others`.
  """
  timed: dict[Any, Callable[[], Any]] = {}
  num_rounds = {}
  for name, run in runs.items():
    for budget in budgets:
      timed[name, budget] = functools.partial(_to_budget, pair, run, budget)
      num_rounds[name, budget] = int(timed[name, budget]().step)
  others = others or {}
  times, _ = interleave({**timed, **others}, repeats)  # type: ignore[dict-item]
  short, long = budgets
  costs = {}
  for name in runs:
    few, many = num_rounds[name, short], num_rounds[name, long]
    pairs = zip(times[name, short].values, times[name, long].values, strict=True)
    round_ = tuple(max(b - a, 1e-9) / (many - few) for a, b in pairs)
    starts = zip(times[name, short].values, round_, strict=True)
    start = tuple(max(a - few * each, 0.0) for a, each in starts)
    costs[name] = Cost(Samples(start), Samples(round_))
  return costs, {name: times[name] for name in others}


def _to_budget(pair: Pair, run: common.Run, budget: int):
  batch = run.batches[0]
  budget_B = jnp.full(batch.inputs_BE.shape[0], budget, jnp.int32)
  sampling = batch.sampling._replace(
    min_new_tokens_B=budget_B, max_new_tokens_B=budget_B
  )
  return pair.decode(run.params, batch._replace(sampling=sampling), run.static)


def v_of(costs: Mapping[str, Cost]) -> float:
  """Verifying G + 1 tokens over a plain step: a round of prompt lookup costs no more."""
  return ratio(costs['ngram'].round, costs['none'].round).median


def c_of(costs: Mapping[str, Cost], method: str, gamma: int) -> float:
  """A draft step over a plain step: what a round has beyond verifying, over G."""
  turns = zip(
    *(costs[name].round.values for name in (method, 'ngram', 'none')), strict=True
  )
  return max(float(np.median([(a - b) / gamma / x for a, b, x in turns])), 0.0)


def alone(pair: Pair, run: common.Run, repeats: int) -> dict[str, float]:
  """c and v of steps timed alone, and what a round costs beyond (docs/metrics.md)."""
  batch, static = run.batches[0], run.static
  names = ('target', 'drafter', 'verifier', 'warp', 'max_len')
  arguments = (run.params, batch.inputs_BE, batch.sampling)
  options = {'repeats': repeats, **{name: static[name] for name in names}}
  with pair.precision():
    times = steps.measure_steps(*arguments, **options)
    overhead = steps.loop_overhead(*arguments, **options)
  return {
    'c_alone': round(times.c, 3),
    'v_alone': round(times.v, 2),
    'loop': round(overhead.loop.median, 2),
    'memory': round(overhead.memory.median, 2),
  }
