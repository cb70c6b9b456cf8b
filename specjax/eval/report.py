"""Tables of results for a terminal, and plain ones for a file or a pipe."""

import sys
from collections.abc import Sequence
from typing import IO, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specjax.eval.trace import uses_colour


class Result(NamedTuple):
  """One line of the results: a task decoded by a method. None is shown as '-'.

  Attributes:
    task: name of the data.
    method: name of the drafter.
    gamma: drafted tokens per target call.
    acceptance_rate: `metrics.Summary.acceptance_rate`.
    alpha: `metrics.alpha`, or an estimate.
    tokens_per_call: `metrics.Summary.block_efficiency`.
    c: `interleave.StepTimes.c`.
    v: `interleave.StepTimes.v`.
    predicted: predicted speedup.
    measured: median of `interleave.Speedup.ratios`.
    low: their lower quartile.
    high: their upper quartile.
    identical: the output equals plain decoding's; None where both are samples.
  """

  task: str
  method: str
  gamma: int | None = None
  acceptance_rate: float | None = None
  alpha: float | None = None
  tokens_per_call: float | None = None
  c: float | None = None
  v: float | None = None
  predicted: float | None = None
  measured: float | None = None
  low: float | None = None
  high: float | None = None
  identical: bool | None = None


class _Column(NamedTuple):
  name: str  # in files
  heading: str  # on a terminal, where 80 columns must do


_COLUMNS = (
  _Column('task', 'task'),
  _Column('method', 'method'),
  _Column('gamma', 'gam-\nma'),
  _Column('accept_rate', 'acc.\nrate'),
  _Column('alpha', 'alpha'),
  _Column('tokens/call', 'tok./\ncall'),
  _Column('c', 'c'),
  _Column('v', 'v'),
  _Column('predicted', 'pre-\ndict.'),
  _Column('measured', 'measured\nspeedup'),
  _Column('same_text', 'same\ntext'),
)
_NUM_TEXT_COLUMNS = 2
_MEASURED, _SAME = 9, 10
_GOOD, _BAD = 'bold #2a9d4a', 'bold #e8590c'

COLUMN_NOTES = (
  ('acc. rate', 'share of the drafted tokens that was accepted'),
  ('alpha', 'chance that a draft is accepted: mean of sum min(p, q)'),
  ('tok./call', 'tokens emitted per call of the target'),
  ('c', 'time of a draft step / of a target step'),
  ('v', 'time of verifying gamma + 1 tokens / of a target step'),
  ('predict.', '(1 - alpha^(gamma+1)) / (1 - alpha) / (v + gamma c)'),
  ('measured', 'time of plain / of speculative decoding, ± half the quartiles apart'),
  ('same text', 'speculative output equals plain output'),
)


def make_console(
  colour: bool | None = None, file: IO[str] | None = None, width: int | None = None
) -> Console:
  """A console whose colours follow the terminal and NO_COLOR.

  Args:
    colour: False to switch colours off, True to force them, None to decide by
      the terminal and the environment.
    file: where to write; None for stdout.
    width: in columns; None for the terminal's.
  """
  return Console(
    file=file or sys.stdout,
    width=width,
    no_color=True if colour is False else None,
    color_system=None if colour is False else 'auto',
    force_terminal=True if colour else None,
    highlight=False,
  )


def cells(result: Result) -> tuple[str, ...]:
  """The texts of a result's columns.

  Example:
    >>> cells(Result('fix', 'ngram', 7, 0.5, None, 3.25, 0, 1.5, identical=True))
    ('fix', 'ngram', '7', '.50', '-', '3.25', '.00', '1.50', '-', '-', 'yes')
  """
  measured = _number(result.measured)
  if result.low is not None and result.high is not None:
    measured += f'±{_fraction((result.high - result.low) / 2)}'
  same = {None: '-', True: 'yes', False: 'NO'}[result.identical]
  return (
    result.task,
    result.method,
    '-' if result.gamma is None else str(result.gamma),
    _fraction(result.acceptance_rate),
    _fraction(result.alpha),
    _number(result.tokens_per_call),
    _fraction(result.c),
    _number(result.v),
    _number(result.predicted),
    measured,
    same,
  )


def _number(value: float | None) -> str:
  return '-' if value is None else f'{value:.2f}'


def _fraction(value: float | None) -> str:
  return _number(value).removeprefix('0')


def table(results: Sequence[Result], *, colour: bool = True) -> Table:
  """The results as a table of 80 columns; long names continue below.

  Args:
    results: in the order to show; a task's name is shown once.
    colour: measured speedups green above 1 and orange below, differing text
      orange.
  """
  shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
  for i, column in enumerate(_COLUMNS):
    if i < _NUM_TEXT_COLUMNS:
      shown.add_column(column.heading, overflow='fold', min_width=4)
    else:
      shown.add_column(column.heading, justify='right', no_wrap=True)
  previous = None
  for result in results:
    texts = [Text(cell) for cell in cells(result)]
    if result.task == previous:
      texts[0] = Text('')
    if colour and result.measured is not None:
      texts[_MEASURED].stylize(_GOOD if result.measured > 1 else _BAD)
    if colour and result.identical is False:
      texts[_SAME].stylize(_BAD)
    shown.add_row(*texts)
    previous = result.task
  return shown


def plain_table(results: Sequence[Result]) -> str:
  """The same columns as text, for files: no wrapping whatever the names' length.

  Example:
    >>> print(plain_table([Result('fix', 'ngram', 7, measured=1.5)]).split()[:2])
    ['task', 'method']
  """
  rows = [tuple(column.name for column in _COLUMNS), *map(cells, results)]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = []
  for row in rows:
    padded = [
      cell.rjust(width) if i >= _NUM_TEXT_COLUMNS else cell.ljust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    lines.append('  '.join(padded).rstrip())
  return '\n'.join(lines)


def print_results(results: Sequence[Result], console: Console) -> None:
  """Prints the table: drawn on a terminal, plain text elsewhere."""
  if console.is_terminal:
    console.print(table(results, colour=uses_colour(console)))
  else:
    console.file.write(plain_table(results) + '\n')


def verdict(result: Result) -> str:
  """One line: what was measured, and whether the text is the target's.

  Example:
    >>> verdict(Result('fix', 'ngram', 7, measured=1.5, predicted=1.6, identical=True))
    'fix, ngram, gamma 7: 1.50x as fast as plain decoding (predicted 1.60x), same text.'
  """
  name = f'{result.task}, {result.method}'
  if result.gamma is not None:
    name += f', gamma {result.gamma}'
  parts = []
  if result.measured is not None:
    speed = f'{result.measured:.2f}x as fast as plain decoding'
    if result.predicted is not None:
      speed += f' (predicted {result.predicted:.2f}x)'
    parts.append(speed)
  elif result.tokens_per_call is not None:
    parts.append(f'{result.tokens_per_call:.2f} tokens per target call')
  if result.identical is not None:
    parts.append('same text' if result.identical else 'DIFFERENT text')
  return f'{name}: {", ".join(parts) or "nothing measured"}.'
