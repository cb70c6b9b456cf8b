"""Logits -> log-law: the one function that target, draft and baseline share.

Order (documented because nucleus sets depend on it): banned and padding ids,
minimum length, temperature, top-k, top-p of what top-k left. Everything in
float32. Ties at a threshold are kept, so that no result depends on the order
of ids; the greedy choice breaks ties by the lowest id (argmax).

T5X does the same with `temperature_sample`, except that it refuses top-k and
top-p together; the bisection on float bits follows its `binary_search.py`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import shapes
from specjax.core import rng
from specjax.core.types import Sampling

Warp = Callable[..., Any]

_NO_LIMIT = 2**30


def make_sampling(
  num_rows: int,
  *,
  temperature=0.0,
  top_k=0,
  top_p=1.0,
  min_new_tokens=0,
  max_new_tokens=_NO_LIMIT,
  num_draft=_NO_LIMIT,
) -> Sampling:
  """Per-row options from numbers, or from arrays [num_rows].

  Args: see `Sampling`. The defaults are greedy decoding without limits other
    than the buffer's length and the drafter's G.

  Example:
    >>> make_sampling(2, temperature=[0.0, 1.0]).temperature_B.tolist()
    [0.0, 1.0]
  """

  def rows(value, dtype):
    return jnp.broadcast_to(jnp.asarray(value, dtype), (num_rows,))

  return Sampling(
    temperature_B=rows(temperature, jnp.float32),
    top_k_B=rows(top_k, jnp.int32),
    top_p_B=rows(top_p, jnp.float32),
    min_new_tokens_B=rows(min_new_tokens, jnp.int32),
    max_new_tokens_B=rows(max_new_tokens, jnp.int32),
    num_draft_B=rows(num_draft, jnp.int32),
  )


@functools.cache
def make_warp(
  vocab_size: int | None = None,
  eos_id: int | None = None,
  banned_ids: Sequence[int] = (),
) -> Warp:
  """Builds `warp(logits_BTV, sampling, slot_BT) -> logp_BTV`.

  The result is cached: equal arguments give the identical function, so it can
  be a static argument of `jit` without recompiling.

  Args:
    vocab_size: ids from here on are padding of the embedding and never emitted
      (T5: 32,100 of 32,128). None: all ids are real.
    eos_id: the id that `min_new_tokens` keeps back. None: there is no EOS.
    banned_ids: a tuple of ids that are never emitted.

  Returns:
    A pure function. `slot_BT` (int32) is the buffer slot that each law is for;
    slot 1 is the first new token. Returns float32 log-probabilities, -inf for
    impossible ids; at temperature 0 the point mass on the argmax.
  """

  def warp(
    logits_BTV: shapes.Logits_BTV, sampling: Sampling, slot_BT: shapes.Tokens_BT
  ) -> shapes.Logits_BTV:
    x_BTV = logits_BTV.astype(jnp.float32)
    num_ids = x_BTV.shape[-1]
    id_V = np.arange(num_ids)
    dead_V = np.isin(id_V, np.asarray(banned_ids, np.int64))
    if vocab_size is not None:
      dead_V |= id_V >= vocab_size
    if dead_V.any():
      x_BTV = jnp.where(dead_V[None, None], -jnp.inf, x_BTV)
    if eos_id is not None:
      early_BT = slot_BT <= sampling.min_new_tokens_B[:, None]
      is_eos_V = id_V == eos_id
      x_BTV = jnp.where(early_BT[..., None] & is_eos_V[None, None], -jnp.inf, x_BTV)
    return _log_law(x_BTV, sampling)

  return warp


def _log_law(x_BTV, sampling: Sampling):
  """Temperature, top-k, top-p; greedy rows become point masses."""
  greedy_B = sampling.temperature_B <= 0

  def greedy():
    best_BT = rng.argmax(x_BTV)
    hit_BTV = jnp.arange(x_BTV.shape[-1])[None, None] == best_BT[..., None]
    return jnp.where(hit_BTV, jnp.float32(0), jnp.float32(-jnp.inf))

  def soft():
    temperature_B = jnp.where(greedy_B, 1.0, sampling.temperature_B)
    # The maximum is taken off before the division and stays at 0 after it: a tiny
    # temperature then gives a point mass rather than inf - inf or 0 / 0.
    top_BT1 = jnp.max(x_BTV, axis=-1, keepdims=True)
    z_BTV = (x_BTV - top_BT1) / temperature_B[:, None, None]
    z_BTV = jnp.where(x_BTV == top_BT1, jnp.float32(0), z_BTV)
    # Real branches again: a filter that no row uses costs nothing.
    z_BTV = jax.lax.cond(
      jnp.any(sampling.top_k_B > 0),
      lambda: _keep_top_k(z_BTV, sampling.top_k_B),
      lambda: z_BTV,
    )
    z_BTV = jax.lax.cond(
      jnp.any(sampling.top_p_B < 1),
      lambda: _keep_top_p(z_BTV, sampling.top_p_B),
      lambda: z_BTV,
    )
    logp_BTV = jax.nn.log_softmax(z_BTV, axis=-1)
    return jnp.where(greedy_B[:, None, None], greedy(), logp_BTV)

  # A real branch: greedy batches pay neither for the softmax nor for the filters.
  return jax.lax.cond(jnp.all(greedy_B), greedy, soft)


def _keep_top_k(z_BTV, top_k_B):
  """-inf below the k-th largest value of a row; 0 keeps all; ties are kept."""
  num_ids = z_BTV.shape[-1]
  k_B11 = jnp.where(top_k_B > 0, top_k_B, num_ids)[:, None, None]

  def enough(threshold_BT1):
    return jnp.sum(z_BTV >= threshold_BT1, axis=-1, keepdims=True) >= k_B11

  threshold_BT1 = _largest_threshold(enough, (*z_BTV.shape[:-1], 1))
  return jnp.where(z_BTV >= threshold_BT1, z_BTV, -jnp.inf)


def _keep_top_p(z_BTV, top_p_B):
  """-inf outside the smallest set of likeliest ids with mass >= top_p."""
  p_BTV = jax.nn.softmax(z_BTV, axis=-1)
  top_p_B11 = top_p_B[:, None, None]

  def enough(threshold_BT1):
    kept_BTV = jnp.where(z_BTV >= threshold_BT1, p_BTV, 0.0)
    return jnp.sum(kept_BTV, axis=-1, keepdims=True) >= top_p_B11

  threshold_BT1 = _largest_threshold(enough, (*z_BTV.shape[:-1], 1))
  # top_p = 1 means off, whatever the rounded sum says.
  keep_BTV = (z_BTV >= threshold_BT1) | (top_p_B11 >= 1)
  return jnp.where(keep_BTV, z_BTV, -jnp.inf)


def _largest_threshold(enough: Callable, shape: tuple[int, ...]):
  """The largest float32 <= 0 that satisfies the monotone predicate `enough`.

  `enough` holds at -inf and fails above some value. Bisection runs over the bit
  patterns of the non-positive floats, 0x80000000 (-0.0) to 0xff800000 (-inf),
  which grow as the value falls: 31 fused passes over V instead of a sort.
  """
  low = jnp.full(shape, -1, jnp.int32)  # -1 stands for "above every value"
  high = jnp.full(shape, 0x7F800000, jnp.int32)  # -inf, where `enough` holds

  def value(magnitude):
    return -jax.lax.bitcast_convert_type(magnitude, jnp.float32)

  def halve(_, bounds):
    low, high = bounds
    middle = low + (high - low + 1) // 2
    middle = jnp.minimum(middle, high - 1)
    holds = enough(value(middle)) & (middle > low)
    return jnp.where(holds, low, middle), jnp.where(holds, middle, high)

  _, high = jax.lax.fori_loop(0, 32, halve, (low, high))
  return value(high)
