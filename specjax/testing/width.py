"""How far the laws of a wide pass are from those of a narrow one.

Verification runs the target on G + 1 tokens at once, plain decoding on one. Both
are the same function in exact arithmetic; in floating point they are different
programs with different roundings, and this measures by how much.
"""

import functools

import jax
import jax.numpy as jnp

from specjax import shapes
from specjax.core import types


@functools.partial(jax.jit, static_argnums=0, static_argnames='width')
def logits_by_width(
  model: types.Model,
  params: types.PyTree,
  inputs_BE: shapes.Tokens_BE,
  tokens_BS: shapes.Tokens_BS,
  *,
  width: int,
):
  """Logits [B, S, V] of given tokens, by passes of `width` tokens one after another.

  Raises:
    ValueError: a width that does not divide the number of tokens.
  """
  num_rows, num_tokens = tokens_BS.shape
  if width < 1 or num_tokens % width:
    raise ValueError(f'width: {width}; must divide the number of tokens, {num_tokens}')

  def one_pass(cache, start):
    tokens_BT = jax.lax.dynamic_slice_in_dim(tokens_BS, start, width, axis=1)
    start_B = jnp.full(num_rows, start, jnp.int32)
    output, cache = model.extend(params, cache, tokens_BT, start_B)
    return cache, output.logits_BTV

  cache = model.init(params, inputs_BE, num_slots=num_tokens)
  starts = jnp.arange(0, num_tokens, width, dtype=jnp.int32)
  _, logits_NBTV = jax.lax.scan(one_pass, cache, starts)
  logits_BNTV = jnp.moveaxis(logits_NBTV, 0, 1)
  return logits_BNTV.reshape(num_rows, num_tokens, -1)


def distance(model: types.Model, params, inputs_BE, tokens_BS, width: int) -> jax.Array:
  """TV [B, S] between the laws of passes of `width` tokens and of single ones.

  The total variation between sampled texts is at most the sum over positions.

  Args:
    model: a model; params: its parameters.
    inputs_BE: int32 sources.
    tokens_BS: int32 outputs, the start token first; S is a multiple of `width`.
    width: G + 1.
  """
  wide_BSV, narrow_BSV = (
    jax.nn.softmax(
      logits_by_width(model, params, inputs_BE, tokens_BS, width=w).astype(jnp.float32)
    )
    for w in (width, 1)
  )
  return 0.5 * jnp.sum(jnp.abs(wide_BSV - narrow_BSV), axis=-1)
