"""Reading a pair, from its folder or from two checkpoints, and what makes it one."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints import files, formats, hf, store
from specjax.checkpoints.leaves import restore
from specjax.config import CACHE_DTYPES, TARGET_WEIGHTS, check_choice
from specjax.core.types import Model, Output, Params
from specjax.data import vocabulary as vocabulary_lib
from specjax.data.text import Vocabulary
from specjax.generation import SOURCE_BUCKETS
from specjax.models.quantized import int8_model, quantize_int8
from specjax.models.t5 import T5Config, t5_model
from specjax.pair import EMBEDDED, Pair
from specjax.shard import param_shardings, shard_pair

ASSETS = Path(__file__).parent / 'assets'
# Embeddings are padded to a multiple of 128, or of that for each device.
MAX_PADDING = 1024
MAX_SOURCE = 512


def load_pair(
  name: str | Path = EMBEDDED,
  *,
  draft: str | Path | None = None,
  dtype: str = 'float32',
  cache_dtype: str = 'dtype',
  target_weights: str = 'full',
  table_text: str | Path | None = None,
  mesh: jax.sharding.Mesh | None = None,
  shard_draft: bool = False,
  vocabulary: str | Path | None = None,
) -> Pair:
  """Loads a target, its draft and their vocabulary.

  Args:
    name: 'embedded'; a folder with `target.safetensors`, `vocab.model`,
      `draft.safetensors` (may be missing) and `pair.json` (may be missing: a
      dictionary with `max_source`, default 512, `extra_ids`, default 100, and
      `vocabulary`, a file name or 'bytes'); or any checkpoint of a T5 (Hugging
      Face, T5X, Orbax, specjax), local or `gs://`.
    draft: another draft: any checkpoint, or a pair's folder.
    dtype: of weights and activations, 'float32' or 'bfloat16'.
    cache_dtype: of both models' cached keys and values; 'dtype' is that of the
      activations.
    target_weights: 'full', or 'int8' for a target with int8 kernels, whose own law
      outputs then have (`models.quantized`, extra `int8`). The draft stays as it is.
    table_text: what method 'table' counts, one output text a line.
    mesh: devices that decode together, see `specjax.shard_pair`; parameters go
      straight into shards.
    shard_draft: split the draft as well.
    vocabulary: a SentencePiece file or 'bytes'; None: what lies beside the target
      (vocab.model, spiece.model, sentencepiece.model, or a tokenizer of ByT5's).

  Returns:
    The pair, its parameters on the mesh or on the default device.

  Raises:
    ValueError: missing or damaged files, vocabularies that differ, or int8 weights
      without qwix or on a mesh.
  """
  check_choice('cache_dtype', cache_dtype, CACHE_DTYPES)
  check_choice('target_weights', target_weights, TARGET_WEIGHTS)
  if target_weights == 'int8' and mesh is not None:
    raise ValueError(
      f"target_weights: 'int8' runs on one device, not on a mesh of {mesh.size}; "
      "give --mesh_data 1 --mesh_model 1, or target_weights 'full'"
    )
  place = str(ASSETS) if str(name) == EMBEDDED else files.resolve(name)
  if not place.startswith(files.BUCKET) and not Path(place).exists():
    raise ValueError(
      f"model: {str(name)!r} is neither 'embedded' nor a folder with a pair's files or "
      'a checkpoint; check the path (of a model on a hub, fetch the files first)'
    )
  manifest = vocabulary_lib.read_manifest(vocabulary_lib.folder_of(place))
  config, params = _load(place, 'target.safetensors', dtype, mesh)
  words = vocabulary_lib.find(place, vocabulary)
  if words is None:
    raise ValueError(
      f'vocabulary: none beside {place} (looked for '
      f'{", ".join(vocabulary_lib.NAMES)}, or a tokenizer_config.json of ByT5); name a '
      "SentencePiece file with --vocabulary, or 'bytes'"
    )
  if vocabulary is None:
    _check_width('model', place, config.vocab_size, words.size)
  elif not _fits(config.vocab_size, words.size):
    raise ValueError(
      f'vocabulary: {vocabulary} has {words.size} ids, but {place} has '
      f'{config.vocab_size} logits; name the vocabulary that it was trained with, or '
      'leave the option out if that lies beside it'
    )
  kept = None if cache_dtype == 'dtype' else cache_dtype
  make_model = functools.partial(t5_model, cache_dtype=kept)
  draft_model = draft_config = draft_params = None
  draft_place = _draft_place(place, draft)
  if draft_place is not None:
    _check_vocabulary(draft_place, place, words)
    draft_config, draft_params = _load(draft_place, 'draft.safetensors', dtype, None)
    _check_width('draft_model', draft_place, draft_config.vocab_size, words.size)
    draft_model = resize_vocab(make_model(draft_config), config.vocab_size)
  target = make_model(config)
  if target_weights == 'int8':
    target, params = int8_model(target), quantize_int8(params)
  max_source = manifest.get('max_source', MAX_SOURCE)
  pair = Pair(
    name=str(name),
    target=target,
    draft=draft_model,
    params=Params(params, draft_params),
    target_config=config,
    draft_config=draft_config,
    vocabulary=words,
    max_source=max_source,
    source_buckets=(*(b for b in SOURCE_BUCKETS if b < max_source), max_source),
    table_text=None if table_text is None else str(table_text),
  )
  return pair if mesh is None else shard_pair(pair, mesh, shard_draft=shard_draft)


@functools.cache
def resize_vocab(model: Model, width: int) -> Model:
  """The model with `width` logits: surplus ones are cut, missing ones are -inf.

  For pairs whose vocabularies agree and whose paddings do not; the ids that are
  cut or added must be padding (`make_warp(vocab_size=...)` excludes them).
  """

  def extend(params, cache, tokens_BT, start_B):
    output, cache = model.extend(params, cache, tokens_BT, start_B)
    logits_BTV = output.logits_BTV[..., :width]
    missing = width - logits_BTV.shape[-1]
    if missing:
      logits_BTV = jnp.pad(
        logits_BTV, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf
      )
    return Output(logits_BTV, output.hidden_BTD), cache

  return Model(model.init, extend)


def _load(
  place: str, pair_file: str, dtype: str, mesh: jax.sharding.Mesh | None
) -> tuple[T5Config, Any]:
  """A T5 of any format, its parameters split over a mesh or on the default device.

  Args:
    place: a checkpoint, or the folder of a pair.
    pair_file: which file of a pair's folder is meant.
    dtype: of the parameters.
    mesh: each device gets its block of a target; None: all on one device.
  """
  if files.exists(f'{place}/{pair_file}'):
    place = f'{place}/{pair_file}'
  name = place.rpartition('/')[2]
  is_ours = name.endswith(formats.SPECJAX_SUFFIX) and name != hf.SINGLE
  if is_ours and not place.startswith(files.BUCKET):
    # Read at once: its hash is that of all parameters.
    loaded = store.load(place, dtype=dtype)
    config = loaded.config
    params = loaded.params if mesh is not None else jax.device_put(loaded.params)
  else:
    weights = formats.open_weights(place)
    config = weights.config
    shardings = None if mesh is None else param_shardings(config, mesh)
    params = restore(weights, dtype=dtype, shardings=shardings)
  return dataclasses.replace(config, dtype=dtype), params


def _draft_place(place: str, draft: str | Path | None) -> str | None:
  if draft is not None:
    found = str(ASSETS) if str(draft) == EMBEDDED else files.resolve(draft)
    if not found.startswith(files.BUCKET) and not Path(found).exists():
      raise ValueError(
        f"draft_model: {str(draft)!r} is neither 'embedded' nor a checkpoint or a "
        "pair's folder; check the path, or use --method ngram"
      )
    return found
  return place if files.exists(f'{place}/draft.safetensors') else None


def _check_vocabulary(draft_place: str, place: str, vocabulary: Vocabulary) -> None:
  """A draft that comes with a vocabulary must come with the target's."""
  folder = vocabulary_lib.folder_of(draft_place)
  own = None
  if folder != vocabulary_lib.folder_of(place):
    own = vocabulary_lib.find(draft_place)
  if own is None:
    return
  same = own.size == vocabulary.size and all(
    own.piece(token) == vocabulary.piece(token) for token in range(own.size)
  )
  if not same:
    raise ValueError(
      f"draft_model: its vocabulary has {own.size} ids, the target's "
      f'{vocabulary.size}, and they must be the same; choose a draft of the '
      "target's vocabulary, or --method ngram"
    )


def _fits(width: int, size: int) -> bool:
  """Padding may differ, vocabularies may not."""
  return 0 <= width - size < MAX_PADDING


def _check_width(field: str, place: str, width: int, size: int) -> None:
  if not _fits(width, size):
    remedy = (
      'name its own with --vocabulary'
      if field == 'model'
      else "choose a draft of the target's vocabulary, or --method ngram"
    )
    raise ValueError(
      f"{field}: {place} has {width} logits, the target's vocabulary {size} ids; "
      f'{remedy}'
    )
