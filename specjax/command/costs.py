"""What rounds cost, measured in the very programs that decode.

Every round of every drafter runs the target over G + 1 tokens, so a drafter
without a model shows what verifying costs, and the model's steps are the rest:

  target step   round of plain decoding
  v             round of prompt lookup / target step
  c             (round with a draft model - round of prompt lookup) / G / target step

Budgets are arrays: long and short outputs run in one program, and what they
share (the encoders, the call) drops out of their difference. Nothing compiles
that decoding has not compiled; `eval.steps` times the parts alone instead.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax.eval import interleave
from specjax.generation import Batch
from specjax.pair import Pair


class Program(NamedTuple):
  """A method ready to decode: `loop.decode`'s parameters and static arguments."""

  params: Any
  static: dict[str, Any]

  def run(self, pair: Pair, batch: Batch):
    return pair.decode(self.params, batch, self.static)


class Costs(NamedTuple):
  """Seconds a round, by method.

  Attributes:
    num_draft: G.
    plain: a plain step.
    rounds: a round of each method that drafts; 'ngram' is among them.
  """

  num_draft: int
  plain: interleave.Samples
  rounds: dict[str, interleave.Samples]

  @property
  def v(self) -> float:
    """Time of verifying G + 1 tokens over that of a plain step."""
    return interleave.ratio(self.rounds['ngram'], self.plain).median

  def c(self, method: str) -> float:
    """Time of one draft step over that of a plain step; 0 for prompt lookup."""
    whole = interleave.ratio(self.rounds[method], self.plain).median
    return max(whole - self.v, 0.0) / self.num_draft


def measure(
  pair: Pair,
  programs: dict[str, Program],
  batch: Batch,
  *,
  budgets: Sequence[int],
  repeats: int,
) -> Costs:
  """Times rounds in turns, method after method.

  Args:
    pair: the pair.
    programs: by method; 'none' and 'ngram' are needed.
    batch: what is decoded; its texts run to their budget, whatever ends they have.
    budgets: numbers of new tokens of the short and the long runs.
    repeats: turns.
  """
  num_rows = batch.inputs_BE.shape[0]

  def with_budget(budget: int) -> Batch:
    budget_B = jnp.full(num_rows, budget, jnp.int32)
    sampling = batch.sampling._replace(
      min_new_tokens_B=budget_B, max_new_tokens_B=budget_B
    )
    return batch._replace(sampling=sampling)

  short, long = (with_budget(budget) for budget in budgets)
  runs, num_rounds = {}, {}
  for name, program in programs.items():
    runs[f'{name} short'] = functools.partial(program.run, pair, short)
    runs[f'{name} long'] = functools.partial(program.run, pair, long)
    num_rounds[name] = int(runs[f'{name} long']().step - runs[f'{name} short']().step)
  times, _ = interleave.interleave(runs, repeats)

  def per_round(name: str) -> interleave.Samples:
    longer = times[f'{name} long'].values
    shorter = times[f'{name} short'].values
    seconds = (max(a - b, 1e-9) for a, b in zip(longer, shorter, strict=True))
    return interleave.Samples(tuple(each / num_rounds[name] for each in seconds))

  (num_draft,) = {
    program.static['drafter'].num_draft
    for name, program in programs.items()
    if name != 'none'
  }
  rounds = {name: per_round(name) for name in programs if name != 'none'}
  return Costs(num_draft, per_round('none'), rounds)
