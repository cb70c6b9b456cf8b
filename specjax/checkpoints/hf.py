"""Hugging Face folders: config.json and safetensors, read lazily and written.

T5 1.0 and 1.1, Flan, mT5 and ByT5, as transformers 4 and 5 save them; neither
transformers nor torch is needed. Three of their conventions are not obvious:

* A head that is tied to the embedding is there under any of several names, or
  several times. Copies must agree; they are compared when they are read.
* transformers 4 takes `tie_word_embeddings` also for the question whether the
  decoder's output is scaled by d_model^-0.5. transformers 5 writes
  `scale_decoder_outputs` for that, and `tie_word_embeddings: true` in any case,
  beside a `lm_head.weight` that may well differ from the embedding (all of T5 1.1).
* 'gated-gelu' means the tanh approximation, 'gelu' alone the exact function.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoints import files, names, tensors
from specjax.checkpoints.leaves import Index, Leaf, Weights, expected_shapes
from specjax.checkpoints.store import write_atomically
from specjax.models.t5 import T5Config

CONFIG = 'config.json'
SINGLE = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
SHARD_BYTES = 5 * 10**9
MODEL_TYPES = ('t5', 'mt5')
_AGAIN = 'fetch or export the folder again'
_COUNTS = {
  'vocab_size': 'vocab_size',
  'd_model': 'emb_dim',
  'num_heads': 'num_heads',
  'd_kv': 'head_dim',
  'd_ff': 'mlp_dim',
  'num_layers': 'num_encoder_layers',
}
_OPTIONAL = ('relative_attention_num_buckets', 'relative_attention_max_distance')
_ACTIVATIONS = {
  'relu': 'relu',
  'gelu_new': 'gelu',
  'gelu_pytorch_tanh': 'gelu',
  'silu': 'silu',
  'swish': 'silu',
  'linear': 'linear',
}
_DENSE_ACT_FN = {
  'relu': 'relu',
  'gelu': 'gelu_new',
  'silu': 'silu',
  'linear': 'linear',
}
# Fields that T5's code takes for granted, and this code too.
_FIXED = {
  'decoder_start_token_id': 0,
  'pad_token_id': 0,
  'eos_token_id': 1,
  'layer_norm_epsilon': 1e-6,
}


def open_weights(path: str | os.PathLike) -> Weights:
  """Opens a folder; reads its configuration and the headers of its tensors.

  Args:
    path: of the folder, local or `gs://`, with `config.json` and
      `model.safetensors`, or `model.safetensors.index.json` and its shards.

  Returns:
    The weights under T5X's names; blocks are read by byte ranges.

  Raises:
    ValueError: a file is missing, damaged or cut, the model is no T5 or one that
      specjax can not compute, or a tensor is missing, surplus or of another shape;
      the message names the file and the tensor.
  """
  folder = files.resolve(path)
  fields = _read_json(f'{folder}/{CONFIG}')
  stored = _open_tensors(folder)
  try:
    config = config_from_fields(fields, has_head=names.HEAD in stored)
  except ValueError as error:
    raise ValueError(f'weights: {folder}/{CONFIG}: {error}') from error
  copies = [*names.EMBEDDINGS]
  if config.logits_via_embedding:
    copies.append(names.HEAD)
  present = [name for name in copies if name in stored]
  leaves = {}
  for name, shape in expected_shapes(config).items():
    place = names.hugging_face(name)
    is_embedding = place.name in names.EMBEDDINGS
    hf_names = (present or [place.name]) if is_embedding else [place.name]
    for hf_name in hf_names:
      _check_tensor(folder, hf_name, stored, shape[::-1] if place.transposed else shape)
    leaf = stored[hf_names[0]]
    if len(hf_names) > 1:
      leaf = _agreeing(folder, {each: stored[each] for each in hf_names})
    leaves[name] = tensors.transpose(leaf) if place.transposed else leaf
  known = {names.hugging_face(name).name for name in leaves} | {*copies, names.UNUSED}
  for hf_name in stored:
    if hf_name not in known:
      raise ValueError(
        f'weights: {folder} has a surplus tensor {hf_name}, which the network of its '
        f'{CONFIG} lacks; they do not belong together'
      )
  return Weights(config, leaves, {'source': str(folder)})


def config_from_fields(fields: Mapping[str, Any], *, has_head: bool) -> T5Config:
  """The network of a config.json.

  Args:
    fields: what the file holds.
    has_head: there is a tensor `lm_head.weight`.

  Returns:
    The configuration.

  Raises:
    ValueError: it is no T5's, or a field has a value that specjax can not compute.
  """
  model_type = fields.get('model_type', 't5')
  if model_type not in MODEL_TYPES:
    raise ValueError(
      f'model_type is {model_type!r}; specjax has the networks of '
      f'{" and ".join(MODEL_TYPES)}, which are also those of Flan-T5 and ByT5'
    )
  for field, value in _FIXED.items():
    found = fields.get(field)
    if found not in (None, value, [value]):
      raise ValueError(f'{field} is {found!r}; specjax needs {value}, as in all T5s')
  missing = [field for field in _COUNTS if field not in fields]
  if missing:
    raise ValueError(f'lacks {", ".join(missing)}; {_AGAIN}')
  counts = {ours: fields[theirs] for theirs, ours in _COUNTS.items()}
  depth = fields.get('num_decoder_layers')
  tied = fields.get('tie_word_embeddings', True)
  scaled = fields.get('scale_decoder_outputs', tied and model_type == 't5')
  # Unscaled, a head of its own is one whatever `tie_word_embeddings` says; scaled,
  # it must be a copy of the embedding, and is compared with it.
  logits_via_embedding = scaled or (tied and not has_head)
  return T5Config(
    **counts,
    num_decoder_layers=counts['num_encoder_layers'] if depth is None else depth,
    mlp_activations=_activations(fields),
    logits_via_embedding=bool(logits_via_embedding),
    scale_tied_logits=bool(scaled or not logits_via_embedding),
    **{field: fields[field] for field in _OPTIONAL if field in fields},
  )


def write(
  path: str | os.PathLike,
  weights: Weights,
  *,
  dtype: str | None = None,
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Writes a folder that transformers loads, tensor by tensor.

  `config.json` comes last: without it the folder is no model. A folder that was
  interrupted is continued.

  Args:
    path: of a local folder, made if it is missing.
    weights: under T5X's names.
    dtype: 'float32', 'bfloat16', or None for each leaf's own.
    shard_bytes: largest file; a larger model is split and gets an index.

  Raises:
    ValueError: there is a model already, the folder can not be written, or Hugging
      Face's T5 has no such feed-forward block.
  """
  folder = Path(path).expanduser()
  if (folder / CONFIG).exists():
    raise ValueError(f'{folder} holds a model already; name another folder')
  fields = _fields(weights.config, dtype or _common_dtype(weights))
  renamed = {}
  for name, leaf in weights.leaves.items():
    place = names.hugging_face(name)
    if dtype is not None:
      leaf = tensors.cast(leaf, np.dtype(dtype))
    renamed[place.name] = tensors.transpose(leaf) if place.transposed else leaf
  shards = list(_shards(dict(sorted(renamed.items())), shard_bytes))
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(
      f'cannot make {folder} ({error.strerror}); name another'
    ) from error
  if len(shards) == 1:
    tensors.write_file(folder / SINGLE, shards[0], {'format': 'pt'})
  else:
    places = {}
    for number, shard in enumerate(shards, 1):
      name = f'model-{number:05}-of-{len(shards):05}.safetensors'
      tensors.write_file(folder / name, shard, {'format': 'pt'})
      places.update(dict.fromkeys(shard, name))
    size = sum(leaf.nbytes for leaf in renamed.values())
    index = {'metadata': {'total_size': size}, 'weight_map': places}
    _write_json(folder / INDEX, index)
  ids = ('decoder_start_token_id', 'eos_token_id', 'pad_token_id')
  _write_json(folder / 'generation_config.json', {key: _FIXED[key] for key in ids})
  _write_json(folder / CONFIG, fields)


def _activations(fields: Mapping[str, Any]) -> tuple[str, ...]:
  projection = fields.get('feed_forward_proj', 'relu')
  parts = str(projection).split('-')
  derived = 'gelu_new' if projection == 'gated-gelu' else parts[-1]
  # Saved by transformers 4.20 and later; the field that it computes with.
  name = fields.get('dense_act_fn', derived)
  gated = fields.get('is_gated_act', parts[0] == 'gated')
  if len(parts) > 1 + (parts[0] == 'gated') or name not in _ACTIVATIONS:
    exact = '; the exact GELU is not what any published T5 has' * (name == 'gelu')
    raise ValueError(
      f'feed_forward_proj is {projection!r} (dense_act_fn {name!r}); specjax has '
      f'{", ".join(_ACTIVATIONS)}, alone or gated{exact}'
    )
  return (_ACTIVATIONS[name], 'linear') if gated else (_ACTIVATIONS[name],)


def _fields(config: T5Config, dtype: str) -> dict[str, Any]:
  """What transformers 4 and 5 read from config.json."""
  first, *others = config.mlp_activations
  if others not in ([], ['linear']):
    raise ValueError(
      f'mlp_activations={config.mlp_activations!r}: the second branch of a gated '
      "block is 'linear' in Hugging Face's T5; this model can not be written for it"
    )
  act = _DENSE_ACT_FN[first]
  projection = (
    act if not others else 'gated-gelu' if first == 'gelu' else f'gated-{act}'
  )
  tied = config.logits_via_embedding
  return {
    'architectures': ['T5ForConditionalGeneration'],
    'model_type': 't5',
    **{theirs: getattr(config, ours) for theirs, ours in _COUNTS.items()},
    'num_decoder_layers': config.num_decoder_layers,
    **{field: getattr(config, field) for field in _OPTIONAL},
    'feed_forward_proj': projection,
    'dense_act_fn': act,
    'is_gated_act': bool(others),
    'tie_word_embeddings': tied,
    'scale_decoder_outputs': tied and config.scale_tied_logits,
    'is_encoder_decoder': True,
    **_FIXED,
    'torch_dtype': dtype,
  }


def _common_dtype(weights: Weights) -> str:
  dtypes = {leaf.dtype.name for leaf in weights.leaves.values()}
  return dtypes.pop() if len(dtypes) == 1 else 'float32'


def _shards(renamed: dict[str, Leaf], limit: int) -> Iterator[dict[str, Leaf]]:
  """Groups tensors, in order, into files of at most `limit` bytes (or one tensor)."""
  shard: dict[str, Leaf] = {}
  size = 0
  for name, leaf in renamed.items():
    if shard and size + leaf.nbytes > limit:
      yield shard
      shard, size = {}, 0
    shard[name] = leaf
    size += leaf.nbytes
  yield shard


def _open_tensors(folder: str) -> dict[str, Leaf]:
  """All tensors of a folder, whichever files they are in."""
  if files.exists(f'{folder}/{SINGLE}'):
    return tensors.open_file(f'{folder}/{SINGLE}')[0]
  if not files.exists(f'{folder}/{INDEX}'):
    raise ValueError(
      f'weights: {folder} has neither {SINGLE} nor {INDEX}; save the model with '
      'save_pretrained(..., safe_serialization=True)'
    )
  places = _read_json(f'{folder}/{INDEX}').get('weight_map')
  if not isinstance(places, dict) or not places:
    raise ValueError(f'weights: {folder}/{INDEX} has no weight_map; {_AGAIN}')
  shards = {
    name: tensors.open_file(f'{folder}/{name}')[0]
    for name in sorted({*places.values()})
  }
  stored = {}
  for name, shard in places.items():
    if name not in shards[shard]:
      raise ValueError(f'weights: {folder}/{shard} lacks {name}; {_AGAIN}')
    stored[name] = shards[shard][name]
  return stored


def _check_tensor(
  folder: str, name: str, stored: Mapping[str, Leaf], shape: tuple[int, ...]
) -> None:
  remedy = f'the tensors and {CONFIG} do not belong together, or some were lost'
  if name not in stored:
    raise ValueError(f'weights: {folder} lacks {name} {shape}; {remedy}')
  if stored[name].shape != shape:
    raise ValueError(
      f'weights: {folder}: {name} has shape {stored[name].shape}, expected {shape}; '
      f'{remedy}'
    )


def _agreeing(folder: str, copies: Mapping[str, Leaf]) -> Leaf:
  """The first of several tensors that must be equal, compared block by block."""
  first, *others = copies

  def read(index: Index) -> np.ndarray:
    values = copies[first].read(index)
    for name in others:
      if not np.array_equal(copies[name].read(index), values):
        raise ValueError(
          f'weights: {folder}: {name} and {first} must be equal, since {CONFIG} ties '
          'them, and are not; if the head is its own, set "tie_word_embeddings" and '
          '"scale_decoder_outputs" to false there'
        )
    return values

  return Leaf(copies[first].shape, copies[first].dtype, read)


def _read_json(path: str) -> dict[str, Any]:
  try:
    found = json.loads(files.read(path))
  except ValueError as error:
    if str(error).startswith('cannot read'):
      raise ValueError(f'weights: {error}') from error
    raise ValueError(
      f'weights: {path} is not valid JSON ({error}); {_AGAIN}'
    ) from error
  if not isinstance(found, dict):
    raise ValueError(f'weights: {path} is no JSON object; {_AGAIN}')
  return found


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
  write_atomically(path, (json.dumps(value, indent=2) + '\n').encode())
