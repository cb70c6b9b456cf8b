"""Shared noise: sampled text that no drafter can change, bit for bit.

Target and draft draw the token of slot s with the same Gumbel noise g_s, a
function of (row key, s) alone:

  y_s = argmax_v log p_s(v) + g_s(v),   x_s = argmax_v log q_s(v) + g_s(v)

A draft is accepted iff x_s = y_s, and y_s is emitted either way (Daliri, Musco,
Suresh 2024, arXiv 2408.07978). The output is a function of the noise and of the
target, and since g_s is the noise of `autoregressive.decode` in slot s, it *is*
plain decoding's output for the same seed, at any temperature. What greedy
decoding gives at temperature 0, a test by equality, this gives everywhere.

The price is acceptance: P(x = y) = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), at
least (1 - TV) / (1 + TV), where the token-wise rule has 1 - TV. A drafter that
draws with noise of its own only gets sum_i p_i q_i.

  drafter = model_draft(model, warp, G, keys=coupling.slot_keys)
  decode(..., drafter=drafter, verifier=coupling.gumbel_verifier,
         block_keys=coupling.slot_block_keys(G))
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax import shapes
from specjax.core import rng, verify
from specjax.core.types import Draft, Verdict


def slot_keys(row_key_B: shapes.RowKeys, length_B: shapes.Int_B, count: int):
  """Keys [B, count] of slots length, length + 1, ..: those of plain decoding."""

  def slot_key(key, slot):
    return rng.block_keys(key[None], slot[None]).resample_B[0]

  slot_BX = length_B[:, None] + jnp.arange(count, dtype=length_B.dtype)[None]
  return jax.vmap(jax.vmap(slot_key, (None, 0)))(row_key_B, slot_BX)


@functools.cache
def slot_block_keys(num_draft: int) -> Callable[..., rng.BlockKeys]:
  """The `block_keys` of a coupled loop with G drafts; equal G, equal function.

  Drafters get the row key itself: with `slot_keys` they find the target's noise,
  and whatever else they draw from it can not change the output.
  """

  def block_keys(row_key_B, length_B):
    key_BG1 = slot_keys(row_key_B, length_B, num_draft + 1)
    return rng.BlockKeys(row_key_B, key_BG1, key_BG1[:, 0])

  return block_keys


def gumbel_verifier(accept_key_BG1, resample_key_B, draft: Draft, logp_BG1V) -> Verdict:
  """Accepts what the target draws itself; a `Verifier` for `slot_block_keys`.

  Args:
    accept_key_BG1: the keys of the G + 1 slots that the block may fill.
    resample_key_B: not used; the next token has its slot's key.
    draft: the proposal; its laws are not looked at.
    logp_BG1V: float32 [B, G + 1, V]; the warped target's log-laws.

  Raises:
    ValueError: keys for another number of slots: `slot_block_keys` was built for
      another G, or is missing.
  """
  del resample_key_B
  num_draft = draft.tokens_BG.shape[1]
  if accept_key_BG1.shape[1:] != (num_draft + 1,):
    raise ValueError(
      f'block_keys: {accept_key_BG1.shape[1:]} keys a row for {num_draft} drafts;'
      f' pass block_keys=slot_block_keys({num_draft})'
    )
  token_BG1 = jax.vmap(rng.categorical, 1, 1)(accept_key_BG1, logp_BG1V)
  proposed_BG = jnp.arange(num_draft)[None] < draft.count_B[:, None]
  agrees_BG = (token_BG1[:, :num_draft] == draft.tokens_BG) & proposed_BG
  num_B = verify.count_accepted(verify.token_rule, agrees_BG).astype(jnp.int32)
  next_B = jnp.take_along_axis(token_BG1, num_B[:, None], axis=1)[:, 0]
  return Verdict(num_B, next_B)


def match_probability(p_V, q_V):
  """P(x = y) = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) of two laws.

  Args:
    p_V: probabilities [V].
    q_V: probabilities [V]; ids that either law rules out never match.
  """
  both_V1 = (p_V * q_V > 0)[:, None]
  p_V1, q_V1 = (jnp.where(both_V1, law_V[:, None], 1.0) for law_V in (p_V, q_V))
  ratio_VV = jnp.maximum(p_V[None] / p_V1, q_V[None] / q_V1)
  return jnp.sum(jnp.where(both_V1[:, 0], 1 / jnp.sum(ratio_VV, axis=1), 0.0))
