"""Reading a pair from its folder, and what makes two files a pair."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints import store
from specjax.config import CACHE_DTYPES, TARGET_WEIGHTS, check_choice
from specjax.core.types import Model, Output, Params
from specjax.data import text as text_lib
from specjax.data.text import Vocabulary
from specjax.generation import SOURCE_BUCKETS
from specjax.models.quantized import int8_model, quantize_int8
from specjax.models.t5 import t5_model
from specjax.pair import EMBEDDED, Pair
from specjax.shard import shard_pair

ASSETS = Path(__file__).parent / 'assets'
# Embeddings are padded to a multiple of 128, or of that for each device.
MAX_PADDING = 1024


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
) -> Pair:
  """Loads a target, its draft and their vocabulary.

  Args:
    name: 'embedded', or a folder with `target.safetensors`, `vocab.model`,
      `draft.safetensors` (may be missing) and `pair.json` (may be missing: a
      dictionary with `max_source`, default 512, `extra_ids`, default 100, and
      `vocabulary`, a file name or 'bytes').
    draft: another draft, a safetensors file or a pair's folder.
    dtype: of weights and activations, 'float32' or 'bfloat16'.
    cache_dtype: of both models' cached keys and values; 'dtype' is that of the
      activations.
    target_weights: 'full', or 'int8' for a target with int8 kernels, whose own law
      outputs then have (`models.quantized`, extra `int8`). The draft stays as it is.
    table_text: what method 'table' counts, one output text a line.
    mesh: devices that decode together, see `specjax.shard_pair`; parameters go
      straight into shards.
    shard_draft: split the draft as well.

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
  folder = ASSETS if str(name) == EMBEDDED else Path(name).expanduser()
  if not folder.is_dir():
    raise ValueError(
      f"model: {str(name)!r} is neither 'embedded' nor a folder with a pair's files"
    )
  manifest = _read_manifest(folder)
  vocabulary = _read_vocabulary(folder, manifest)
  max_source = manifest['max_source']
  target = store.load(folder / 'target.safetensors', dtype=dtype)
  config = dataclasses.replace(target.config, dtype=dtype)
  if config.vocab_size < vocabulary.size:
    raise ValueError(
      f'model: the target has {config.vocab_size} logits, its vocabulary '
      f'{vocabulary.size} ids; they do not belong together'
    )
  kept = None if cache_dtype == 'dtype' else cache_dtype
  make_model = functools.partial(t5_model, cache_dtype=kept)
  draft_path = _draft_path(folder, draft)
  draft_model = draft_config = draft_params = None
  if draft_path is not None:
    _check_vocabulary(draft_path.parent, folder, vocabulary)
    loaded = store.load(draft_path, dtype=dtype)
    draft_config = dataclasses.replace(loaded.config, dtype=dtype)
    _check_width(draft_path, draft_config.vocab_size, vocabulary.size)
    draft_model = resize_vocab(make_model(draft_config), config.vocab_size)
    draft_params = loaded.params
  target_model, target_params = make_model(config), target.params
  if target_weights == 'int8':
    target_model, target_params = int8_model(target_model), quantize_int8(target_params)
  params = Params(target_params, draft_params)
  pair = Pair(
    name=str(name),
    target=target_model,
    draft=draft_model,
    params=jax.device_put(params) if mesh is None else params,
    target_config=config,
    draft_config=draft_config,
    vocabulary=vocabulary,
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


def _draft_path(folder: Path, draft: str | Path | None) -> Path | None:
  if draft is None:
    path = folder / 'draft.safetensors'
    return path if path.exists() else None
  path = Path(draft).expanduser()
  return path / 'draft.safetensors' if path.is_dir() else path


def _read_manifest(folder: Path) -> dict[str, Any]:
  manifest = {'max_source': 512, 'extra_ids': 100, 'vocabulary': 'vocab.model'}
  path = folder / 'pair.json'
  if path.exists():
    try:
      manifest.update(json.loads(path.read_text(encoding='utf-8')))
    except (OSError, ValueError, TypeError) as error:
      raise ValueError(f'model: {path} is not valid JSON ({error})') from error
  return manifest


def _read_vocabulary(folder: Path, manifest: dict[str, Any]) -> Vocabulary:
  if manifest['vocabulary'] == 'bytes':
    return text_lib.byte_vocabulary(manifest['extra_ids'])
  path = folder / manifest['vocabulary']
  return text_lib.sentencepiece_vocabulary(path, manifest['extra_ids'])


def _check_vocabulary(draft_folder: Path, folder: Path, vocabulary: Vocabulary) -> None:
  """A draft that comes with a vocabulary must come with the target's."""
  manifest = _read_manifest(draft_folder)
  has_own = (draft_folder / manifest['vocabulary']).exists()
  if draft_folder.resolve() == folder.resolve() or not (
    has_own or manifest['vocabulary'] == 'bytes'
  ):
    return
  own = _read_vocabulary(draft_folder, manifest)
  same = own.size == vocabulary.size and all(
    own.piece(token) == vocabulary.piece(token) for token in range(own.size)
  )
  if not same:
    raise ValueError(
      f"draft_model: its vocabulary has {own.size} ids, the target's "
      f'{vocabulary.size}, and they must be the same; choose a draft of the '
      "target's vocabulary, or --method ngram"
    )


def _check_width(path: Path, width: int, size: int) -> None:
  """Padding may differ, vocabularies may not."""
  if width < size or width - size >= MAX_PADDING:
    raise ValueError(
      f"draft_model: {path} has {width} logits, the target's vocabulary {size} ids; "
      "choose a draft of the target's vocabulary, or --method ngram"
    )
