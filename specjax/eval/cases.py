"""What a benchmark decodes: a pair of weights, sources, and how far.

A published size gets random weights, with a draft whose agreement with the target is
made, not learned: times do not depend on values, but tokens per call do. Whatever is
made up is said in `Case.notes`, which stand above every table.
"""

import dataclasses
import random
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specjax.checkpoints import formats, leaves
from specjax.checkpoints.leaves import Weights
from specjax.core.types import Params
from specjax.data import corpus, text
from specjax.models.t5 import T5Config
from specjax.models.t5.config import SIZES

ASSETS = Path(__file__).parents[1] / 'assets'
EMBEDDED = 'embedded'
NO_DRAFT = 'none'
DRAFT_LAYERS = 2
DAMPING = 0.03
NO_EOS = -1
_LAYER = re.compile(r'layers_(\d+)/')
# What a layer adds to the residual stream.
_ADDED = re.compile(r'layers_(\d+)/(.*attention/out|mlp/wo)/kernel')


class Case(NamedTuple):
  """One benchmark: every system decodes this, greedily, in float32.

  Attributes:
    target: the target's weights, for systems that load their own copy.
    draft: the draft's, or None.
    params: the same, on the device.
    inputs_BE: int32 source ids, 0 is padding.
    new_tokens: most tokens of an output, >= 1.
    num_draft: gamma.
    eos_id: ends a row; -1 for none.
    notes: sentences about where weights and sources come from.
  """

  target: Weights
  draft: Weights | None
  params: Params
  inputs_BE: np.ndarray
  new_tokens: int
  num_draft: int
  eos_id: int
  notes: tuple[str, ...]


def make_case(
  target: str,
  *,
  draft: str | None = None,
  source_length: int = 64,
  new_tokens: int = 64,
  batch_size: int = 1,
  num_draft: int = 4,
  seed: int = 0,
) -> Case:
  """Reads or makes the weights and the sources.

  Args:
    target: 'embedded', a name of `SIZES`, or the path of any checkpoint.
    draft: as `target`, or 'none'. None: 'embedded' has its own; a size gets its
      first layers (`truncated`); a checkpoint none.
    source_length: E. The embedded pair gets texts, cut or padded to E, others E
      random ids.
    new_tokens: most tokens of an output. Rows end early only where the target is
      a checkpoint, at EOS.
    batch_size: B.
    num_draft: gamma.
    seed: of random weights and sources.

  Returns:
    The `Case`, its parameters on the default device.

  Raises:
    ValueError: a number is too small, a checkpoint is damaged, or the draft's width
      is not the target's.
  """
  numbers = {
    'source_length': source_length,
    'new_tokens': new_tokens,
    'batch_size': batch_size,
    'gamma': num_draft,
  }
  for name, value in numbers.items():
    if value < 1:
      raise ValueError(f'{name}: {value}; give 1 or more')
  notes = []
  target_weights = _weights(target, 'target', seed)
  if target in SIZES and draft is None:
    target_weights = damped(target_weights, DRAFT_LAYERS, DAMPING)
    draft_weights = truncated(target_weights, DRAFT_LAYERS)
    notes.append(
      f'{target} with random weights. Controlled pair: the draft is the first '
      f'{DRAFT_LAYERS} layers of the target, whose later layers add {DAMPING:g} of '
      'what they would, so that the two agree often; acceptance is made, not learned.'
    )
  else:
    notes.append(f'Target: {target}{" with random weights" * (target in SIZES)}.')
    if draft is None and target == EMBEDDED:
      draft = EMBEDDED
    draft_weights = None
    if draft not in (None, NO_DRAFT):
      draft_weights = _weights(draft, 'draft', seed + 1)
      unrelated = ' with random weights, unrelated to the target' * (draft in SIZES)
      notes.append(f'Draft: {draft}{unrelated}.')
  width = target_weights.config.vocab_size
  if draft_weights is not None and draft_weights.config.vocab_size != width:
    raise ValueError(
      f'draft: {draft} has {draft_weights.config.vocab_size} logits, the target '
      f"{width}; choose a draft of the target's vocabulary, or --draft none"
    )
  if target == EMBEDDED:
    inputs_BE = _texts(batch_size, source_length, seed)
    notes.append("Sources: texts of the embedded corpus' test split.")
  else:
    ids = np.random.default_rng(seed)
    inputs_BE = ids.integers(3, width, (batch_size, source_length), np.int32)
    notes.append('Sources: random ids.')
  return Case(
    target=target_weights,
    draft=draft_weights,
    params=Params(
      leaves.restore(target_weights),
      None if draft_weights is None else leaves.restore(draft_weights),
    ),
    inputs_BE=inputs_BE,
    new_tokens=new_tokens,
    num_draft=num_draft,
    eos_id=NO_EOS if target in SIZES else text.EOS_ID,
    notes=tuple(notes),
  )


def random_weights(config: T5Config, seed: int) -> Weights:
  """Independent normals that keep the variance of what passes through."""
  generator = np.random.default_rng(seed)
  found = {}
  for name, shape in leaves.expected_shapes(config).items():
    if name.endswith('scale'):
      values = np.ones(shape, np.float32)
    else:
      # Large tied embeddings would repeat the last token for ever.
      small = name.endswith('/embedding') and config.logits_via_embedding
      scale = 0.1 if small else 1.0 if 'embedding' in name else shape[0] ** -0.5
      values = scale * generator.standard_normal(shape, np.float32)
    found[name] = leaves.array_leaf(np.asarray(values, np.float32))
  return Weights(config, found, {})


def damped(weights: Weights, num_layers: int, factor: float) -> Weights:
  """Layers from `num_layers` on add `factor` of what they added to the residuals."""

  def scaled(name, leaf):
    match = _ADDED.search(name)
    if match is None or int(match[1]) < num_layers:
      return leaf
    return leaves.array_leaf(np.float32(factor) * leaves.read_whole(leaf))

  found = {name: scaled(name, leaf) for name, leaf in weights.leaves.items()}
  return weights._replace(leaves=found)


def truncated(weights: Weights, num_layers: int) -> Weights:
  """The first layers of encoder and decoder, with the same embedding and head."""
  config = dataclasses.replace(
    weights.config,
    num_encoder_layers=min(num_layers, weights.config.num_encoder_layers),
    num_decoder_layers=min(num_layers, weights.config.num_decoder_layers),
  )
  kept = leaves.expected_shapes(config)
  return Weights(config, {name: weights.leaves[name] for name in kept}, {})


def _weights(name: str, role: str, seed: int) -> Weights:
  if name in SIZES:
    return random_weights(T5Config.from_size(name), seed)
  if name == EMBEDDED:
    name = str(ASSETS / f'{role}.safetensors')
  if not name.startswith('gs://') and not Path(name).expanduser().exists():
    raise ValueError(
      f"{role}: {name!r} is neither 'embedded', a published size ({', '.join(SIZES)}) "
      'nor a checkpoint; check the path'
    )
  weights = formats.open_weights(name)
  return weights._replace(config=dataclasses.replace(weights.config, dtype='float32'))


def _texts(batch_size: int, length: int, seed: int) -> np.ndarray:
  vocabulary = text.sentencepiece_vocabulary(ASSETS / 'vocab.model')
  examples = random.Random(seed).choices(corpus.read_corpus('test'), k=batch_size)
  rows = text.encode_sources(
    vocabulary,
    [corpus.PREFIXES[each.task] + each.source for each in examples],
    length,
    truncate=True,
  )
  return text.pad(rows, length)
