"""A study of compiled programs, for people: a table, a few lines, a picture."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from specjax.command import aot_study
from specjax.command.aot_config import AotConfig
from specjax.command.aot_study import PAPER_C, Facts, Study
from specjax.eval import theory
from specjax.parallel import aot


def show(config: AotConfig) -> int:
  """Compiles, prints, writes what was asked for; returns the exit code.

  Raises:
    ValueError: bad input, no compiler, or no room.
  """
  for field in ('output', 'plot', 'serialize'):
    path = getattr(config, field)
    if path is not None and not os.access(Path(path).absolute().parent, os.W_OK):
      raise ValueError(
        f'{field}: cannot write {path}; choose a folder that exists and is writable'
      )
  console, notes = Console(), Console(stderr=True)
  study = aot_study.run(config, lambda text: notes.print(text, markup=False))
  console = Console(width=max(console.width, 150))
  console.print(table(study))
  for line in lines(study):
    console.print(line, markup=False, highlight=False, soft_wrap=True)
  if config.output is not None:
    text = json.dumps(aot_study.to_dict(study), indent=1)
    temporary = Path(f'{config.output}.tmp')
    temporary.write_text(text + '\n', encoding='utf-8')
    os.replace(temporary, config.output)
    notes.print(f'written: {config.output}', markup=False)
  if config.serialize is not None:
    aot.save(study.facts['loop'].program, config.serialize, study.topology.name)
    notes.print(f'written: {config.serialize}', markup=False)
  if config.plot is not None:
    is_drawn = picture(study, Path(config.plot))
    missing = "no picture: pip install 'specjax[plots]' for matplotlib"
    notes.print(f'written: {config.plot}' if is_drawn else missing, markup=False)
  return 0 if study.spare >= 0 and not study.facts['loop'].host_transfers else 1


def table(study: Study) -> Table:
  """One row a program; sizes are of one device."""
  head = Table(
    title=f'{study.config.target} with {study.config.draft} on {study.topology.name}: '
    f'one device; a loop is counted by the round'
  )
  for name in ('program', 'compile', 'memory', 'temporaries', 'read', 'written',
               'Gflop', 'collectives', 'bound', 'host', 'donated'):  # fmt: skip
    head.add_column(name, justify='left' if name == 'program' else 'right')
  rounds = {'loop': 'round', 'plain_loop': 'plain_round'}
  for name, facts in study.facts.items():
    memory = facts.program.memory
    bound = study.bounds[rounds.get(name, name)]
    is_loop = name in rounds
    head.add_row(
      facts.program.name,
      f'{facts.program.seconds:.0f} s',
      _size(memory.total),
      _size(memory.temporaries),
      _size(facts.traffic.read),
      _size(facts.traffic.written),
      '' if is_loop else f'{facts.program.flops / 1e9:.1f}',
      _collectives(facts),
      f'{1000 * bound.seconds:.3g} ms',
      str(len(facts.host_transfers)),
      str(facts.donated),
    )
  return head


def lines(study: Study) -> Iterator[str]:
  """What follows from the table."""
  config, chip = study.config, study.topology.chip
  loop, asked, best = study.facts['loop'], study.asked, study.best
  if study.spare >= 0:
    yield (
      f'memory: fits; {study.peak} of {chip.hbm_bytes} bytes of a chip, '
      f'{study.spare} to spare'
    )
  else:
    yield f'memory: does not fit; {-study.spare} bytes too few; {aot.REMEDY}'
  transfers = len(loop.host_transfers)
  yield f'host transfers in the loop: {transfers}' + (
    '' if not transfers else f' ({", ".join(sorted({*loop.host_transfers})[:3])})'
  )
  yield (
    f'weights: {loop.weights_read / max(loop.weights, 1):.2f} reads a round, the '
    f"draft's {config.num_speculative_tokens} steps included; "
    f'{loop.weight_gathers} gathered, {loop.weight_copies} copied inside the loop, '
    f'{_size(loop.copied_before)} before it'
  )
  c, v = study.by_cycles()
  yield (
    f'by bandwidth: c = {asked.c:.4f}, v({asked.gamma}) = {asked.v:.3f}; '
    f"by the compiler's estimates: c = {c:.4f}, v({asked.gamma}) = {v:.3f}"
  )
  paper = PAPER_C.get(config.draft)
  if config.target == 't5_1_1_xxl' and paper is not None:
    yield from _against_paper(study, paper, c)
  yield (
    f'alpha {config.alpha}, gamma {asked.gamma}: {asked.ms_per_token:.3g} ms a token, '
    f'speedup {asked.speedup:.2f}; plain {1000 * study.bounds["plain"].seconds:.3g} ms'
  )
  if len(study.predictions) > 1:
    yield (
      f'best gamma of {config.sweep}: {best.gamma}, {best.ms_per_token:.3g} ms a '
      f'token, speedup {best.speedup:.2f}'
    )


def _against_paper(study: Study, paper: float, estimate: float) -> Iterator[str]:
  draft, plain = study.facts['draft'], study.facts['plain']
  share = draft.traffic.total / plain.traffic.total
  module = draft.program.module
  steps = module.computations[module.entry].instructions.values()
  small = sum(each.opcode == 'fusion' for each in steps)
  yield f'the paper measured c = {paper:g} on one v4 chip; the differences:'
  yield (
    f'  bandwidth alone gives {study.asked.c:.4f}: a draft step moves '
    f'{_size(draft.traffic.total)}, a plain step {_size(plain.traffic.total)} '
    f'(a share of {share:.4f})'
  )
  yield (
    f'  a draft step is {small} small operations in a row, and waits for their starts '
    f'rather than for memory; the compiler, which counts those, expects {estimate:.4f}'
  )
  asked = study.asked
  speedup = theory.speedup(study.config.alpha, asked.gamma, paper, asked.v)
  yield f'  with c = {paper:g} the speedup at gamma {asked.gamma} is {speedup:.2f}'
  yield (
    "  the paper's steps were T5X's, which project the source's keys and values anew "
    'in each step'
  )


def _collectives(facts: Facts) -> str:
  counts: Counter[str] = Counter()
  nbytes = 0
  for each in facts.collectives:
    counts[each.kind] += each.times
    nbytes += each.times * each.nbytes
  if not counts:
    return '0'
  kinds = ', '.join(f'{count} {kind}' for kind, count in counts.items())
  return f'{kinds}: {_size(nbytes)}'


def _size(nbytes: float) -> str:
  for unit, scale in (('GB', 1e9), ('MB', 1e6), ('kB', 1e3)):
    if nbytes >= scale:
      return f'{nbytes / scale:.3g} {unit}'
  return f'{nbytes:.0f} B'


def picture(study: Study, path: Path) -> bool:
  """Speedup by gamma; False where matplotlib is missing."""
  try:
    from matplotlib.figure import Figure
  except ImportError:
    return False
  figure = Figure(figsize=(6, 4), layout='constrained')
  axes = figure.subplots()
  gammas = [each.gamma for each in study.predictions]
  for name in ('speedup', 'v'):
    values = [getattr(each, name) for each in study.predictions]
    axes.plot(gammas, values, 'o-', label=name)
  axes.axhline(1.0, color='grey', linewidth=0.8)
  axes.set(
    xlabel='gamma',
    title=f'{study.config.target}, {study.config.draft}, {study.topology.name}, '
    f'alpha {study.config.alpha}',
  )
  axes.legend()
  figure.savefig(path)
  return True
