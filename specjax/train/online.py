"""Learning from what verification computed anyway: online speculative decoding.

A round of the loop computes the target's law at every prefix that it verifies, and
drops it. `recording` keeps these rows beside the draft's cache, in the same way: a
round writes slots [length, length + G] by overwrite, a rejected draft's row is
overwritten by the next round, whose `length` is smaller. When the loop ends, row s
is the law of slot s given the emitted text before it: (prefix, law) pairs for the
draft to learn from, without a further pass of the target (Liu et al. 2023, arXiv
2310.07177). The loop knows nothing of it; outputs are those without the recorder.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.core import types


class Recorded(NamedTuple):
  """State of a recording drafter.

  Attributes:
    inner: the drafter's own.
    logits_BSV: float32; row s is the target's for slot s, of emitted slots.
    length_B: int32; tokens emitted when the round began.
  """

  inner: Any
  logits_BSV: jax.Array
  length_B: jax.Array


@functools.cache
def recording(drafter: types.Drafter, num_ids: int) -> types.Drafter:
  """The same drafter, which also keeps the target's logits of every slot.

  Args:
    drafter: any.
    num_ids: V, the width of the target's logits.

  Returns:
    A `Drafter` whose state is a `Recorded`; equal arguments give the identical one.
    Of a prompt's slots it has no rows (zeros).
  """

  def init(params, inputs_BE, *, num_slots):
    num_rows = inputs_BE.shape[0]
    return Recorded(
      drafter.init(params, inputs_BE, num_slots=num_slots),
      jnp.zeros((num_rows, num_slots, num_ids), jnp.float32),
      jnp.ones(num_rows, jnp.int32),
    )

  def propose(params, state, key_B, history):
    draft, inner = drafter.propose(params, state.inner, key_B, history)
    return draft, Recorded(inner, state.logits_BSV, history.length_B)

  def advance(params, state, draft, verdict, output):
    inner = drafter.advance(params, state.inner, draft, verdict, output)
    return Recorded(
      inner,
      _write_rows(state.logits_BSV, output.logits_BTV, state.length_B),
      state.length_B,
    )

  def prefill(params, state, tokens_BP):
    inner = drafter.prefill(params, state.inner, tokens_BP)
    return Recorded(inner, state.logits_BSV, state.length_B)

  return types.Drafter(drafter.num_draft, init, propose, advance, prefill)


def _write_rows(logits_BSV, new_BTV, start_B):
  """Overwrites slots [start, start + T) of each row."""
  write = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
  return jax.vmap(write)(logits_BSV, new_BTV, start_B)


def replay(state: types.DecodeState) -> tuple[jax.Array, jax.Array]:
  """The texts that a loop with a recording drafter emitted, and the laws.

  Args:
    state: what `loop.decode` returned, or `loop.stream` yielded.

  Returns:
    `(targets_BT, logits_BTV)` with T one less than the buffer's slots: the token
    of slot t + 1, 0 after the end of a text, and the target's logits for it.
  """
  slot_1S = jnp.arange(state.tokens_BS.shape[1])[None]
  tokens_BS = jnp.where(slot_1S < state.length_B[:, None], state.tokens_BS, 0)
  return tokens_BS[:, 1:], state.draft_state.logits_BSV[:, 1:]
