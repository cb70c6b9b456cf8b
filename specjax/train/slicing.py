"""A draft's first weights, cut out of its target: some layers, some of each width.

Layers are copied whole. Of each width the units with most weight are kept, in their
old order:

  embedding    D' of the residual stream's dimensions, the same everywhere: those of
               the largest mean square over all embeddings
  heads        H' of a stack's self-attention heads, the same in all of its layers,
               since they share one relative bias; of cross-attention, in each layer
  head_dim     the first K' of each head
  mlp          F' units of each feed-forward block

A unit's weight is the product of the norms of what goes in (query, or wi_0) and of
what comes out. The result is the target's own function if what is left out does
nothing: norms are over D' instead of D numbers, so their scales are multiplied by
sqrt(D / D'), and what a tied head makes of D'^-1/2 is undone. Otherwise it is where
training begins.
"""

import math
from collections.abc import Sequence
from typing import Any

import flax.traverse_util
import numpy as np

from specjax.models.t5 import T5Config

_SAME = (
  'vocab_size', 'mlp_activations', 'logits_via_embedding', 'scale_tied_logits',
  'relative_attention_num_buckets', 'relative_attention_max_distance',
)  # fmt: skip
_WIDTHS = (
  'emb_dim', 'num_heads', 'head_dim', 'mlp_dim', 'num_encoder_layers',
  'num_decoder_layers',
)  # fmt: skip


def spread(num_layers: int, count: int) -> tuple[int, ...]:
  """`count` of `num_layers` layers, evenly spaced, ends included; one is the last.

  Example:
    >>> spread(24, 4), spread(6, 3), spread(6, 1)
    ((0, 8, 15, 23), (0, 3, 5), (5,))
  """
  if not 1 <= count <= num_layers:
    raise ValueError(
      f'layers: {count} of {num_layers}; a draft cut from a target has from 1 to as '
      'many as the target'
    )
  if count == 1:
    return (num_layers - 1,)
  return tuple(int(i * (num_layers - 1) / (count - 1) + 0.5) for i in range(count))


def cut(
  params: Any,
  target: T5Config,
  draft: T5Config,
  *,
  encoder_layers: Sequence[int] = (),
  decoder_layers: Sequence[int] = (),
) -> dict[str, Any]:
  """A draft's first parameters from its target's.

  Args:
    params: the target's, under T5X's names.
    target: its shape.
    draft: the draft's; no width or depth larger, everything else equal.
    encoder_layers: the target's layers that become the draft's 0, 1, ..; empty:
      `spread`.
    decoder_layers: likewise.

  Returns:
    float32 NumPy arrays under T5X's names.

  Raises:
    ValueError: shapes that can not be cut from the target's, or bad layers.
  """
  for name in _SAME:
    if getattr(draft, name) != getattr(target, name):
      raise ValueError(
        f'{name}: {getattr(draft, name)!r} of the draft, {getattr(target, name)!r} of '
        "the target; a draft that starts from the target's weights has the target's"
      )
  for name in _WIDTHS:
    if getattr(draft, name) > getattr(target, name):
      raise ValueError(
        f'{name}: {getattr(draft, name)} of the draft, {getattr(target, name)} of the '
        "target; give no more than the target's, or start 'random'"
      )
  old = {
    name: np.asarray(leaf, np.float32)
    for name, leaf in flax.traverse_util.flatten_dict(dict(params), sep='/').items()
  }
  kept_D = _largest(
    np.square(old['token_embedder/embedding']).mean(axis=0), draft.emb_dim
  )
  new = {'token_embedder/embedding': old['token_embedder/embedding'][:, kept_D]}
  for stack, asked in (('encoder', encoder_layers), ('decoder', decoder_layers)):
    depth = getattr(target, f'num_{stack}_layers')
    count = getattr(draft, f'num_{stack}_layers')
    chosen = _check_layers(
      f'{stack}_layers', asked or spread(depth, count), depth, count
    )
    new |= _cut_stack(old, stack, chosen, target, draft, kept_D)
  if not target.logits_via_embedding:
    head = 'decoder/logits_dense/kernel'
    new[head] = old[head][kept_D]
  elif target.scale_tied_logits:
    # A tied head multiplies by D'^-1/2 where the target's multiplies by D^-1/2.
    new['decoder/decoder_norm/scale'] *= math.sqrt(draft.emb_dim / target.emb_dim)
  return flax.traverse_util.unflatten_dict(new, sep='/')


def _check_layers(
  field: str, layers: Sequence[int], depth: int, count: int
) -> tuple[int, ...]:
  if len(layers) != count or not all(0 <= layer < depth for layer in layers):
    raise ValueError(
      f'{field}: {tuple(layers)}; give {count} of the layers 0 to {depth - 1}'
    )
  return tuple(layers)


def _largest(weight_X: np.ndarray, count: int) -> np.ndarray:
  """Places of the `count` largest, ascending; ties go to the first."""
  return np.sort(np.argsort(-weight_X, kind='stable')[:count])


def _cut_stack(old, stack, layers, target, draft, kept_D) -> dict[str, np.ndarray]:
  grown = math.sqrt(target.emb_dim / draft.emb_dim)
  names = ('attention',) if stack == 'encoder' else ('self_attention',)
  weights = [
    _head_weights(old, f'{stack}/layers_{i}/{names[0]}', target) for i in layers
  ]
  shared_H = _largest(np.sum(weights, axis=0), draft.num_heads)
  bias = f'{stack}/relpos_bias/rel_embedding'
  new = {bias: old[bias][shared_H]}
  norm = f'{stack}/{stack}_norm/scale'
  new[norm] = old[norm][kept_D] * grown
  for place, layer in enumerate(layers):
    before, after = f'{stack}/layers_{layer}', f'{stack}/layers_{place}'
    for name in old:
      if name.startswith(f'{before}/') and name.endswith('/scale'):
        new[name.replace(before, after)] = old[name][kept_D] * grown
    heads = {names[0]: shared_H}
    if stack == 'decoder':
      cross = 'encoder_decoder_attention'
      weight_H = _head_weights(old, f'{before}/{cross}', target)
      heads[cross] = _largest(weight_H, draft.num_heads)
    for name, kept_H in heads.items():
      columns = kept_H[:, None] * target.head_dim + np.arange(draft.head_dim)
      kept_J = columns.reshape(-1)
      for kernel in ('query', 'key', 'value'):
        whole = old[f'{before}/{name}/{kernel}/kernel']
        new[f'{after}/{name}/{kernel}/kernel'] = whole[kept_D][:, kept_J]
      whole = old[f'{before}/{name}/out/kernel']
      new[f'{after}/{name}/out/kernel'] = whole[kept_J][:, kept_D]
    gated = len(target.mlp_activations) > 1
    inputs = ['wi_0', 'wi_1'] if gated else ['wi']
    out = old[f'{before}/mlp/wo/kernel']
    into = old[f'{before}/mlp/{inputs[0]}/kernel']
    weight_F = np.linalg.norm(into, axis=0) * np.linalg.norm(out, axis=1)
    kept_F = _largest(weight_F, draft.mlp_dim)
    for name in inputs:
      whole = old[f'{before}/mlp/{name}/kernel']
      new[f'{after}/mlp/{name}/kernel'] = whole[kept_D][:, kept_F]
    new[f'{after}/mlp/wo/kernel'] = out[kept_F][:, kept_D]
  return new


def _head_weights(old, attention: str, config: T5Config) -> np.ndarray:
  """[H]; norm of a head's queries times norm of what it gives."""
  shape = (config.num_heads, config.head_dim)
  query_DHK = old[f'{attention}/query/kernel'].reshape(-1, *shape)
  out_HKD = old[f'{attention}/out/kernel'].reshape(*shape, -1)
  query_H = np.sqrt(np.square(query_DHK).sum(axis=(0, 2)))
  return query_H * np.sqrt(np.square(out_HKD).sum(axis=(1, 2)))
