"""The loop of `loop.decode` in pieces, so that the host may choose gamma between them.

A state made for the longest draft serves every shorter one: its buffers are wide
enough (I4), its trace has a place for every position, and a drafter's state does
not depend on how much it drafts. Why any choice leaves the law as it is, as long as
it is made before the round and from the past alone: `eval/tuning.py`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax import shapes
from specjax.core import loop, rng
from specjax.core.types import DecodeState, Drafter, Model, Params, Sampling
from specjax.core.verify import Verifier
from specjax.core.warp import Warp

_STATIC = (
  'target', 'drafter', 'verifier', 'warp', 'max_len', 'eos_id', 'block_keys'
)  # fmt: skip

begin = jax.jit(loop.start, static_argnames=('target', 'drafter', 'max_len'))


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames=('state',))
def run(
  params: Params,
  state: DecodeState,
  row_key_B: shapes.RowKeys,
  sampling: Sampling,
  num_rounds: jax.typing.ArrayLike,
  *,
  target: Model,
  drafter: Drafter,
  verifier: Verifier,
  warp: Warp,
  max_len: int,
  eos_id: int,
  block_keys: Callable[..., rng.BlockKeys] = rng.block_keys,
) -> DecodeState:
  """At most `num_rounds` rounds more; fewer if every row ends before.

  Runs of drafters that differ in `num_draft` alone may follow each other. After a
  run that drafts nothing a draft model's cache lags (I10): its drafts would be poor,
  though no less exact, so stay with plain rounds to the end of the text.

  Args:
    params: as for `loop.decode`, as are all arguments not named here.
    state: of `begin` with the drafter of the largest `num_draft`, or of `run`; it is
      donated, so use what is returned.
    num_rounds: int32 scalar >= 0, not static.
    drafter: proposes at most as many tokens as the one of `begin`.
  """
  last_step = state.step + num_rounds

  def body(state: DecodeState) -> DecodeState:
    return loop.step(
      params,
      state,
      row_key_B,
      sampling,
      target=target,
      drafter=drafter,
      verifier=verifier,
      warp=warp,
      max_len=max_len,
      eos_id=eos_id,
      block_keys=block_keys,
    )

  def goes_on(state: DecodeState):
    return ~jnp.all(state.done_B) & (state.step < last_step)

  return jax.lax.while_loop(goes_on, body, state)


@functools.partial(jax.jit, static_argnames=(*_STATIC, 'max_draft'))
def begin_and_run(
  params: Params,
  inputs_BE: shapes.Tokens_BE,
  row_key_B: shapes.RowKeys,
  sampling: Sampling,
  num_rounds: jax.typing.ArrayLike,
  *,
  target: Model,
  drafter: Drafter,
  max_draft: int,
  max_len: int,
  **static: Any,
) -> DecodeState:
  """Both in one program, for a batch that keeps its first gamma.

  Args:
    max_draft: the largest `num_draft` of the runs that may follow.
  """
  state = loop.start(
    params,
    inputs_BE,
    sampling,
    target=target,
    drafter=drafter._replace(num_draft=max_draft),
    max_len=max_len,
  )
  return run(
    params,
    state,
    row_key_B,
    sampling,
    num_rounds,
    target=target,
    drafter=drafter,
    max_len=max_len,
    **static,
  )
