"""Drafting with any `Model`: G steps of a smaller autoregressive model.

This is the draft of Leviathan, Kalman and Matias (ICML 2023), Algorithm 1: each
proposal is drawn from the draft's own warped law given the proposals before it.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax import shapes
from specjax.core import rng, types


def split_keys(key_B, length_B, num_draft: int):
  """The keys of a round's draws, [B, G]; `length_B` is not needed."""
  del length_B
  return jax.vmap(lambda key: jax.random.split(key, num_draft))(key_B)


@functools.cache
def model_draft(
  model: types.Model,
  warp: Callable[..., shapes.Logits_BTV],
  num_draft: int,
  *,
  keys: Callable = split_keys,
  draw: Callable = rng.categorical,
) -> types.Drafter:
  """A drafter that samples from `model`, one compiled scan per round.

  Draft i of a round that starts at `length` is drawn as

    x_i ~ q(. | source, x_<length, x_1 .. x_{i-1}),   i = 1 .. G

  and the recorded law is the array that it was drawn from. A round costs G calls
  of the model. The first call feeds the last *two* emitted tokens, so the cache
  never lags: after a fully accepted round the last draft was never fed (it was
  drawn last), and the call after it repairs that slot. Writing the earlier slot
  again is idempotent.

    length 5, G 3:   slots   0  1  2  3  4 | 5  6  7
      call 1 feeds                    a  b             -> law of slot 5, draw x1
      call 2 feeds                           x1        -> law of slot 6, draw x2
      call 3 feeds                              x2     -> law of slot 7, draw x3

  The same arguments give the identical drafter, so that it can be a static
  argument of `jit` without recompiling.

  Args:
    model: the draft; its parameters are `Params.draft`.
    warp: `(logits_BTV, sampling, slot_BT) -> logq_BTV`; usually the target's.
      Another one (a draft temperature, say) changes the acceptance rate but
      never the law of the output.
    num_draft: G >= 1.
    keys: `(key_B, length_B, G) -> key_BG`, the keys of a round's draws.
    draw: `(key_B, logq_BV) -> token_B`; must draw from just that law.

  Returns:
    A `Drafter` whose state is the draft model's cache.

  Raises:
    ValueError: num_draft < 1.
  """
  if num_draft < 1:
    raise ValueError(
      f'num_draft={num_draft}: a draft model proposes at least 1 token a round;'
      ' decode without a draft instead'
    )

  def init(params, inputs_BE, *, num_slots):
    return model.init(params, inputs_BE, num_slots=num_slots)

  def propose(params, cache, key_B, history):
    length_B = history.length_B
    key_BG = keys(key_B, length_B, num_draft)

    def propose_at(logits_BV, i):
      slot_B1 = length_B[:, None] + i
      logq_BV = warp(logits_BV[:, None], history.sampling, slot_B1)[:, 0]
      return draw(key_BG[:, i], logq_BV), logq_BV

    # With one emitted token there is no second one to feed: the pending token
    # goes in twice, and call 2 or the next round overwrites the surplus slot.
    start_B = jnp.maximum(length_B - 2, 0)
    slot_B2 = jnp.minimum(start_B[:, None] + jnp.arange(2)[None], length_B[:, None] - 1)
    last_B2 = jnp.take_along_axis(history.tokens_BS, slot_B2, axis=1)
    output, cache = model.extend(params, cache, last_B2, start_B)
    has_two_B1 = (length_B > 1)[:, None]
    logits_BV = jnp.where(has_two_B1, output.logits_BTV[:, 1], output.logits_BTV[:, 0])
    token_B, logq_BV = propose_at(logits_BV, 0)

    # Laws are written into the carry, row by row, where stacking them along a
    # leading axis would cost a transposed copy of [B, G, V] every round.
    write = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=1)

    def step(carry, i):
      cache, token_B, tokens_BG, logq_BGV = carry
      output, cache = model.extend(params, cache, token_B[:, None], length_B + i - 1)
      token_B, logq_BV = propose_at(output.logits_BTV[:, 0], i)
      tokens_BG, logq_BGV = write(tokens_BG, token_B, i), write(logq_BGV, logq_BV, i)
      return (cache, token_B, tokens_BG, logq_BGV), None

    num_rows, vocab_size = logq_BV.shape
    tokens_BG = write(jnp.zeros((num_rows, num_draft), jnp.int32), token_B, 0)
    logq_BGV = jnp.zeros((num_rows, num_draft, vocab_size), logq_BV.dtype)
    carry = (cache, token_B, tokens_BG, write(logq_BGV, logq_BV, 0))
    (cache, _, tokens_BG, logq_BGV), _ = jax.lax.scan(
      step, carry, jnp.arange(1, num_draft)
    )
    count_B = jnp.minimum(history.sampling.num_draft_B, num_draft)
    return types.Draft(tokens_BG, logq_BGV, count_B), cache

  def advance(params, cache, draft, verdict, output):
    del params, draft, verdict, output  # the next round's first call repairs it
    return cache

  def prefill(params, cache, tokens_BP):
    # The first call of a round feeds the last two tokens of a prompt again.
    return model.extend(params, cache, tokens_BP, jnp.zeros_like(tokens_BP[:, 0]))[1]

  return types.Drafter(num_draft, init, propose, advance, prefill)
