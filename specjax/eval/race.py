"""Systems decode a case in turns: their times, their tokens, and where those differ."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core.types import Model
from specjax.eval import systems
from specjax.eval.cases import Case
from specjax.eval.interleave import Clock, Samples, interleave, ratio
from specjax.eval.systems import Absent, Maker, System
from specjax.models.t5 import t5_model

# (ours, theirs): like is compared with like.
COMPARISONS = (
  (systems.PLAIN, systems.T5X),
  (systems.PLAIN, systems.HF_GENERATE),
  ('draft_model token', systems.HF_ASSISTED),
  ('draft_model block', systems.HF_ASSISTED),
)
# Two logits nearer than this, as a share of their range, are a tie that rounding
# decides: some hundred roundings of the dtype.
TIE = {'float32': 1e-5, 'bfloat16': 0.03}


class Difference(NamedTuple):
  """The first place of a row where a system's tokens are not the reference's.

  Attributes:
    row: among all rows.
    position: of the token in it.
    expected: the reference's id.
    found: the system's.
    gap: between the two ids' logits, as a share of the range of all logits; the
      target's, in float32 whatever the case's dtype. NaN: not computed.
    is_tie: the gap is below `TIE`.
  """

  row: int
  position: int
  expected: int
  found: int
  gap: float = np.nan
  is_tie: bool = False

  def __str__(self) -> str:
    verdict = 'a near-tie, which rounding decides' if self.is_tie else 'NOT a tie'
    return (
      f'row {self.row}, token {self.position}: {self.found}, not {self.expected}; '
      f'their logits are {self.gap:.1e} of the range apart: {verdict}'
    )


@dataclasses.dataclass(frozen=True)
class Row:
  """One system's measurements.

  Attributes:
    name: of the system.
    seconds: of each warm run.
    first_seconds: of the first call, compilation included.
    num_tokens: emitted in each run, EOS counted.
    tokens_per_call: for each call of the target and row; None: not known.
    differences: from the reference's tokens, one for each row that differs.
  """

  name: str
  seconds: Samples
  first_seconds: float
  num_tokens: int
  tokens_per_call: float | None
  differences: tuple[Difference, ...] = ()

  @property
  def is_fault(self) -> bool:
    """Whether some difference is no near-tie."""
    return not all(each.is_tie for each in self.differences)

  def to_dict(self) -> dict[str, Any]:
    """JSON types, milliseconds per token and tokens per second included."""
    seconds = self.seconds
    per_token = 1e3 / self.num_tokens
    return {
      'name': self.name,
      'ms_per_token': per_token * seconds.median,
      'ms_per_token_quartiles': [per_token * seconds.low, per_token * seconds.high],
      'tokens_per_second': self.num_tokens / seconds.median,
      'num_tokens': self.num_tokens,
      'tokens_per_call': self.tokens_per_call,
      'different_rows': len(self.differences),
      'near_ties': sum(each.is_tie for each in self.differences),
      'differences': [each._asdict() for each in self.differences],
      'first_call_seconds': self.first_seconds,
      'seconds': list(seconds.values),
    }


class Comparison(NamedTuple):
  """Our system against another.

  Attributes:
    ours: name.
    theirs: name.
    speedup: tokens per second, ours / theirs within each turn; above 1 ours is
      faster.
    per_call: the same with target calls for tokens: what the speedup would be if
      both got as many tokens from a call. None: calls are not known.
  """

  ours: str
  theirs: str
  speedup: Samples
  per_call: float | None


class Result(NamedTuple):
  """What `race` found.

  Attributes:
    rows: of the systems that ran; the first is the reference of tokens.
    absent: why the others did not, by name.
  """

  rows: tuple[Row, ...]
  absent: dict[str, str]

  def comparisons(self) -> tuple[Comparison, ...]:
    """`COMPARISONS` whose two systems both ran."""
    rows = {row.name: row for row in self.rows}
    return tuple(
      compare(rows[mine], rows[theirs])
      for mine, theirs in COMPARISONS
      if mine in rows and theirs in rows
    )


def speedup(ours: Row, theirs: Row) -> Samples:
  """Tokens per second, ours / theirs within each turn."""
  tokens = ours.num_tokens / theirs.num_tokens
  times = ratio(theirs.seconds, ours.seconds)
  return Samples(tuple(tokens * each for each in times.values))


def compare(ours: Row, theirs: Row) -> Comparison:
  """The `Comparison` of two rows."""
  found = speedup(ours, theirs)
  per_call = None
  if ours.tokens_per_call is not None and theirs.tokens_per_call is not None:
    per_call = found.median * theirs.tokens_per_call / ours.tokens_per_call
  return Comparison(ours.name, theirs.name, found, per_call)


def race(
  case: Case,
  makers: Mapping[str, Maker],
  turns: int,
  on_run: Callable[[str, int], None] = lambda name, runs: None,
  clock: Clock = time.perf_counter,
) -> Result:
  """Runs systems in turns and compares their tokens.

  Args:
    case: what is decoded.
    makers: systems by name; the first that runs is the reference.
    turns: warm runs of each, >= 1, after one that compiles.
    on_run: called before each run, with the system's name and the number of runs
      that all systems together will make.
    clock: returns seconds.

  Raises:
    ValueError: no system runs, or turns < 1.
  """
  ready: dict[str, System] = {}
  absent = {}
  for name, make in makers.items():
    made = make(case)
    if isinstance(made, Absent):
      absent[name] = made.reason
    else:
      ready[name] = made
  if not ready:
    reasons = '; '.join(f'{name}: {reason}' for name, reason in absent.items())
    raise ValueError(f'systems: none can run ({reasons})')
  results: dict[str, list[Any]] = {}

  def recorded(name: str) -> Callable[[], Any]:
    def run() -> None:
      # Batch after batch: nobody may overlap what others can not.
      results[name] = [
        jax.block_until_ready(ready[name].decode(inputs)) for inputs in case.batches
      ]

    return run

  def announce(name: str) -> None:
    on_run(name, len(ready) * (turns + 1))

  runs = {name: recorded(name) for name in ready}
  times, first = interleave(runs, turns, clock, announce)
  tokens = {
    name: np.concatenate([_ended(ready[name].tokens(each), case) for each in found])
    for name, found in results.items()
  }
  expected_NL = next(iter(tokens.values()))
  rows = []
  for name, system in ready.items():
    num_tokens = _count(tokens[name], case)
    calls = None
    if system.calls is not None:
      calls = sum(system.calls(each) for each in results[name])
    rows.append(
      Row(
        name=name,
        seconds=times[name],
        first_seconds=first[name],
        num_tokens=num_tokens,
        tokens_per_call=calls and num_tokens / calls,
        differences=explained(
          case, expected_NL, find_differences(expected_NL, tokens[name])
        ),
      )
    )
  return Result(tuple(rows), absent)


def _ended(tokens_BL: np.ndarray, case: Case) -> np.ndarray:
  """Of one width, and 0 after each row's EOS, whatever a system leaves there."""
  missing = case.max_new_tokens - tokens_BL.shape[1]
  tokens_BL = np.pad(tokens_BL, ((0, 0), (0, missing)))
  is_end_BL = tokens_BL == case.eos_id
  after_BL = np.cumsum(is_end_BL, axis=1) - is_end_BL > 0
  return np.where(after_BL, 0, tokens_BL)


def _count(tokens_NL: np.ndarray, case: Case) -> int:
  has_end_N = np.any(tokens_NL == case.eos_id, axis=1)
  end_N = np.argmax(tokens_NL == case.eos_id, axis=1) + 1
  return int(np.where(has_end_N, end_N, tokens_NL.shape[1]).sum())


def find_differences(
  expected_NL: np.ndarray, found_NL: np.ndarray
) -> tuple[Difference, ...]:
  """The first `Difference` of each row that has one."""
  found = []
  for row in np.flatnonzero(np.any(expected_NL != found_NL, axis=1)):
    position = int(np.argmax(expected_NL[row] != found_NL[row]))
    expected, id_ = (int(each[row, position]) for each in (expected_NL, found_NL))
    found.append(Difference(int(row), position, expected, id_))
  return tuple(found)


def explained(
  case: Case, expected_NL: np.ndarray, differences: tuple[Difference, ...]
) -> tuple[Difference, ...]:
  """Fills in gaps, from the target's float32 logits after the reference's tokens."""
  if not differences:
    return ()
  config = dataclasses.replace(case.target.config, dtype='float32')
  params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), case.params.target)
  inputs_NE = np.concatenate(case.batches)
  found = []
  for each in differences:
    tokens_1T = np.zeros((1, case.max_new_tokens), np.int32)
    tokens_1T[0, 1:] = expected_NL[each.row, :-1]
    with jax.default_matmul_precision('highest'):
      logits_TV = _logits(
        params, inputs_NE[each.row, None], tokens_1T, model=t5_model(config)
      )
    logits_V = np.asarray(logits_TV[each.position])
    width = max(np.ptp(logits_V), np.finfo(np.float32).tiny)
    gap = abs(logits_V[each.expected] - logits_V[each.found]) / width
    is_tie = bool(gap < TIE[case.dtype])
    found.append(each._replace(gap=float(gap), is_tie=is_tie))
  return tuple(found)


@functools.partial(jax.jit, static_argnames='model')
def _logits(params, inputs_1E, tokens_1T, *, model: Model) -> jax.Array:
  cache = model.init(params, inputs_1E, num_slots=tokens_1T.shape[1])
  output, _ = model.extend(params, cache, tokens_1T, jnp.zeros(1, jnp.int32))
  return output.logits_BTV[0]
