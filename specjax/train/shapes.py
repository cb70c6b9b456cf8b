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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from specjax.checkpoints import files, formats
from specjax.eval import roofline, theory
from specjax.models.t5 import T5Config
from specjax.parallel.hlo_facts import Collective
from specjax.parallel.topology import Topology, find
from specjax.train.config import run_command

_NBYTES = {'float32': 4, 'bfloat16': 2}


class Request(NamedTuple):
  """What is decoded: rows together, source positions, tokens emitted so far."""

  batch_size: int = 1
  source: int = 512
  slots: int = 128


class Row(NamedTuple):
  """A candidate and what it promises.

  Attributes:
    name: of the shape.
    config: the shape.
    parameters: of the whole draft.
    milliseconds: of a draft step.
    c: of that / of a plain step of the target.
    alpha: assumed or measured.
    is_measured: which of the two.
    gamma: the best one; 0 is "do not speculate".
    speedup: S at that gamma.
  """

  name: str
  config: T5Config
  parameters: int
  milliseconds: float
  c: float
  alpha: float
  is_measured: bool
  gamma: int
  speedup: float


def num_parameters(config: T5Config) -> int:
  """All parameters, norms and relative biases included."""
  encoder, decoder = layer_parameters(config)
  norms = 2 * config.num_encoder_layers + 3 * config.num_decoder_layers + 2
  biases = 2 * config.num_heads * config.relative_attention_num_buckets
  tables = 1 if config.logits_via_embedding else 2
  return (
    config.num_encoder_layers * encoder
    + config.num_decoder_layers * decoder
    + (norms + tables * config.vocab_size) * config.emb_dim
    + biases
  )


def layer_parameters(config: T5Config) -> tuple[int, int]:
  """Kernels of an encoder layer and of a decoder layer."""
  attention = 4 * config.emb_dim * config.num_heads * config.head_dim
  mlp = (len(config.mlp_activations) + 1) * config.emb_dim * config.mlp_dim
  return attention + mlp, 2 * attention + mlp


def step_work(
  config: T5Config, width: int, request: Request, split: int = 1
) -> roofline.Work:
  """What one of `split` devices does in a decoder step over `width` tokens.

  Read once: the decoder's layers (but the cross-attention's keys and values, which
  are projected once a text), the head, and the caches of every row. Multiplied: two
  operations a weight and token, and attention. With `split` > 1 a layer's three
  outputs are summed over the devices.

  Args:
    config: the shape; its dtype is that of weights and caches.
    width: tokens of a row, >= 1.
    request: rows and lengths.
    split: devices that hold the model between them.
  """
  nbytes, layers = _NBYTES[config.dtype], config.num_decoder_layers
  _, layer = layer_parameters(config)
  joined = config.num_heads * config.head_dim
  weights = layers * (layer - 2 * config.emb_dim * joined)
  weights += config.vocab_size * config.emb_dim
  positions = request.source + request.slots
  caches = layers * 2 * request.batch_size * positions * joined
  tokens = request.batch_size * width
  flops = 2 * tokens * weights + 4 * tokens * layers * positions * joined
  sums: tuple[Collective, ...] = ()
  if split > 1:
    size = tokens * config.emb_dim * nbytes
    sums = (Collective('all-reduce', size, split, 3 * layers, ''),)
  return roofline.Work(flops / split, nbytes * (weights + caches) / split, sums)


class Costs(NamedTuple):
  """Times of the target, in seconds; those of drafts that are known by shape.

  Attributes:
    plain: of a step.
    verify: of verifying gamma + 1 tokens, by gamma from 1 on, without gaps.
    drafts: of a draft step, by shape.
  """

  plain: float
  verify: Mapping[int, float]
  drafts: Mapping[T5Config, float]


def roofline_costs(
  target: T5Config, place: Topology, request: Request, max_gamma: int
) -> Costs:
  """The target split over all chips of a slice, by the roofline."""

  def seconds(width):
    work = step_work(target, width, request, place.size)
    return roofline.bound(work, place.chip).seconds

  return Costs(
    seconds(1), {gamma: seconds(gamma + 1) for gamma in range(1, max_gamma + 1)}, {}
  )


def aot_costs(path: str | Path, max_gamma: int) -> tuple[T5Config, str, Costs]:
  """Target, slice and times from a JSON of `specjax.aot --output`.

  Verification between the widths that were compiled lies on straight lines, and is
  as wide as the widest beyond it at most.

  Raises:
    ValueError: no such file, or not one of `specjax.aot`.
  """
  try:
    found = json.loads(Path(path).expanduser().read_text(encoding='utf-8'))
    bounds = {name: each['seconds'] for name, each in found['roofline'].items()}
    config, place = found['config'], found['topology']['name']
    target, draft = (
      T5Config.from_size(config[name], dtype=config['dtype'])
      for name in ('target', 'draft')
    )
    plain, draft_seconds = bounds['plain'], bounds['draft']
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f'aot: {path} is no JSON of python -m specjax.aot --output ({error!r}); make it '
      'anew'
    ) from error
  widths = {1: plain} | {
    int(name.removeprefix('verify_')): seconds
    for name, seconds in bounds.items()
    if name.startswith('verify_')
  }
  gammas = range(1, min(max_gamma, max(widths) - 1) + 1)
  known = sorted(widths.items())
  verify = {
    gamma: float(np.interp(gamma + 1, *zip(*known, strict=True))) for gamma in gammas
  }
  return target, place, Costs(plain, verify, {draft: draft_seconds})


def presets(target: T5Config) -> dict[str, T5Config]:
  """Shapes to consider for a draft of a target, over the same vocabulary.

  From layers of the target as they are (which `train.slicing` copies) to narrow
  ones; encoders run once a text and may stay deeper than decoders.
  """

  def shape(encoder, decoder, width=1.0):
    def part(size, step=1):
      return max(step, round(size * width / step) * step)

    return dataclasses.replace(
      target,
      num_encoder_layers=max(1, round(target.num_encoder_layers * encoder)),
      num_decoder_layers=max(1, round(target.num_decoder_layers * decoder)),
      emb_dim=part(target.emb_dim, 8),
      num_heads=part(target.num_heads),
      mlp_dim=part(target.mlp_dim, 8),
    )

  found = {
    'half depth': shape(1 / 2, 1 / 2),
    'quarter depth': shape(1 / 4, 1 / 4),
    'shallow, wide': shape(1 / 4, 0),
    'shallow, half width': shape(1 / 4, 0, 1 / 2),
    'shallow, quarter width': shape(1 / 4, 0, 1 / 4),
    'half depth, half width': shape(1 / 2, 1 / 2, 1 / 2),
    'half depth, quarter width': shape(1 / 2, 1 / 2, 1 / 4),
    'deep, quarter width': shape(1, 1, 1 / 4),
    'deep, eighth width': shape(1, 1, 1 / 8),
  }
  unique = {}
  for name, config in found.items():
    if config != target and config not in unique.values():
      unique[name] = config
  return unique


def draft_seconds(
  config: T5Config, place: Topology, request: Request, costs: Costs
) -> float:
  """Of a draft step; each chip holds the whole draft, and all do the same."""
  known = costs.drafts.get(config)
  work = step_work(config, 1, request)
  return roofline.bound(work, place.chip).seconds if known is None else known


def search(
  candidates: Iterable[tuple[str, T5Config, float, bool]],
  place: Topology,
  request: Request,
  costs: Costs,
) -> list[Row]:
  """What candidates promise, best first; ties go to fewer parameters.

  Args:
    candidates: name, shape, alpha in [0, 1], and whether it was measured.
    place: the slice.
    request: what is decoded.
    costs: times of the target.
  """
  rows = []
  v = [1.0, *(seconds / costs.plain for seconds in costs.verify.values())]
  for name, config, alpha, is_measured in candidates:
    seconds = draft_seconds(config, place, request, costs)
    c = seconds / costs.plain
    gamma = theory.optimal_gamma(alpha, c, v)
    rows.append(
      Row(
        name, config, num_parameters(config), 1000 * seconds, c, alpha, is_measured,
        gamma, float(theory.speedup(alpha, gamma, c, v)),
      )
    )  # fmt: skip
  return sorted(rows, key=lambda row: (-row.speedup, row.parameters))


def needed_alpha(row: Row, speedup: float, costs: Costs) -> float | None:
  """The alpha with which a shape would reach a speedup; None if none does.

  S grows with alpha at every gamma, so bisection finds it.
  """
  v = [1.0, *(seconds / costs.plain for seconds in costs.verify.values())]

  def best(alpha):
    return theory.speedup(alpha, theory.optimal_gamma(alpha, row.c, v), row.c, v)

  low, high = 0.0, 1.0
  if best(high) < speedup:
    return None
  for _ in range(40):
    middle = (low + high) / 2
    low, high = (low, middle) if best(middle) >= speedup else (middle, high)
  return high


def table(rows: list[Row], costs: Costs, title: str) -> Table:
  """One row a shape; the last column is the alpha that would make it the best."""
  found = Table(title=title, title_justify='left')
  for name in ('shape', 'enc', 'dec', 'D', 'heads', 'F', 'params', 'ms', 'c', 'alpha',
               'gamma', 'S', 'alpha to lead'):  # fmt: skip
    found.add_column(name, justify='left' if name == 'shape' else 'right')
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
  name = '/'.join(Path(path).parts[-2:])
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
  console = Console(width=max(console.width, 120))
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
