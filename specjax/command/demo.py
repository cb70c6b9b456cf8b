"""The demonstration: sample texts, how they came about, and what it cost.

One text at a time, as in the paper. Each method is compiled once; everything
that is timed afterwards is warm, and methods take turns.
"""

import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.text import Text

from specjax.command.compare import Difference, differences
from specjax.command.costs import Costs, Program, measure
from specjax.command.results import LAWS, Writer, total
from specjax.command.samples import read_samples
from specjax.command.session import DIFFERENT, INTERRUPTED, trace_tokens
from specjax.config import RunConfig, SpeculationConfig
from specjax.core.types import DecodeState
from specjax.eval import diagnose, interleave, metrics, report, theory, trace
from specjax.generation import Batch, Generation, make_batches, read_rows
from specjax.pair import Pair

METHODS = ('draft_model', 'ngram')
TURNS = 5
COST_TURNS = 9
SHOWN_PER_TASK = 2
MAX_SOURCE_CHARS = 320


class Decoded(NamedTuple):
  """What one method made of all samples."""

  states: list[DecodeState]
  generations: list[Generation]
  first_seconds: float


class Demonstration:
  """Everything is checked by the constructor; `run` shows it.

  Raises:
    ValueError: bad input; nothing has been decoded or written.
  """

  def __init__(self, config: RunConfig, pair: Pair):
    if config.sampling.max_new_tokens == 1:
      raise ValueError('max_new_tokens: 1 leaves nothing to draft; give 2 or more')
    self.config, self.pair = config, pair
    self.samples = read_samples(pair)
    self.sources = pair.encode([each.source for each in self.samples], truncate=True)
    if config.speculation.is_auto:
      raise ValueError(
        "num_speculative_tokens: 'auto' without texts; give --prompt, --input or --task"
      )
    self.num_draft = config.speculation.max_draft
    methods = METHODS if pair.draft is not None else METHODS[1:]
    self.programs = {name: self._program(name) for name in (*methods, 'none')}
    self.batches = self._batches()
    self.console = report.make_console()
    self.status = Console(stderr=True)
    self.writer = Writer(config.io.output, config) if config.io.output else None

  def run(self) -> int:
    """Shows samples, table and verdict; returns the exit code."""
    try:
      return self._show()
    except KeyboardInterrupt:
      self.status.print('interrupted')
      return INTERRUPTED
    finally:
      if self.writer is not None:
        self.writer.close()

  def _program(self, method: str) -> Program:
    speculation = SpeculationConfig(
      method,  # type: ignore[arg-type]
      self.num_draft,
      self.config.speculation.rejection_sample_method,
      self.config.speculation.prompt_lookup_max,
      self.config.speculation.prompt_lookup_min,
      self.config.speculation.coupling,
    )
    sampling = self.config.sampling
    return Program(
      *self.pair.decoder(
        speculation,
        max_new_tokens=sampling.max_new_tokens,
        banned_ids=sampling.banned_ids,
      )
    )

  def _batches(self) -> list[Batch]:
    count = len(self.samples)
    longest = max(len(ids) for ids in self.sources)
    buckets = [bucket for bucket in self.pair.source_buckets if bucket >= longest]
    return list(
      make_batches(
        self.sources,
        [self.config.sampling] * count,
        [self.num_draft] * count,
        batch_size=1,
        buckets=buckets[:1] or self.pair.source_buckets,
        mesh=self.pair.mesh,
      )
    )

  def _show(self) -> int:
    self._print_head()
    decoded = {name: self._decode(name) for name in self.programs}
    plain = decoded.pop('none')
    found = {
      name: differences(self.pair, self.sources, each.generations, plain.generations)
      for name, each in decoded.items()
    }
    if self.config.io.trace:
      self._print_traces(decoded)
    compiling = {**decoded, 'plain decoding': plain}
    self._print(
      'First calls, compilation included: '
      + ', '.join(
        f'{name} {each.first_seconds:.1f} s' for name, each in compiling.items()
      )
      + '. From here on everything is warm.'
    )
    with self.status.status('timing'):
      costs = self._costs()
      times = {task: self._times(task) for task in self._tasks()}
      alphas = {name: self._alphas(name, each) for name, each in decoded.items()}
    rows = [
      self._result(task, name, decoded[name], found[name], costs, times, alphas)
      for task in self._tasks()
      for name in decoded
    ]
    self._print_table(rows, costs)
    self._print_identity(found, len(plain.generations))
    self._print_verdict(rows, decoded, costs, times, alphas)
    self._write(decoded, rows)
    every = [each for differing in found.values() for each in differing]
    wrong = self._is_greedy() and any(not each.is_rounding for each in every)
    return DIFFERENT if wrong else 0

  def _is_greedy(self) -> bool:
    return self.config.sampling.temperature == 0

  def _tasks(self) -> list[str]:
    return list(dict.fromkeys(sample.task for sample in self.samples))

  def _of_task(self, task: str, values: Iterable[Any]) -> list[Any]:
    pairs = zip(self.samples, values, strict=True)
    return [value for sample, value in pairs if sample.task == task]

  def _decode(self, method: str) -> Decoded:
    program = self.programs[method]
    began = time.perf_counter()
    with self.status.status(f'compiling {method}'):
      jax.block_until_ready(program.run(self.pair, self.batches[0]))
    first_seconds = time.perf_counter() - began
    by_index: dict[int, tuple[DecodeState, Generation]] = {}
    for batch in self.batches:
      state = program.run(self.pair, batch)
      (generation,) = read_rows(state, batch.indices, self.pair.vocabulary)
      by_index[generation.index] = (state, generation)
    ordered = [by_index[index] for index in range(len(self.samples))]
    return Decoded(
      [state for state, _ in ordered], [each for _, each in ordered], first_seconds
    )

  def _costs(self) -> Costs:
    most = self.config.sampling.max_new_tokens
    short = min(8, (most + 1) // 2)
    budgets = (short, max(min(most, 64), short + 1))
    return measure(
      self.pair, self.programs, self.batches[0], budgets=budgets, repeats=COST_TURNS
    )

  def _times(self, task: str) -> dict[str, interleave.Samples]:
    """Seconds of each method, plain decoding among them, for the task's samples."""
    indices = set(self._of_task(task, range(len(self.samples))))
    batches = [batch for batch in self.batches if batch.indices[0] in indices]

    def run(program: Program) -> list[Any]:
      return [program.run(self.pair, batch).length_B for batch in batches]

    runs = {name: functools.partial(run, each) for name, each in self.programs.items()}

    times, _ = interleave.interleave(runs, TURNS)
    return times

  def _alphas(self, method: str, decoded: Decoded) -> list[metrics.Alpha | None]:
    """Per sample, from both models' laws; None for drafts that have no model."""
    if method != 'draft_model':
      return [None] * len(self.samples)
    assert self.pair.draft is not None
    by_index = {batch.indices[0]: batch for batch in self.batches}
    alphas: list[metrics.Alpha | None] = []
    for index, state in enumerate(decoded.states):
      batch = by_index[index]
      with self.pair.precision():
        alphas.append(
          metrics.alpha(
            self.pair.params,
            batch.inputs_BE,
            state.tokens_BS,
            state.length_B,
            batch.sampling,
            target=self.pair.target,
            draft=self.pair.draft,
            warp=self.programs[method].static['warp'],
          )
        )
    return alphas

  def _result(
    self,
    task: str,
    method: str,
    decoded: Decoded,
    found: Sequence[Difference],
    costs: Costs,
    times: dict[str, dict[str, interleave.Samples]],
    alphas: dict[str, list[metrics.Alpha | None]],
  ) -> report.Result:
    generations = self._of_task(task, decoded.generations)
    summary = total(generations)
    alpha = _mean_alpha(self._of_task(task, alphas[method]), summary)
    differing = {each.index for each in found}
    measured = speedup([times[task]], method)
    return report.Result(
      task=task,
      method=method,
      gamma=self.num_draft,
      acceptance_rate=summary.acceptance_rate,
      alpha=alpha,
      tokens_per_call=summary.block_efficiency,
      c=costs.c(method),
      v=costs.v,
      predicted=theory.speedup_of(
        summary.block_efficiency, self.num_draft, costs.c(method), costs.v
      ),
      measured=measured.median,
      low=measured.low,
      high=measured.high,
      identical=not differing & {each.index for each in generations}
      if self._is_greedy()
      else None,
    )

  def _print(self, line: str) -> None:
    self.console.print(Text(line))

  def _print_head(self) -> None:
    pair, sampling = self.pair, self.config.sampling
    law = 'greedy' if self._is_greedy() else f'temperature {sampling.temperature:g}'
    self._print(
      f'{pair.name} pair: target {_millions(pair.params.target)}, draft '
      f'{_millions(pair.params.draft)} parameters; {pair.target_config.dtype} on '
      f'{jax.devices()[0].device_kind}; {law}, gamma {self.num_draft}, batch 1'
    )

  def _print_traces(self, decoded: dict[str, Decoded]) -> None:
    colour = trace.uses_colour(self.console)
    self.console.print(trace.legend(colour=colour))
    indices = range(len(self.samples))
    shown = [
      i for task in self._tasks() for i in self._of_task(task, indices)[:SHOWN_PER_TASK]
    ]
    for index in shown:
      sample = self.samples[index]
      every = {name: each.generations[index] for name, each in decoded.items()}
      best = max(every, key=lambda name: every[name].block_efficiency)
      source = ' '.join(sample.source.split())
      if len(source) > MAX_SOURCE_CHARS:
        source = source[:MAX_SOURCE_CHARS] + ' ...'
      self.console.print()
      self.console.print(Text(source, style='dim' if colour else ''))
      self._print(f'drafted by {best}:')
      tokens = trace_tokens(every[best], self.pair.vocabulary)
      trace.print_trace(tokens, self.console)
    self.console.print()

  def _print_table(self, rows: Sequence[report.Result], costs: Costs) -> None:
    self.console.print()
    report.print_results(rows, self.console)
    self._print(
      'c: draft step / target step; v: verifying '
      f'{self.num_draft + 1} tokens / target step ({1e3 * costs.plain.median:.2f} ms); '
      'predicted: tokens per call / (v + gamma c); measured: against our own plain '
      f'decoding, median of {TURNS} turns'
    )

  def _print_identity(self, found: dict[str, list[Difference]], count: int) -> None:
    if not self._is_greedy():
      self._print('outputs are samples of the same law: nothing to compare one by one')
      return
    for name, differing in found.items():
      answer = 'no' if differing else 'yes'
      equal = f'{count - len(differing)}/{count}'
      law = LAWS[self.config.pair.target_weights]
      self._print(f'{name}: output identical to {law}: {answer} {equal}')
      for difference in differing:
        self._print(difference.describe(self.pair))

  def _print_verdict(
    self,
    rows: Sequence[report.Result],
    decoded: dict[str, Decoded],
    costs: Costs,
    times: dict[str, dict[str, interleave.Samples]],
    alphas: dict[str, list[metrics.Alpha | None]],
  ) -> None:
    for name, each in decoded.items():
      summary = total(each.generations)
      self._print(f'\n{name}, all tasks together')
      self._print(
        diagnose.explain(
          _mean_alpha(alphas[name], summary),
          costs.c(name),
          costs.v,
          self.num_draft,
          speedup(times.values(), name).median,
          tokens=summary.block_efficiency_at,
        )
      )
    best = {
      task: max(
        (row for row in rows if row.task == task), key=lambda row: row.measured or 0.0
      )
      for task in self._tasks()
    }
    self.console.print()
    self._print(
      'Best here: '
      + '; '.join(
        f'{task} by {row.method if (row.measured or 0) > 1 else "plain decoding"} '
        f'({max(row.measured or 0, 1):.2f}x)'
        for task, row in best.items()
      )
    )

  def _write(self, decoded: dict[str, Decoded], rows: Sequence[report.Result]) -> None:
    if self.writer is None:
      return
    texts = [sample.source for sample in self.samples]
    for name, each in decoded.items():
      self.writer.texts(texts, each.generations, method=name)
    self.writer.summary(results=[row._asdict() for row in rows])


def speedup(
  times: Iterable[Mapping[str, interleave.Samples]], method: str
) -> interleave.Samples:
  """Plain time / the method's, over the texts of all the tasks given.

  Args:
    times: of each task, by method.
    method: a name in `times`, as is 'none', plain decoding.

  Example:
    >>> long, short = ({'none': 8.0, 'ngram': 16.0}, {'none': 2.0, 'ngram': 1.0})
    >>> times = [{k: interleave.Samples((v,)) for k, v in each.items()}
    ...          for each in (long, short)]
    >>> round(speedup(times, 'ngram').median, 3)  # 10 / 17, not the mean of 0.5 and 2
    0.588
  """
  times = list(times)
  plain, ours = (
    interleave.added(*(each[name] for each in times)) for name in ('none', method)
  )
  return interleave.ratio(plain, ours)


def _mean_alpha(
  alphas: Iterable[metrics.Alpha | None], summary: metrics.Summary
) -> float:
  known = [each for each in alphas if each is not None]
  if not known:
    return summary.alpha_estimate
  count = sum(int(each.count_B.sum()) for each in known)
  return sum(float(each.sum_B.sum()) for each in known) / max(count, 1)


def _millions(params: Any) -> str:
  return f'{sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6:.2f}M'
