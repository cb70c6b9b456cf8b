"""Drafters that try to break the loop, and wrappers around honest ones.

Whatever a drafter proposes, the law of the output must stay the target's, and at
temperature 0 the output itself.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.core import rng, types
from specjax.drafters import model
from specjax.drafters.ngram import point_mass


@functools.cache
def random_draft(num_draft: int, vocab_size: int) -> types.Drafter:
  """Proposes uniformly random ids, and says so: q = 1 / V."""

  def propose(params, state, key_B, history):
    del params
    shape_BGV = (key_B.shape[0], num_draft, vocab_size)
    logq_BGV = jnp.full(shape_BGV, -jnp.log(jnp.float32(vocab_size)))
    key_BG = jax.vmap(lambda key: jax.random.split(key, num_draft))(key_B)
    tokens_BG = jax.vmap(rng.categorical)(key_BG, logq_BGV)
    count_B = jnp.minimum(history.sampling.num_draft_B, num_draft)
    return types.Draft(tokens_BG, logq_BGV, count_B), state

  return types.Drafter(num_draft, _no_state, propose, _keep_state)


@functools.cache
def constant_draft(num_draft: int, vocab_size: int, token: int) -> types.Drafter:
  """Is always certain of the same id; with the id of EOS, of ending at once."""

  def propose(params, state, key_B, history):
    del params
    tokens_BG = jnp.full((key_B.shape[0], num_draft), token, jnp.int32)
    count_B = jnp.minimum(history.sampling.num_draft_B, num_draft)
    return types.Draft(tokens_BG, point_mass(tokens_BG, vocab_size), count_B), state

  return types.Drafter(num_draft, _no_state, propose, _keep_state)


def contrary_draft(target: types.Model, num_draft: int) -> types.Drafter:
  """Proposes what the target finds least likely; `Params.draft` is the target's."""
  return model.model_draft(target, _least_likely, num_draft)


def _least_likely(logits_BTV, sampling, slot_BT):
  del sampling, slot_BT
  return point_mass(jnp.argmin(logits_BTV, axis=-1), logits_BTV.shape[-1])


@functools.cache
def wrong_at(drafter: types.Drafter, position: int | tuple[int, ...]) -> types.Drafter:
  """Replaces the draft at `position` (from 0) by the next id, as a point mass.

  With a drafter that always agrees with a greedy target this forces the first
  rejection to exactly that position, and none if `position` is `num_draft`. A tuple
  has a position for each row.
  """

  def propose(params, state, key_B, history):
    draft, state = drafter.propose(params, state, key_B, history)
    vocab_size = draft.logq_BGV.shape[-1]
    position_B1 = jnp.array(position).reshape(-1, 1)
    here_BG = jnp.arange(drafter.num_draft)[None] == position_B1
    wrong_BG = (draft.tokens_BG + 1) % vocab_size
    tokens_BG = jnp.where(here_BG, wrong_BG, draft.tokens_BG)
    logq_BGV = jnp.where(
      here_BG[..., None], point_mass(wrong_BG, vocab_size), draft.logq_BGV
    )
    return types.Draft(tokens_BG, logq_BGV, draft.count_B), state

  return drafter._replace(propose=propose)


@functools.cache
def counted(
  drafter: types.Drafter, count: Callable[[jax.Array], jax.Array]
) -> types.Drafter:
  """Proposes only the first `count(length_B)` drafts of each round.

  Args:
    drafter: any drafter.
    count: int32 [B] -> int32 [B] in [0, G]; sees the number of emitted tokens,
      so that the number of proposals varies by round and by row.
  """

  def propose(params, state, key_B, history):
    draft, state = drafter.propose(params, state, key_B, history)
    count_B = jnp.minimum(draft.count_B, count(history.length_B))
    return types.Draft(draft.tokens_BG, draft.logq_BGV, count_B), state

  return drafter._replace(propose=propose)


def _no_state(params, inputs_BE, *, num_slots):
  del params, inputs_BE, num_slots
  return ()


def _keep_state(params, state, draft, verdict, output):
  del params, draft, verdict, output
  return state
