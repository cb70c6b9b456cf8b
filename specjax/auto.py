"""Decoding that chooses gamma itself: the host's side of `eval.tuning`.

Costs are measured once for a pair, a method and a number of rows, in rounds that are
thrown away: of the very programs that decode, on the first batch's sources, with keys
that no text uses and nothing proposed, so that each takes the same number of rounds and
no text's coins can show in a time. Acceptance is counted in the texts' own rounds. The
counts of greedy decoding, which has no coins, serve the next call too.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.config import SpeculationConfig
from specjax.core import rounds
from specjax.core.types import DecodeState, Params
from specjax.eval import tuning
from specjax.eval.tuning import Choice, Costs
from specjax.generation import Batch, Chunk, Generation, read_rows, read_stream

OnChoice = Callable[[Choice], None]

TIMED_ROUNDS = 32
MIN_TURNS, MAX_TURNS, MAX_SECONDS = 5, 15, 2.0
# Costs of another number of rows serve until so many batches have had this one.
BATCHES_TO_MEASURE = 4
_ENDLESS = 2**30


class Memory(NamedTuple):
  """What a pair keeps between calls.

  Attributes:
    costs: of rounds, by all they depend on.
    seen: what greedy texts have shown. Counts of sampled texts are not kept: an
      equal seed would meet its own coins again (`eval.tuning`).
  """

  costs: dict[Any, Costs]
  seen: dict[Any, tuning.State]


class Segment(NamedTuple):
  """Finished rounds of a batch.

  Attributes:
    state: after them; the next segment takes it over.
    gammas: (first round, gamma) of the batch so far, rounds counted from 1.
  """

  state: DecodeState
  gammas: tuple[tuple[int, int], ...]


class AutoDecoder:
  """Decodes the batches of one call, and remembers what they showed.

  Args:
    pair: a `Pair`, whose `decoder` gives the programs and whose `memory` is used.
    speculation: with `num_speculative_tokens` 'auto'.
    max_new_tokens: largest budget of all batches.
    banned_ids: as for `Pair.decoder`.
    on_choice: called with each choice.
    clock: returns seconds; replace it in tests.
  """

  def __init__(
    self,
    pair: Any,
    speculation: SpeculationConfig,
    *,
    max_new_tokens: int,
    banned_ids: tuple[int, ...] = (),
    on_choice: OnChoice | None = None,
    clock: Callable[[], float] = time.perf_counter,
  ):
    if pair.mesh is not None:
      raise ValueError(
        f"num_speculative_tokens: 'auto' runs on one device, not on a mesh of "
        f'{pair.mesh.size}; give an integer'
      )
    self._pair, self._speculation = pair, speculation
    self._options = {'max_new_tokens': max_new_tokens, 'banned_ids': banned_ids}
    self._on_choice, self._clock = on_choice, clock
    self.max_gamma = min(speculation.max_speculative_tokens, max_new_tokens - 1)
    self._programs = {
      gamma: self._program(gamma) for gamma in tuning.ladder(self.max_gamma)
    }
    self._state = tuning.initial(self.max_gamma)
    self._seen_key: Any = None
    self._is_greedy = True  # of all batches so far
    self._batches: dict[Any, int] = {}

  def read(self, batch: Batch) -> list[Generation]:
    """The results of a batch."""
    for segment in self.segments(batch):
      last = segment
    results = read_rows(last.state, batch.indices, self._pair.vocabulary)
    return [self._result(each, last.gammas) for each in results]

  def stream(self, batch: Batch) -> Iterator[Chunk]:
    """A batch of one text, round by round."""
    gammas: list[tuple[tuple[int, int], ...]] = []

    def states() -> Iterator[DecodeState]:
      for segment in self.segments(batch, most=1):
        gammas.append(segment.gammas)
        yield segment.state

    (index,) = batch.indices
    for chunk in read_stream(states(), index, self._pair.vocabulary):
      if chunk.generation is not None:
        generation = self._result(chunk.generation, gammas[-1])
        chunk = dataclasses.replace(chunk, generation=generation)
      yield chunk

  def _result(
    self, generation: Generation, gammas: tuple[tuple[int, int], ...]
  ) -> Generation:
    """With its own gammas, and counts of as many positions as any other's."""

    def padded(count_G: tuple[int, ...]) -> tuple[int, ...]:
      return count_G + (0,) * (self.max_gamma - len(count_G))

    calls = generation.num_target_calls
    return dataclasses.replace(
      generation,
      gammas=tuple((first, gamma) for first, gamma in gammas if first <= calls),
      drafted_per_position=padded(generation.drafted_per_position),
      accepted_per_position=padded(generation.accepted_per_position),
    )

  def segments(self, batch: Batch, most: int = _ENDLESS) -> Iterator[Segment]:
    """Runs a batch to its end, `most` rounds at a time or fewer."""
    cost_key = self._cost_key(batch)
    self._batches[cost_key] = self._batches.get(cost_key, 0) + 1
    if not (np.asarray(batch.sampling.max_new_tokens_B) > 0).any():
      yield Segment(self._begin(0, batch), ())
      return
    self._recall(batch)
    choice = self._choose(batch, is_start=True)
    state: DecodeState | None = None
    gammas: list[tuple[int, int]] = []
    before = _Counts(0, 0, 0, 0, is_done=False)
    while True:
      gamma = choice.gamma
      if not gammas or gammas[-1][1] != gamma:
        gammas.append((before.step + 1, gamma))
      left = choice.num_rounds or _ENDLESS
      while left > 0 and not before.is_done:
        state = self._run(gamma, state, batch, min(left, most))
        after = _Counts.of(state)
        num_rounds = after.step - before.step
        self._state = tuning.observe(
          self._state,
          gamma,
          num_rounds,
          after.row_rounds - before.row_rounds,
          np.asarray(after.accepted_G - before.accepted_G).tolist(),
        )
        left, before = left - num_rounds, after
        if after.is_done:
          self._state = tuning.finish(self._state, after.longest)
        yield Segment(state, tuple(gammas))
      if before.is_done:
        if self._is_greedy:
          self._pair.memory.seen[self._seen_key] = self._state
        return
      choice = self._choose(batch, is_start=False)

  def _recall(self, batch: Batch) -> None:
    """Goes on from earlier calls, unless texts are sampled."""
    self._is_greedy &= is_greedy(batch)
    if self._seen_key is None:
      self._seen_key = (*self._rules(), self.max_gamma, batch.inputs_BE.shape[0])
      if self._is_greedy:
        self._state = self._pair.memory.seen.get(self._seen_key, self._state)

  def _choose(self, batch: Batch, *, is_start: bool) -> Choice:
    if self.max_gamma == 0:
      return Choice(0, None, 0, tuning.PRIOR, 1.0, Costs(((0, 1.0),)))
    costs = self._costs(batch, tuning.first_measured(self.max_gamma))
    choice = tuning.choose(self._state, costs, is_start=is_start)
    while self._measures(batch) and not costs.is_measured(choice.gamma):
      costs = self._costs(batch, (choice.gamma,))
      choice = tuning.choose(self._state, costs, is_start=is_start)
    if self._on_choice is not None:
      self._on_choice(choice)
    return choice

  def _program(self, gamma: int) -> tuple[Params, dict[str, Any]]:
    changed: dict[str, Any] = {'num_speculative_tokens': gamma}
    if gamma == 0:
      changed = {'method': 'none', 'num_speculative_tokens': 1}
    speculation = dataclasses.replace(self._speculation, **changed)
    return self._pair.decoder(speculation, **self._options)

  def _begin(self, gamma: int, batch: Batch) -> DecodeState:
    """Before the first round."""
    params, static = self._programs[gamma and self.max_gamma]
    with self._pair.precision():
      return rounds.begin(
        params,
        batch.inputs_BE,
        batch.sampling,
        target=static['target'],
        drafter=static['drafter']._replace(num_draft=self.max_gamma),
        max_len=static['max_len'],
      )

  def _run(self, gamma: int, state: DecodeState | None, batch: Batch, most: int):
    """At most so many rounds, from the first one if there is no state. A batch that
    begins plainly is plain to its end: it needs neither drafter nor room for drafts."""
    params, static = self._programs[gamma]
    rows = (batch.row_key_B, batch.sampling, np.int32(most))
    with self._pair.precision():
      if state is None:
        return rounds.begin_and_run(
          params,
          batch.inputs_BE,
          *rows,
          max_draft=gamma and self.max_gamma,
          **static,
        )
      if gamma == 0:
        state = state._replace(draft_state=())  # `no_draft`'s
      return rounds.run(params, state, *rows, **static)

  def _rules(self) -> tuple:
    _, static = self._programs[self.max_gamma]
    return self._speculation, static['warp']

  def _cost_key(self, batch: Batch) -> tuple:
    _, static = self._programs[self.max_gamma]
    num_rows = batch.inputs_BE.shape[0]
    return (*self._rules(), static['max_len'], is_greedy(batch), num_rows)

  def _measures(self, batch: Batch) -> bool:
    """Whether this number of rows is measured, or else borrows."""
    key, known = self._cost_key(batch), self._pair.memory.costs
    borrows = any(key[:-1] == other[:-1] for other in known)
    return key in known or not borrows or self._batches[key] >= BATCHES_TO_MEASURE

  def _costs(self, batch: Batch, gammas: tuple[int, ...]) -> Costs:
    key, known = self._cost_key(batch), self._pair.memory.costs
    if not self._measures(batch):
      near = [other for other in known if other[:-1] == key[:-1]]
      return known[min(near, key=lambda other: abs(np.log(other[-1] / key[-1])))]
    costs = known.get(key, Costs(((0, 1.0),)))
    missing = [gamma for gamma in gammas if not costs.is_measured(gamma)]
    if missing:
      known[key] = costs.joined(self._measure(batch, missing))
    return known[key]

  def _measure(self, batch: Batch, gammas: list[int]) -> list[tuple[int, float]]:
    """Times of rounds over those of plain ones, in turns; (gamma, median)."""
    _, static = self._programs[self.max_gamma]
    num_new = jnp.full(batch.inputs_BE.shape[0], static['max_len'] - 1, jnp.int32)
    batch = batch._replace(
      # Lengths start at 1, so this stream is no round's.
      row_key_B=jax.vmap(jax.random.fold_in, (0, None))(batch.row_key_B, 0),
      sampling=batch.sampling._replace(
        num_draft_B=jnp.zeros_like(num_new),  # a token a round, at a full round's cost
        min_new_tokens_B=num_new,
        max_new_tokens_B=num_new,
      ),
    )
    num_rounds = min(TIMED_ROUNDS, int(num_new[0]))

    def seconds(gamma: int) -> float:
      state = jax.block_until_ready(self._begin(gamma, batch))
      began = self._clock()
      jax.block_until_ready(self._run(gamma, state, batch, num_rounds))
      return self._clock() - began

    for gamma in (0, *gammas):
      seconds(gamma)  # compiles
    began = self._clock()
    ratios: dict[int, list[float]] = {gamma: [] for gamma in gammas}
    for turn in range(MAX_TURNS):
      if turn >= MIN_TURNS and self._clock() - began > MAX_SECONDS:
        break
      plain = seconds(0)
      for gamma in gammas:
        ratios[gamma].append(seconds(gamma) / plain)
    return [(gamma, statistics.median(each)) for gamma, each in ratios.items()]


def is_greedy(batch: Batch) -> bool:
  """Whether no row is sampled."""
  return not np.asarray(batch.sampling.temperature_B).any()


class _Counts(NamedTuple):
  step: int
  row_rounds: int
  accepted_G: np.ndarray | int
  longest: int
  is_done: bool

  @classmethod
  def of(cls, state: DecodeState) -> '_Counts':
    trace = state.trace
    step, rounds_B, accepted_BG, length_B, done_B = jax.device_get(
      (state.step, trace.rounds_B, trace.accepted_BG, state.length_B, state.done_B)
    )
    return cls(
      step=int(step),
      row_rounds=int(rounds_B.sum()),
      accepted_G=accepted_BG.sum(axis=0),
      longest=int(length_B.max()) - 1,
      is_done=bool(done_B.all()),
    )
