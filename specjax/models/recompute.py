"""An uncached oracle: recomputes the whole teacher-forced pass at every call.

Slow, and right by construction: there is no key/value cache that could be stale.
Tests hold the cached models against it.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from specjax import shapes
from specjax.core import types
from specjax.models import table


class RecomputeCache(NamedTuple):
  """All that is kept between calls: the source and the decoder's inputs."""

  inputs_BE: shapes.Tokens_BE
  tokens_BS: shapes.Tokens_BS


@functools.cache
def recompute_model(apply: Callable[..., shapes.Logits_BTV]) -> types.Model:
  """A `Model` made of one teacher-forced forward pass.

  `extend` writes its tokens and evaluates `apply` on all slots; the logits of
  slot s depend on slots <= s only, so what later slots hold does not matter.

  Args:
    apply: `(params, inputs_BE, decoder_inputs_BS) -> logits_BSV`, causal;
      `logits_BSV[:, s]` is the law of slot s + 1.

  Returns:
    A `Model` with a `RecomputeCache`. Hashes by the identity of `apply`.
  """

  def init(params, inputs_BE, *, num_slots):
    del params
    tokens_BS = jnp.zeros((inputs_BE.shape[0], num_slots), jnp.int32)
    return RecomputeCache(inputs_BE, tokens_BS)

  def extend(params, cache, tokens_BT, start_B):
    tokens_BS = table.write_slots(cache.tokens_BS, tokens_BT, start_B)
    logits_BSV = apply(params, cache.inputs_BE, tokens_BS)
    slot_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1])[None]
    logits_BTV = jnp.take_along_axis(logits_BSV, slot_BT[..., None], axis=1)
    return types.Output(logits_BTV), RecomputeCache(cache.inputs_BE, tokens_BS)

  return types.Model(init, extend)
