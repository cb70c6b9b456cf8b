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

from specjax.checkpoints import files, formats, leaves
from specjax.checkpoints.leaves import Weights
from specjax.config import DTYPES, check_budget, check_choice
from specjax.core.types import Params
from specjax.data import corpus, text
from specjax.models.t5 import T5Config
from specjax.models.t5.config import SIZES

ASSETS = Path(__file__).parents[1] / 'assets'
EMBEDDED = 'embedded'
NO_DRAFT = 'none'
TEXT_BATCHES = 4
DRAFT_LAYERS = 2
DAMPING = 0.03
NO_EOS = -1
_LAYER = re.compile(r'layers_(\d+)/')
# What a layer adds to the residual stream.
_ADDED = re.compile(r'layers_(\d+)/(.*attention/out|mlp/wo)/kernel')


class Case(NamedTuple):
  """One benchmark: every system decodes this, greedily.

  Attributes:
    target: the target's weights, for systems that load their own copy; the dtype of
      its configuration is everybody's.
    draft: the draft's, or None.
    params: the same, in that dtype, on the device.
    batches: int32 source ids `[B, E]`, decoded one after the other; 0 is padding.
    max_new_tokens: most tokens of an output, >= 1.
    num_draft: gamma.
    eos_id: ends a row; -1 for none.
    notes: sentences about where weights and sources come from.
  """

  target: Weights
  draft: Weights | None
  params: Params
  batches: tuple[np.ndarray, ...]
  max_new_tokens: int
  num_draft: int
  eos_id: int
  notes: tuple[str, ...]

  @property
  def batch_size(self) -> int:
    return len(self.batches[0])

  @property
  def dtype(self) -> str:
    return self.target.config.dtype


def make_case(
  model: str = EMBEDDED,
  *,
  size: str | None = None,
  draft: str | None = None,
  dtype: str = 'float32',
  source_length: int = 64,
  max_new_tokens: int = 64,
  batch_size: int = 1,
  num_batches: int | None = None,
  num_draft: int = 4,
  seed: int = 0,
) -> Case:
  """Reads or makes the weights and the sources.

  Args:
    model: 'embedded', a pair's folder, or the path of any checkpoint.
    size: a name of `SIZES`; then the target has random weights, and `model` is
      not read.
    draft: a checkpoint, a name of `SIZES`, or 'none'. None: a pair has its own; a
      size gets its first layers (`truncated`); a checkpoint none.
    dtype: of weights and activations, 'float32' or 'bfloat16'.
    source_length: E. The embedded pair gets texts, cut or padded to E, others E
      random ids.
    max_new_tokens: most tokens of an output. Rows end early only where the target
      is a checkpoint, at EOS.
    batch_size: B.
    num_batches: decoded one after the other; None: 4 of texts, 1 of random ids.
    num_draft: gamma.
    seed: of random weights and sources.

  Returns:
    The `Case`, its parameters on the default device.

  Raises:
    ValueError: a number is too small, a name is unknown, a checkpoint is damaged,
      or the draft's width is not the target's.
  """
  is_text = size is None and model == EMBEDDED
  if num_batches is None:
    num_batches = TEXT_BATCHES if is_text else 1
  numbers = {
    'source_length': source_length,
    'max_new_tokens': max_new_tokens,
    'batch_size': batch_size,
    'num_batches': num_batches,
  }
  for name, value in numbers.items():
    if value < 1:
      raise ValueError(f'{name}: {value}; give 1 or more')
  if num_draft < 1:
    raise ValueError(f'gamma: {num_draft}; give 1 or more')
  check_budget(num_draft, max_new_tokens)
  check_choice('dtype', dtype, DTYPES)
  if size is not None:
    check_choice('size', size, SIZES)
  notes = []
  target_weights = _weights(size or model, 'target', seed)
  if size is not None and draft is None:
    target_weights = damped(target_weights, DRAFT_LAYERS, DAMPING)
    draft_weights = truncated(target_weights, DRAFT_LAYERS)
    notes.append(
      f'{size} with random weights. Controlled pair: the draft is the first '
      f'{DRAFT_LAYERS} layers of the target, whose later layers add {DAMPING:g} of '
      'what they would, so that the two agree often; acceptance is made, not learned.'
    )
  else:
    notes.append(f'Target: {size or model}{" with random weights" * bool(size)}.')
    if draft is None and size is None and _in_pair(model, 'draft'):
      draft = model
    draft_weights = None
    if draft not in (None, NO_DRAFT):
      draft_weights = _weights(draft, 'draft', seed + 1)
      unrelated = ' with random weights, unrelated to the target' * (draft in SIZES)
      notes.append(f'Draft: {draft}{unrelated}.')
  width = target_weights.config.vocab_size
  if draft_weights is not None and draft_weights.config.vocab_size != width:
    raise ValueError(
      f'draft: {draft} has {draft_weights.config.vocab_size} logits, the target '
      f"{width}; choose a draft of the target's vocabulary, or --draft_model none"
    )
  num_rows = batch_size * num_batches
  if is_text:
    inputs_NE = _texts(num_rows, source_length, seed)
    notes.append("Sources: texts of the embedded corpus' test split.")
  else:
    generator = np.random.default_rng(seed)
    inputs_NE = generator.integers(3, width, (num_rows, source_length), np.int32)
    notes.append('Sources: random ids.')
  return Case(
    target=_in_dtype(target_weights, dtype),
    draft=None if draft_weights is None else _in_dtype(draft_weights, dtype),
    params=Params(
      leaves.restore(target_weights, dtype=dtype),
      None if draft_weights is None else leaves.restore(draft_weights, dtype=dtype),
    ),
    batches=tuple(np.split(inputs_NE, num_batches)),
    max_new_tokens=max_new_tokens,
    num_draft=num_draft,
    eos_id=text.EOS_ID if size is None else NO_EOS,
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


def _in_dtype(weights: Weights, dtype: str) -> Weights:
  return weights._replace(config=dataclasses.replace(weights.config, dtype=dtype))


def _in_pair(name: str, role: str) -> str | None:
  """The file of a pair's folder, if it is one that has it."""
  folder = str(ASSETS) if name == EMBEDDED else files.resolve(name)
  path = f'{folder}/{role}.safetensors'
  return path if files.exists(path) else None


def _weights(name: str, role: str, seed: int) -> Weights:
  if name in SIZES:
    return random_weights(T5Config.from_size(name), seed)
  path = _in_pair(name, role) or name
  if not path.startswith(files.BUCKET) and not Path(path).expanduser().exists():
    raise ValueError(
      f'{"model" if role == "target" else "draft_model"}: {name!r} is neither '
      "'embedded', a pair's folder nor a checkpoint; check the path, or give a "
      'published size with --size'
    )
  return formats.open_weights(path)


def _texts(num_rows: int, length: int, seed: int) -> np.ndarray:
  vocabulary = text.sentencepiece_vocabulary(ASSETS / 'vocab.model')
  examples = random.Random(seed).choices(corpus.read_corpus('test'), k=num_rows)
  rows = text.encode_sources(
    vocabulary,
    [corpus.PREFIXES[each.task] + each.source for each in examples],
    length,
    truncate=True,
  )
  return text.pad(rows, length)
