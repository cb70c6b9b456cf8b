"""What draft shapes cost by a roofline, and what they promise: for `train.shapes`."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specjax.eval import roofline, theory
from specjax.models.t5 import T5Config
from specjax.parallel.hlo_facts import Collective
from specjax.parallel.topology import Topology

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
  known = dict(sorted(widths.items()))
  verify = {
    gamma: float(np.interp(gamma + 1, list(known), list(known.values())))
    for gamma in gammas
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

  found = {  # of equal shapes, the first name counts
    'shallow, wide': shape(1 / 4, 0),
    'half depth': shape(1 / 2, 1 / 2),
    'quarter depth': shape(1 / 4, 1 / 4),
    'shallow, half width': shape(1 / 4, 0, 1 / 2),
    'shallow, quarter width': shape(1 / 4, 0, 1 / 4),
    'half depth, half width': shape(1 / 2, 1 / 2, 1 / 2),
    'half depth, quarter width': shape(1 / 2, 1 / 2, 1 / 4),
    'deep, quarter width': shape(1, 1, 1 / 4),
    'deep, eighth width': shape(1, 1, 1 / 8),
  }
  unique: dict[str, T5Config] = {}
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
