"""Ours, T5X and Hugging Face on the same weights: `python -m specjax.eval.bench`.

  python -m specjax.eval.bench --target t5_1_1_small --source_length 512
  python -m specjax.eval.bench --target embedded --output bench.json

One process, every system in turns (A B C A B C ...) after one call each that compiles,
greedy, float32, encoders included. Ratios are taken within a turn. Tokens are compared:
a system that decodes anything else has its first difference shown, and the exit code
is 1. Systems that can not run are listed with what they need.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import math
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
import rich.box
import rich.console
import rich.table

from specjax.checkpoints import store
from specjax.eval import cases, systems
from specjax.eval.cases import Case
from specjax.eval.interleave import Samples, interleave, ratio
from specjax.eval.systems import Absent, Maker, System

DIFFERENT = 1
USAGE_ERROR = 2
# (ours, theirs): like is compared with like.
COMPARISONS = (
  (systems.PLAIN, systems.T5X),
  (systems.PLAIN, systems.HF_GENERATE),
  ('draft_model token', systems.HF_ASSISTED),
  ('draft_model block', systems.HF_ASSISTED),
)
_PACKAGES = ('jax', 'jaxlib', 'flax', 'numpy', 'torch', 'transformers')


class Difference(NamedTuple):
  """The first place where a system's tokens are not the reference's."""

  row: int
  position: int
  expected: int
  found: int

  def __str__(self) -> str:
    return f'row {self.row}, token {self.position}: {self.found}, not {self.expected}'


@dataclasses.dataclass(frozen=True)
class Row:
  """One system's measurements.

  Attributes:
    name: of the system.
    seconds: of each warm run.
    first_seconds: of the first call, compilation included.
    num_tokens: emitted in each run, EOS counted.
    tokens_per_call: for each call of the target; None: not known.
    difference: from the reference's tokens; None: equal.
  """

  name: str
  seconds: Samples
  first_seconds: float
  num_tokens: int
  tokens_per_call: float | None
  difference: Difference | None

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
      'same_tokens': self.difference is None,
      'first_difference': self.difference and self.difference._asdict(),
      'first_call_seconds': self.first_seconds,
      'seconds': list(seconds.values),
    }


class Result(NamedTuple):
  """What `measure` found.

  Attributes:
    rows: of the systems that ran; the first is the reference of tokens.
    absent: why the others did not, by name.
  """

  rows: tuple[Row, ...]
  absent: dict[str, str]

  def comparisons(self) -> tuple['Comparison', ...]:
    """`COMPARISONS` whose two systems both ran."""
    rows = {row.name: row for row in self.rows}
    return tuple(
      compare(rows[mine], rows[theirs])
      for mine, theirs in COMPARISONS
      if mine in rows and theirs in rows
    )


class Comparison(NamedTuple):
  """Our system against another.

  Attributes:
    ours: name.
    theirs: name.
    speedup: their time / ours within each turn; above 1 ours is faster.
    per_call: their median time for each call of the target / ours: what the speedup
      would be if both got as many tokens from a call. None: calls are not known.
  """

  ours: str
  theirs: str
  speedup: Samples
  per_call: float | None


def compare(ours: Row, theirs: Row) -> Comparison:
  """The `Comparison` of two rows."""
  speedup = ratio(theirs.seconds, ours.seconds)
  per_call = None
  if ours.tokens_per_call is not None and theirs.tokens_per_call is not None:
    per_call = speedup.median * theirs.tokens_per_call / ours.tokens_per_call
  return Comparison(ours.name, theirs.name, speedup, per_call)


def measure(
  case: Case,
  makers: Mapping[str, Maker],
  turns: int,
  on_ready: Callable[[str], None] = lambda name: None,
) -> Result:
  """Runs systems in turns and compares their tokens.

  Args:
    case: what is decoded.
    makers: systems by name; the first that runs is the reference.
    turns: warm runs of each, >= 1.
    on_ready: called with the name of each system that was made.

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
      on_ready(name)
  if not ready:
    reasons = '; '.join(f'{name}: {reason}' for name, reason in absent.items())
    raise ValueError(f'systems: none can run ({reasons})')
  results: dict[str, Any] = {}

  def recorded(name: str) -> Callable[[], Any]:
    def run():
      results[name] = ready[name].run()
      return results[name]

    return run

  times, first = interleave({name: recorded(name) for name in ready}, turns)
  tokens = {
    name: _ended(ready[name].tokens(result), case) for name, result in results.items()
  }
  reference = next(iter(ready))
  rows = []
  for name, system in ready.items():
    tell = system.tokens_per_call
    rows.append(
      Row(
        name=name,
        seconds=times[name],
        first_seconds=first[name],
        num_tokens=_count(tokens[name], case),
        tokens_per_call=None if tell is None else tell(results[name]),
        difference=first_difference(tokens[reference], tokens[name]),
      )
    )
  return Result(tuple(rows), absent)


def _ended(tokens_BL: np.ndarray, case: Case) -> np.ndarray:
  """Of one width, and 0 after each row's EOS, whatever a system leaves there."""
  missing = case.new_tokens - tokens_BL.shape[1]
  tokens_BL = np.pad(tokens_BL, ((0, 0), (0, missing)))
  is_end_BL = tokens_BL == case.eos_id
  after_BL = np.cumsum(is_end_BL, axis=1) - is_end_BL > 0
  return np.where(after_BL, 0, tokens_BL)


def _count(tokens_BL: np.ndarray, case: Case) -> int:
  has_end_B = np.any(tokens_BL == case.eos_id, axis=1)
  end_B = np.argmax(tokens_BL == case.eos_id, axis=1) + 1
  return int(np.where(has_end_B, end_B, tokens_BL.shape[1]).sum())


def first_difference(expected_BL: np.ndarray, found_BL: np.ndarray):
  """The `Difference` of the lowest row and position, or None."""
  places = np.argwhere(expected_BL != found_BL)
  if not len(places):
    return None
  row, position = (int(each) for each in places[0])
  return Difference(
    row, position, int(expected_BL[row, position]), int(found_BL[row, position])
  )


def to_dict(result: Result, case: Case, settings: Mapping[str, Any]) -> dict[str, Any]:
  """All of a benchmark as JSON types."""
  return {
    'settings': dict(settings),
    'notes': list(case.notes),
    'environment': environment(),
    'systems': [row.to_dict() for row in result.rows],
    'not_run': result.absent,
    'comparisons': [
      {
        'ours': each.ours,
        'theirs': each.theirs,
        'speedup': each.speedup.median,
        'speedup_quartiles': [each.speedup.low, each.speedup.high],
        'speedup_per_call': each.per_call,
      }
      for each in result.comparisons()
    ],
  }


def environment() -> dict[str, Any]:
  """Versions and hardware."""
  versions = {}
  for package in _PACKAGES:
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue
  return {
    'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
    'device': jax.devices()[0].device_kind,
    'machine': platform.machine(),
    'cores': systems.num_cores(),
    'versions': versions,
  }


def print_result(result: Result, console: rich.console.Console) -> None:
  """The table, the comparisons, what differs and what did not run."""
  table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
  table.add_column('system', no_wrap=True)
  reference = result.rows[0]
  for header in (
    'ms/token',
    'tokens/s',
    f'x {reference.name}',
    'quartiles',
    'tok/call',
  ):
    table.add_column(header, justify='right')
  table.add_column('tokens')
  for row in result.rows:
    figures = row.to_dict()
    speed = ratio(reference.seconds, row.seconds)
    calls = row.tokens_per_call
    table.add_row(
      row.name,
      f'{figures["ms_per_token"]:.2f}',
      f'{figures["tokens_per_second"]:.0f}',
      f'{speed.median:.2f}',
      f'{speed.low:.2f}-{speed.high:.2f}',
      '' if calls is None else f'{calls:.2f}',
      'equal' if row.difference is None else 'DIFFERENT',
    )
  console.print(table)
  for each in result.comparisons():
    speedup = each.speedup
    verdict = 'faster' if speedup.median > 1 else 'SLOWER'
    line = (
      f'{each.ours} / {each.theirs}: {speedup.median:.2f}x as fast '
      f'({speedup.low:.2f}-{speedup.high:.2f}): ours is {verdict}'
    )
    if each.per_call is not None and not math.isclose(
      each.per_call, speedup.median, rel_tol=0.01
    ):
      line += f'; for each call of the target {each.per_call:.2f}x'
    console.print(line, highlight=False)
  for row in result.rows:
    if row.difference is not None:
      console.print(
        f'{row.name} is not {reference.name}: {row.difference}. Two ids whose logits '
        'nearly tie may change places between implementations; anything more is a '
        'fault.',
        highlight=False,
      )
  for name, reason in result.absent.items():
    console.print(f'not run: {name}: {reason}', highlight=False, markup=False)


class _Parser(argparse.ArgumentParser):
  def error(self, message: str) -> NoReturn:
    raise ValueError(f'{message}; see {self.prog} --help')


def _parser() -> argparse.ArgumentParser:
  parser = _Parser(
    prog='python -m specjax.eval.bench',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add(
    '--target',
    default='t5_1_1_small',
    help="'embedded', a published size (random weights), or a checkpoint of any format",
  )
  add(
    '--draft',
    help="as --target, or 'none'; default: the embedded pair's own, or of a size the "
    "target's first layers, in a controlled pair",
  )
  add('--source_length', type=int, default=64, help='encoder positions')
  add('--new_tokens', type=int, default=64, help='most tokens of an output')
  add('--batch_size', type=int, default=1)
  add('--gamma', type=int, default=4, help='tokens drafted a round')
  add('--turns', type=int, default=5, help='warm runs of each system')
  add('--seed', type=int, default=0, help='of random weights and sources')
  add(
    '--systems',
    help='some of them, between commas: ' + ', '.join(systems.SYSTEMS),
  )
  add('--output', help='JSON file')
  return parser


def choose(names: str | None) -> dict[str, Maker]:
  """The systems of a list between commas; None: all.

  Raises:
    ValueError: there is no such system.
  """
  if names is None:
    return systems.SYSTEMS
  chosen = [name.strip() for name in names.split(',')]
  for name in chosen:
    if name not in systems.SYSTEMS:
      raise ValueError(
        f'systems: {name!r} is unknown; choose from {", ".join(systems.SYSTEMS)}'
      )
  return {name: make for name, make in systems.SYSTEMS.items() if name in chosen}


def main(argv: Sequence[str] | None = None) -> int:
  """Measures and prints; returns the exit code."""
  console = rich.console.Console()
  try:
    options = _parser().parse_args(argv)
    makers = choose(options.systems)
    if options.turns < 1:
      raise ValueError(f'turns: {options.turns}; give 1 or more')
    output = options.output and Path(options.output).expanduser()
    if output and not output.parent.is_dir():
      raise ValueError(f'output: there is no folder {output.parent}; make it first')
    case = cases.make_case(
      options.target,
      draft=options.draft,
      source_length=options.source_length,
      new_tokens=options.new_tokens,
      batch_size=options.batch_size,
      num_draft=options.gamma,
      seed=options.seed,
    )
    for note in case.notes:
      console.print(note, highlight=False, markup=False)
    console.print(
      f'{options.batch_size} x {options.source_length} source ids, up to '
      f'{options.new_tokens} new tokens, gamma {options.gamma}, {options.turns} turns',
      highlight=False,
    )
    with console.status('loading') as status:
      result = measure(
        case, makers, options.turns, lambda name: status.update(f'{name} is ready')
      )
    print_result(result, console)
    if output:
      settings = {**vars(options), 'systems': list(makers)}
      del settings['output']
      data = json.dumps(to_dict(result, case, settings), indent=1) + '\n'
      store.write_atomically(output, data.encode())
  except ValueError as error:
    print('specjax:', ' '.join(str(error).split()), file=sys.stderr)
    return USAGE_ERROR
  is_same = all(row.difference is None for row in result.rows)
  return 0 if is_same else DIFFERENT


if __name__ == '__main__':
  sys.exit(main())
