"""One page of evidence that the shipped loop is exact, and that a bug would show.

  python -m specjax.testing.report                     one or two minutes
  python -m specjax.testing.report --nightly           4.5e6 samples for each rule
  python -m specjax.testing.report --output FOLDER     exactness.json, exactness.png

Exit codes: 0; 1 if a law is wrong or a mutant survives; 2 for bad input.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

FLOOR = -1e6  # log10 p of an impossible output, in files and pictures


@dataclasses.dataclass(frozen=True)
class Size:
  """Outputs per test."""

  main: int
  sweep: int
  mutants: int


SHORT = Size(2**18, 2**16, 2**17)
NIGHTLY = Size(4_500_000, 2**20, 2**18)


def summary(report) -> dict[str, Any]:
  """Plain numbers and texts, for a file."""
  survivors = {mutant.name for mutant in report.survivors}
  return {
    'passed': report.passed,
    'seconds': round(report.seconds, 1),
    'tests': len(report.enumerations) + len(report.samples) + len(report.mutants),
    'enumerations': [
      {**part._asdict(), 'passed': part.passed} for part in report.enumerations
    ],
    'samples': [_plain(sample) for sample in report.samples],
    'mutants': {
      'killed': len(report.mutants) - len(survivors),
      'all': len(report.mutants),
      'survivors': sorted(survivors),
      'control_passed': not report.control.killed_by,
      'results': [
        {**mutant._asdict(), 'log10_p': max(mutant.log10_p, FLOOR)}
        for mutant in report.mutants
      ],
    },
  }


def _plain(sample) -> dict[str, Any]:
  fields = sample._asdict()
  del fields['counts_K'], fields['law_K']
  fields['log10_p'] = max(fields['log10_p'], FLOOR)
  fields['log_e'] = min(fields['log_e'], -FLOOR)
  return {**fields, 'passed': sample.passed}


def page(report) -> Group:
  """The page for a terminal of 80 columns."""
  killed = len(report.mutants) - len(report.survivors)
  verdict = 'PASSED' if report.passed else 'FAILED'
  lines = [
    Text(
      f'{verdict}: {len(report.enumerations)} enumerations, {len(report.samples)}'
      f' samples, mutants killed {killed}/{len(report.mutants)},'
      f' {report.seconds:.0f} s',
      style='bold green' if report.passed else 'bold red',
    )
  ]
  for mutant in report.survivors:
    lines.append(Text(f'survivor: {mutant.name} ({mutant.seen_in})', style='red'))
  if report.control.killed_by:
    lines.append(Text('the control, which has no fault, was rejected', style='red'))
  return Group(
    _enumeration_table(report.enumerations),
    _sample_table('Compiled loop, joint law of gamma + 2 tokens', report.main),
    _sample_table('Other configurations', report.sweep),
    _mutant_table(report.mutants),
    *lines,
  )


def _table(title: str, *columns: str) -> Table:
  table = Table(title=title, box=box.SIMPLE, title_justify='left', padding=(0, 1))
  for i, column in enumerate(columns):
    table.add_column(column, justify='left' if i == 0 else 'right')
  return table


def _mark(right: bool) -> Text:
  return Text('ok', style='green') if right else Text('WRONG', style='bold red')


def _enumeration_table(parts) -> Table:
  table = _table(
    'Law of the loop, enumerated over two full blocks',
    'rule',
    'gamma',
    'tokens',
    'outputs',
    'rational = target',
    '|float64 - rational|',
    '',
  )
  for part in parts:
    table.add_row(
      part.rule,
      str(part.num_draft),
      str(part.num_tokens),
      f'{part.num_outputs:,}',
      'equal' if part.rational_equal else 'different',
      f'{part.max_difference:.1e}',
      _mark(part.passed),
    )
  return table


def _sample_table(title: str, samples) -> Table:
  table = _table(
    title, 'loop', 'samples', 'p chi2', 'p G', 'p rate', 'e-value', 'TV <=', ''
  )
  for sample in samples:
    rate = '' if sample.rate_p_value is None else f'{sample.rate_p_value:.2g}'
    table.add_row(
      sample.name,
      f'{sample.num_samples:,}',
      f'{sample.p_value:.2g}',
      f'{sample.g_p_value:.2g}',
      rate,
      _power_of_ten(sample.log_e / math.log(10)),
      f'{sample.tv_bound:.4f}',
      _mark(sample.passed),
    )
  return table


def _power_of_ten(log10: float) -> str:
  return 'inf' if math.isinf(log10) else f'1e{round(log10)}'


def _mutant_table(found) -> Table:
  table = _table('Mutants', 'fault', 'log10 p', 'killed by')
  for mutant in found:
    name = Text(mutant.name)
    if mutant.why:
      name.append(f'\n  {mutant.why}', style='dim')
    log10_p = 'impossible' if mutant.log10_p <= FLOOR else f'{mutant.log10_p:.1f}'
    killed_by = mutant.killed_by or Text('SURVIVES', style='bold red')
    table.add_row(name, log10_p, killed_by)
  return table


def picture(report, path: Path) -> bool:
  """Writes a picture; False if matplotlib is not installed (extra `plots`)."""
  try:
    from matplotlib import figure
  except ImportError:
    return False
  canvas = figure.Figure(figsize=(11, 7), layout='constrained')
  left, right = canvas.subplots(1, 2, width_ratios=[1, 1.15])
  for sample, marker in zip(report.main, 'o+', strict=False):
    possible_K = sample.law_K > 0
    left.loglog(
      sample.law_K[possible_K],
      sample.counts_K[possible_K] / sample.num_samples,
      marker,
      fillstyle='none',
      markersize=5,
      label=f'{sample.name}: TV <= {sample.tv_bound:.4f}',
    )
  low, high = left.get_xlim()
  left.plot([low, high], [low, high], color='black', linewidth=0.8)
  left.set(
    xlabel='exact law of an output', ylabel='frequency', title='The loop and its law'
  )
  left.legend(frameon=False, loc='upper left')
  _mutants_and_loops(right, report)
  canvas.savefig(path, dpi=120)
  return True


def _mutants_and_loops(axes, report) -> None:
  """-log10 p of everything: faults beyond the level, the shipped loop below it."""
  rows = [(m.name, m.log10_p, m.killed_by) for m in report.mutants]
  rows += [(s.name, s.log10_p, 'loop') for s in report.main]
  worst = min(report.sweep, key=lambda s: s.log10_p, default=None)
  if worst is not None:
    rows.append((f'worst of {len(report.sweep)}: {worst.name}', worst.log10_p, 'loop'))
  rows.sort(key=lambda row: row[1])
  for place, (_, log10_p, kind) in enumerate(rows):
    strength = min(max(-log10_p, 0.02), 10.0**5)
    marker = '>' if -log10_p > 10.0**5 else 'o'
    colour = 'tab:blue' if kind == 'loop' else 'tab:red'
    # Hollow: no sample of this size shows it, enumeration does.
    fill = 'none' if kind == 'enumeration' else 'full'
    axes.plot(strength, -place, marker, color=colour, fillstyle=fill, markersize=5)
  axes.set_yticks([-i for i in range(len(rows))], [row[0] for row in rows], fontsize=7)
  axes.axvline(6, color='black', linewidth=0.8)
  axes.text(6, 1.0, ' level 1e-6; hollow: shown by enumeration', fontsize=7)
  axes.set(
    xscale='log',
    xlabel='-log10 p on a sample',
    title='Faults (red) and the shipped loop (blue)',
    ylim=(-len(rows), 2),
  )
  axes.grid(axis='y', linewidth=0.2)


def _progress() -> Progress:
  """A bar with the time left, from the mean pace so far; parts differ in pace."""
  return Progress(
    *Progress.get_default_columns(),
    TimeElapsedColumn(),
    console=Console(stderr=True),
    speed_estimate_period=3600.0,
  )


def main(argv: Sequence[str] | None = None) -> int:
  """Runs everything, prints the page, writes the files; returns the exit code."""
  parser = argparse.ArgumentParser(
    prog='python -m specjax.testing.report', description=(__doc__ or '').splitlines()[0]
  )
  parser.add_argument('--nightly', action='store_true', help='the long version')
  parser.add_argument('--seed', type=int, default=0, help='of all samples; default: 0')
  parser.add_argument('--samples', type=int, help='outputs per test, for a quick look')
  parser.add_argument(
    '--output',
    type=Path,
    default=Path(),
    help='folder of the files; default: the current one',
  )
  options = parser.parse_args(argv)
  size = NIGHTLY if options.nightly else SHORT
  if options.samples is not None:
    if options.samples < 1000:
      parser.error(f'--samples {options.samples}: at least 1000, or little is tested')
    size = Size(options.samples, options.samples, options.samples)
  from specjax.testing import suite  # JAX starts here, not for --help

  console = Console(width=max(Console().width, 100))
  counts = (size.main, size.sweep, size.mutants)
  with _progress() as progress:
    task = progress.add_task('outputs', total=suite.num_outputs(*counts))
    report = suite.run(
      *counts,
      options.seed,
      say=progress.console.print,
      drawn=lambda rows: progress.advance(task, rows),
    )
  console.print(page(report))
  options.output.mkdir(parents=True, exist_ok=True)
  path = options.output / 'exactness.json'
  found = {'seed': options.seed, **summary(report)}
  path.write_text(json.dumps(found, indent=1, default=float) + '\n', encoding='utf-8')
  console.print(f'written: {path}')
  path = options.output / 'exactness.png'
  if picture(report, path):
    console.print(f'written: {path}')
  else:
    message = "no picture: pip install 'specjax[plots]' for matplotlib"
    console.print(message, markup=False)
  return 0 if report.passed else 1


if __name__ == '__main__':
  sys.exit(main())
