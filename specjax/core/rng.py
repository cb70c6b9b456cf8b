"""Random streams: one key per row, one block key per round, one stream per use.

  row key    fold_in(key(seed), example_id)     independent of batch packing
  block key  fold_in(row_key, length)           at the start of a round
  streams    split(block_key, 3)                draft / accept / resample

Keying by the absolute position of a token instead of by block would correlate
the coins of overlapping blocks and biases block verification (TV 0.094).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import shapes


class BlockKeys(NamedTuple):
  """The three independent streams of one round."""

  draft_B: shapes.RowKeys
  accept_B: shapes.RowKeys
  resample_B: shapes.RowKeys


def check_keys(row_key_B) -> None:
  """Raises unless `row_key_B` are typed threefry keys, one per row.

  Raises:
    TypeError: raw `uint32` keys, or another implementation: vmapped `rbg` keys
      give correlated rows and bias the loop measurably.
  """
  if not jnp.issubdtype(row_key_B.dtype, jax.dtypes.prng_key):
    raise TypeError(
      f'row_key_B: typed keys are needed, got dtype {row_key_B.dtype}; make them '
      'with specjax.row_keys(seed, example_ids)'
    )
  implementation = str(jax.random.key_impl(row_key_B))
  if 'fry' not in implementation:
    raise TypeError(
      f'row_key_B: threefry2x32 keys are needed, got {implementation}; make them '
      'with specjax.row_keys(seed, example_ids)'
    )


def row_keys(seed, example_id_B) -> shapes.RowKeys:
  """`fold_in(key(seed), example_id)` for each row.

  Args:
    seed: an integer, or int32 [B] for a seed per row.
    example_id_B: int32 [B]; identifies the example, not its place in a batch.

  Returns:
    typed threefry keys, [B].

  Example:
    >>> row_keys(0, jnp.arange(3)).shape
    (3,)
  """
  example_id_B = jnp.asarray(example_id_B)
  return _row_keys(
    jnp.broadcast_to(jnp.asarray(seed), example_id_B.shape), example_id_B
  )


@jax.jit
@jax.vmap
def _row_keys(seed, example_id):
  return jax.random.fold_in(jax.random.key(seed, impl='threefry2x32'), example_id)


def block_keys(row_key_B: shapes.RowKeys, length_B: shapes.Int_B) -> BlockKeys:
  """The streams of the round that starts when `length` tokens are emitted."""
  block_key_B = jax.vmap(jax.random.fold_in)(row_key_B, length_B)
  key_B3 = jax.vmap(lambda key: jax.random.split(key, 3))(block_key_B)
  return BlockKeys(key_B3[:, 0], key_B3[:, 1], key_B3[:, 2])


def uniform(key_B: shapes.RowKeys, count: int) -> shapes.Float_BG:
  """float32 [B, count] in [0, 1): multiples of 2**-23, exact zeros included."""
  return jax.vmap(lambda key: jax.random.uniform(key, (count,), jnp.float32))(key_B)


def argmax(x_XV) -> jax.Array:
  """int32 [...]; the lowest id among the largest values of the last axis.

  Two plain reductions: XLA on CPU runs `jnp.argmax` one element at a time, which
  at V = 4224 takes ten times as long and would cost more than a small draft model.
  """
  num_ids = x_XV.shape[-1]
  top_X1 = jnp.max(x_XV, axis=-1, keepdims=True)
  id_XV = jax.lax.broadcasted_iota(jnp.int32, x_XV.shape, x_XV.ndim - 1)
  return jnp.min(jnp.where(x_XV == top_X1, id_XV, num_ids - 1), axis=-1)


def categorical(key_B: shapes.RowKeys, logp_BV: shapes.Float_BV) -> shapes.Int_B:
  """One draw per row from log-weights, which need not be normalised.

  Gumbel-max, the draws of `jax.random.categorical`; mode 'high' keeps events below
  1e-7 unbiased. When every row is a point mass
  (greedy decoding) no noise is generated: the draw is the argmax either way.

  Args:
    key_B: the key is consumed.
    logp_BV: float [B, V]; -inf for impossible ids; at least one finite id a row.
  """

  def noisy():
    shape, dtype = logp_BV.shape[1:], logp_BV.dtype
    noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, shape, dtype, mode='high'))(
      key_B
    )
    return logp_BV + noise_BV

  support_B = jnp.sum(logp_BV > -jnp.inf, axis=-1)
  return argmax(jax.lax.cond(jnp.all(support_B == 1), lambda: logp_BV, noisy))
