"""Is the output the target's? Greedy outputs against plain decoding's.

In float32 the two must be identical. In bfloat16 a pass over G + 1 tokens and
one over a single token may round a near-tie differently; that is told apart
from a fault by the gap between the two tokens' logits.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core import loop
from specjax.generation import Generation
from specjax.pair import Pair
from specjax.parallel import distributed

# Units in the last place of bfloat16 (8 bits of mantissa) that rounding may move
# the difference of two logits by.
MAX_ULPS = 4


@dataclasses.dataclass(frozen=True)
class Difference:
  """Where an output first departs from plain decoding's.

  Attributes:
    index: number of the text.
    position: of the token, from 0.
    token: id in the output; None if it ends before.
    plain_token: id in plain decoding's output; None if that ends before.
    gap: difference of the two tokens' logits; nan if one of them is None.
    bound: gap up to which rounding explains the difference; 0 in float32.
  """

  index: int
  position: int
  token: int | None
  plain_token: int | None
  gap: float
  bound: float

  @property
  def is_rounding(self) -> bool:
    return self.gap <= self.bound

  def describe(self, pair: Pair) -> str:
    """One line for people."""

    def piece(token: int | None) -> str:
      return 'the end' if token is None else repr(pair.vocabulary.piece(token))

    verdict = 'a near-tie that rounding decides' if self.is_rounding else 'a fault'
    return (
      f'text {self.index + 1} differs at token {self.position + 1}: '
      f'{piece(self.token)}, plain decoding {piece(self.plain_token)}; logit gap '
      f'{self.gap:.3g}, bound {self.bound:.3g}: {verdict}'
    )


def first_position(ids: Sequence[int], plain_ids: Sequence[int]) -> int | None:
  """Where two outputs first differ; None if they are equal."""
  for position, (token, plain_token) in enumerate(zip(ids, plain_ids, strict=False)):
    if token != plain_token:
      return position
  return None if len(ids) == len(plain_ids) else min(len(ids), len(plain_ids))


def differences(
  pair: Pair,
  sources: Sequence[Sequence[int]],
  generations: Sequence[Generation],
  plain: Sequence[Generation],
) -> list[Difference]:
  """Compares outputs token by token.

  Args:
    pair: what decoded them.
    sources: ids of each text.
    generations: outputs, in the order of the sources.
    plain: plain decoding's.

  Returns:
    One `Difference` for each output that is not plain decoding's.
  """
  found = []
  for ids, ours, theirs in zip(sources, generations, plain, strict=True):
    position = first_position(ours.ids, theirs.ids)
    if position is None:
      continue
    token, plain_token = (
      ids_[position] if position < len(ids_) else None
      for ids_ in (ours.ids, theirs.ids)
    )
    gap, bound = math.nan, 0.0
    if token is not None and plain_token is not None:
      logits_V = _logits(pair, ids, theirs.ids[:position])
      gap = float(abs(logits_V[plain_token] - logits_V[token]))
      if pair.target_config.dtype == 'bfloat16':
        size = max(abs(logits_V[plain_token]), abs(logits_V[token]))
        bound = MAX_ULPS * 2.0 ** (math.floor(math.log2(max(size, 1e-30))) - 7)
    found.append(Difference(ours.index, position, token, plain_token, gap, bound))
  return found


def _logits(pair: Pair, source: Sequence[int], prefix: Sequence[int]) -> np.ndarray:
  """float32 [V]; the target's logits of the token after `prefix`."""
  with pair.precision():
    logits_BTV = _teacher_forced(
      pair.params.target,
      np.asarray([source], np.int32),
      np.asarray([[loop.START_ID, *prefix]], np.int32),
      model=pair.target,
    )
  return np.asarray(distributed.to_host(logits_BTV)[0, -1], np.float64)


@functools.partial(jax.jit, static_argnames=('model',))
def _teacher_forced(params, inputs_BE, tokens_BT, *, model):
  cache = model.init(params, inputs_BE, num_slots=tokens_BT.shape[1])
  start_B = jnp.zeros(1, jnp.int32)
  return model.extend(params, cache, tokens_BT, start_B)[0].logits_BTV
