"""T5 behind the `Model` interface: encode once, then extend by any width."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import shapes
from specjax.core import types
from specjax.models.t5.config import T5Config
from specjax.models.t5.layers import KeyValue
from specjax.models.t5.network import Transformer, padding_bias


class T5Cache(NamedTuple):
  """What decoding keeps; every leaf has the batch for its first axis.

  Attributes:
    sources: per decoder layer, the projected encoder output, `[B, H, E, K]`.
    source_bias: float32 `[B, 1, 1, E]`, hides the source's padding.
    slots: per decoder layer, keys and values of the decoder's tokens,
      `[B, H, S, K]`. There is no cursor: the caller says where to write. A
      batch of one has no batch axis here, `[H, S, K]`: XLA's CPU compiler
      copies a four-dimensional cache six times per layer and step, for a
      reshape that it fuses into the update.
  """

  sources: tuple[KeyValue, ...]
  source_bias: jax.Array
  slots: tuple[KeyValue, ...]


def cache_axes(cache: T5Cache) -> T5Cache:
  """The logical axes of a cache, under T5X's names: a tuple for each leaf."""

  def axes(leaf: jax.Array) -> tuple[str, ...]:
    return ('batch', 'heads', 'length', 'kv')[-leaf.ndim :]

  sources, slots = jax.tree.map(axes, (cache.sources, cache.slots))
  return T5Cache(sources, ('batch', None, None, 'length'), slots)  # type: ignore


def write_slots(slots: jax.Array, new_BHTK: jax.Array, start_B: jax.Array) -> jax.Array:
  """Overwrites slots `[start, start + T)` of each row.

  Args:
    slots: `[B, H, S, K]`, or `[H, S, K]` for a batch of one.
    new_BHTK: what to write.
    start_B: int32 in [0, S - T].

  Returns:
    An array like `slots`.
  """
  write_row = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
  if slots.ndim == 3:
    return write_row(slots, new_BHTK[0].astype(slots.dtype), start_B[0])
  return jax.vmap(write_row)(slots, new_BHTK.astype(slots.dtype), start_B)


def t5_model(config: T5Config, cache_dtype: str | None = None) -> types.Model:
  """Returns the `Model` of a T5, the same object for the same arguments.

  Args:
    config: the T5's shape.
    cache_dtype: of the keys and values that decoding keeps; None is that of the
      activations. Attention computes in the wider of the two. In another dtype than
      the activations', keys and values are rounded, and the law is that model's.

  Returns:
    `init` and `extend` over a `T5Cache`; `params` are those of
    `Transformer(config)`, under T5X's names.
  """
  return _t5_model(config, cache_dtype or config.dtype)


@functools.cache
def _t5_model(config: T5Config, cache_dtype: str) -> types.Model:
  module = Transformer(config)
  # Linen types what `apply` returns as one of all that it could return.
  apply: Any = module.apply

  def init(params: Any, inputs_BE: shapes.Tokens_BE, *, num_slots: int) -> T5Cache:
    with jax.named_scope('encode'):
      sources = apply({'params': params}, inputs_BE, method=module.encode_key_values)
      sources = jax.tree.map(lambda leaf: leaf.astype(cache_dtype), sources)
    batch = inputs_BE.shape[0]
    rows = () if batch == 1 else (batch,)
    shape = (*rows, config.num_heads, num_slots, config.head_dim)
    empty = KeyValue(jnp.zeros(shape, cache_dtype), jnp.zeros(shape, cache_dtype))
    slots = (empty,) * config.num_decoder_layers
    return T5Cache(sources, padding_bias(inputs_BE), slots)

  def extend(
    params: Any,
    cache: T5Cache,
    tokens_BT: shapes.Tokens_BT,
    start_B: shapes.Int_B,
  ) -> tuple[types.Output, T5Cache]:
    num_slots = cache.slots[0].key.shape[-2]

    def write_layer(old: KeyValue, new: KeyValue) -> KeyValue:
      return KeyValue(
        *(write_slots(o, n, start_B) for o, n in zip(old, new, strict=True))
      )

    with jax.named_scope('extend'):
      logits_BTV, hidden_BTD, slots = apply(
        {'params': params},
        tokens_BT,
        cache.sources,
        cache.source_bias,
        start_B,
        num_slots,
        [functools.partial(write_layer, old) for old in cache.slots],
        method=module.decode,
      )
    output = types.Output(logits_BTV, hidden_BTD)
    return output, T5Cache(cache.sources, cache.source_bias, slots)

  return types.Model(init, extend)
