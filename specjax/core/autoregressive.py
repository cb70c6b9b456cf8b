"""The baseline: one token per target call, through the same loop.

A drafter that proposes nothing turns the speculative loop into plain decoding,
so that state, random streams, warping and commit are shared, and a comparison
of the two compares drafting and verifying alone.
"""

from collections.abc import Iterator

import jax.numpy as jnp

from specjax import shapes
from specjax.core import loop
from specjax.core.types import (
  DecodeState,
  Draft,
  Drafter,
  Model,
  Params,
  Sampling,
)
from specjax.core.verify import token_verifier
from specjax.core.warp import Warp


def _propose(params, state, key_B, history):
  del params, key_B
  num_rows = history.length_B.shape[0]
  nothing = Draft(
    tokens_BG=jnp.zeros((num_rows, 0), jnp.int32),
    logq_BGV=jnp.zeros((num_rows, 0, 1), jnp.float32),
    count_B=jnp.zeros(num_rows, jnp.int32),
  )
  return nothing, state


no_draft = Drafter(
  num_draft=0,
  init=lambda params, inputs_BE, *, num_slots: (),
  propose=_propose,
  advance=lambda params, state, draft, verdict, output: state,
)


def decode(
  params: Params,
  inputs_BE: shapes.Tokens_BE,
  row_key_B: shapes.RowKeys,
  sampling: Sampling,
  *,
  target: Model,
  warp: Warp,
  max_len: int,
  eos_id: int,
) -> DecodeState:
  """Plain decoding; arguments, state and errors are those of `loop.decode`."""
  return loop.decode(
    params,
    inputs_BE,
    row_key_B,
    sampling,
    target=target,
    drafter=no_draft,
    verifier=token_verifier,
    warp=warp,
    max_len=max_len,
    eos_id=eos_id,
  )


def stream(
  params: Params,
  inputs_BE: shapes.Tokens_BE,
  row_key_B: shapes.RowKeys,
  sampling: Sampling,
  *,
  target: Model,
  warp: Warp,
  max_len: int,
  eos_id: int,
) -> Iterator[DecodeState]:
  """Yields the state after each token; see `loop.stream`."""
  yield from loop.stream(
    params,
    inputs_BE,
    row_key_B,
    sampling,
    target=target,
    drafter=no_draft,
    verifier=token_verifier,
    warp=warp,
    max_len=max_len,
    eos_id=eos_id,
  )
