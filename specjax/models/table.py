"""A Markov toy whose cache *is* the tokens that it was fed.

Its law over whole outputs can be enumerated, and every mistake that a real
key/value cache hides shows in that law: the logits depend on the last `order`
slots as read back from the cache, so a stale slot, a wrong position or another
row's slot conditions on a wrong token.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp

from specjax import shapes
from specjax.core import types


class TableCache(NamedTuple):
  """Tokens by slot, pre-filled with garbage ids, and the row's source."""

  tokens_BS: shapes.Tokens_BS
  source_B: shapes.Int_B


@functools.cache
def table_model(vocab_size: int, order: int = 1) -> types.Model:
  """A `Model` that looks its logits up by the last `order` tokens.

  The law of slot s is row `c` of the table, with

    c = sum_{o=0}^{order-1} y_{s-1-o} (V + 1)^o

  where y_j is the token in slot j for j >= 1, and V for the start slot 0 and
  before it, so that no context depends on the start token's id.

  Parameters: float32 [(V+1)^order, V]; or [R, (V+1)^order, V], one table for each
  kind of source: row b reads table `inputs_BE[b, 0] mod R`.

  Args:
    vocab_size: V.
    order: number of tokens that the law depends on, >= 0.

  Returns:
    A `Model` with a `TableCache`.
  """

  def init(params, inputs_BE, *, num_slots):
    garbage_S = (jnp.arange(num_slots, dtype=jnp.int32) * 7 + 5) % vocab_size
    tokens_BS = jnp.tile(garbage_S[None], (inputs_BE.shape[0], 1))
    if params.ndim == 2:
      return TableCache(tokens_BS, jnp.zeros(inputs_BE.shape[0], jnp.int32))
    return TableCache(tokens_BS, inputs_BE[:, 0] % params.shape[0])

  def extend(params, cache, tokens_BT, start_B):
    cache_BS = write_slots(cache.tokens_BS, tokens_BT, start_B)
    slot_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1])[None]
    context_BT = jnp.zeros_like(tokens_BT)
    for back in range(order):
      read_BT = slot_BT - back
      token_BT = jnp.take_along_axis(cache_BS, jnp.maximum(read_BT, 0), axis=1)
      token_BT = jnp.where(read_BT >= 1, token_BT, vocab_size)
      context_BT += token_BT * (vocab_size + 1) ** back
    if params.ndim == 2:
      logits_BTV = params[context_BT]
    else:
      logits_BTV = params[cache.source_B[:, None], context_BT]
    return types.Output(logits_BTV), TableCache(cache_BS, cache.source_B)

  return types.Model(init, extend)


def write_slots(
  cache_BS: shapes.Tokens_BS, tokens_BT: shapes.Tokens_BT, start_B: shapes.Int_B
) -> shapes.Tokens_BS:
  """Overwrites slots [start, start + T) of each row; drops what does not fit.

  Reads instead of scattering (slot s takes token s - start), because XLA on CPU
  scatters one element at a time.
  """
  num_slots, num_tokens = cache_BS.shape[1], tokens_BT.shape[1]
  from_BS = jnp.arange(num_slots)[None] - start_B[:, None]
  new_BS = jnp.take_along_axis(tokens_BT, jnp.clip(from_BS, 0, num_tokens - 1), axis=1)
  return jnp.where((from_BS >= 0) & (from_BS < num_tokens), new_BS, cache_BS)
