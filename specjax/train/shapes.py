"""Which shape should a draft have? `python -m specjax.train.shapes --target t5_1_1_xxl`

For every candidate: parameters, c by the roofline of a chip, alpha as assumed or as
measured, and the speedup S that these promise at the best gamma. A wide and shallow
draft and a narrow and deep one of as many parameters read as many bytes a step, but
layers cost operations in a row; on a slice they cost all-reduces too (Chen et al.
2023, section 4).

The roofline counts what a step must read (weights, keys and values) and multiply: a
lower bound, see `eval.roofline`. `--aot` takes the target's times and those of the
draft that was compiled with it from a JSON of `specjax.aot`; `--draft` adds drafts
that `specjax.train.distill` left, with the alpha that it measured.
"""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from specjax.checkpoints import files, formats
from specjax.models.t5 import T5Config
from specjax.parallel.topology import find
from specjax.train.config import run_command
from specjax.train.shape_costs import (
  Costs,
  Request,
  Row,
  aot_costs,
  needed_alpha,
  num_parameters,
  presets,
  roofline_costs,
  search,
)


def table(rows: list[Row], costs: Costs, title: str) -> Table:
  """One row a shape; the last column is the alpha that would make it the best."""
  found = Table(title=title, title_justify='left')
  for name in ('shape', 'enc', 'dec', 'D', 'heads', 'F', 'params', 'ms', 'c', 'alpha',
               'gamma', 'S', 'alpha to lead'):  # fmt: skip
    found.add_column(name, justify='left' if name == 'shape' else 'right', no_wrap=True)
  for row in rows:
    config = row.config
    lead = needed_alpha(row, rows[0].speedup, costs)
    found.add_row(
      row.name,
      str(config.num_encoder_layers),
      str(config.num_decoder_layers),
      str(config.emb_dim),
      str(config.num_heads),
      str(config.mlp_dim),
      _count(row.parameters),
      f'{row.milliseconds:.3g}',
      f'{row.c:.4f}',
      f'{row.alpha:.3f}' + ('' if row.is_measured else '*'),
      str(row.gamma),
      f'{row.speedup:.2f}',
      'never' if lead is None else f'{lead:.3f}',
    )
  return found


def _count(number: int) -> str:
  for unit, size in (('B', 1e9), ('M', 1e6), ('k', 1e3)):
    if number >= size:
      return f'{number / size:.3g}{unit}'
  return str(number)


def read_draft(path: str, target: T5Config) -> tuple[str, T5Config, float | None]:
  """Name, shape and measured alpha (None without) of a draft's file.

  Raises:
    ValueError: no draft's file, or one of another vocabulary.
  """
  weights = formats.open_weights(files.resolve(path))
  config = weights.config
  if config.vocab_size != target.vocab_size:
    raise ValueError(
      f'draft: {path} has {config.vocab_size} logits, the target {target.vocab_size}; '
      'give drafts of the same vocabulary'
    )
  alpha: Any = weights.notes.get('alpha')
  name = Path(path).resolve().parent.name  # distill names its files alike
  return name, dataclasses.replace(config, dtype=target.dtype), alpha


def main(
  target: Annotated[str, tyro.conf.arg(help='A published T5, or a checkpoint.')] = (
    't5_1_1_xxl'
  ),
  topology: Annotated[str, tyro.conf.arg(help='A chip or slice, such as v4-8.')] = 'v4',
  alpha: Annotated[float, tyro.conf.arg(help='Assumed where none was measured.')] = 0.6,
  draft: Annotated[
    tuple[str, ...], tyro.conf.arg(help="Drafts of specjax.train.distill's.")
  ] = (),
  also: Annotated[
    tuple[str, ...], tyro.conf.arg(help='Published T5s as drafts, for comparison.')
  ] = (),
  aot: Annotated[
    str | None, tyro.conf.arg(help='A JSON of specjax.aot: names target and slice.')
  ] = None,
  dtype: str = 'bfloat16',
  batch_size: int = 1,
  max_source: int = 512,
  max_new_tokens: int = 128,
  max_gamma: int = 16,
  output: Annotated[str | None, tyro.conf.arg(help='JSON lines, one a shape.')] = None,
) -> None:
  """Prints what draft shapes promise for a target, best first."""
  for field, value in (
    ('batch_size', batch_size), ('max_source', max_source), ('max_gamma', max_gamma),
    ('max_new_tokens', max_new_tokens),
  ):  # fmt: skip
    if value < 1:
      raise ValueError(f'{field}: {value}; give 1 or more')
  if not 0 <= alpha <= 1:
    raise ValueError(f'alpha: {alpha}; a probability in [0, 1] is needed')
  request = Request(batch_size, max_source, max_new_tokens)
  if aot is None:
    config = read_target(target, dtype)
    place = find(topology)
    costs = roofline_costs(config, place, request, max_gamma)
  else:
    config, name, costs = aot_costs(aot, max_gamma)
    place = find(name)
  candidates = [(name, each, alpha, False) for name, each in presets(config).items()]
  for name in also:
    other = T5Config.from_size(name, dtype=config.dtype)
    if other.vocab_size != config.vocab_size:
      raise ValueError(
        f'also: {name} has {other.vocab_size} logits, the target {config.vocab_size}; '
        'give drafts of the same vocabulary'
      )
    candidates.append((name, other, alpha, False))
  for path in draft:
    name, other, measured = read_draft(path, config)
    found = alpha if measured is None else float(measured)
    candidates.append((name, other, found, measured is not None))
  rows = search(candidates, place, request, costs)
  console = Console()
  console = Console(width=max(console.width, 140))
  title = (
    f'{target if aot is None else aot} on {place.name}: '
    f'{_count(num_parameters(config))} parameters, {1000 * costs.plain:.3g} ms a step'
  )
  console.print(table(rows, costs, title))
  if not all(row.is_measured for row in rows):
    console.print(
      f'* assumed: a draft earns its alpha by training. S at alpha {alpha:g} says what '
      'each shape costs.',
      soft_wrap=True,
      highlight=False,
    )
  if output is not None:
    lines = [json.dumps({**r._asdict(), 'config': r.config.to_dict()}) for r in rows]
    Path(output).expanduser().write_text('\n'.join(lines) + '\n', encoding='utf-8')


def read_target(name: str, dtype: str) -> T5Config:
  """A published shape, or that of a checkpoint, in a dtype.

  Raises:
    ValueError: neither.
  """
  if Path(name).expanduser().exists() or name.startswith(files.BUCKET):
    config = formats.open_weights(files.resolve(name)).config
    return dataclasses.replace(config, dtype=dtype)
  return T5Config.from_size(name, dtype=dtype)


if __name__ == '__main__':
  run_command(main)
