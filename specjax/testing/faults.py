"""What known faults of speculative decoding are made of.

A `Mutant` changes one thing of a working `Setup`; `mutants` lists them.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

from specjax.core import loop, rng, types, verify, warp
from specjax.drafters import model
from specjax.testing.quadrature import inverse_cdf


class Setup(NamedTuple):
  """What `decode` is given: four of its static arguments."""

  target: types.Model
  drafter: types.Drafter
  verifier: Callable[..., types.Verdict]
  block_keys: Callable[..., rng.BlockKeys] = rng.block_keys


class Mutant(NamedTuple):
  """A fault.

  Attributes:
    name: in a few words.
    seen_in: where the fault was found, or what it models.
    mutate: `Setup -> Setup`; the result is new, so that `jit` traces it anew.
    patches: `(module, attribute, replacement)`, in force while tracing.
    needs_eos: only outputs that may end early show it.
    shown_by: 'law': the joint law of a sample; 'rate': the law is right, and only
      the number of accepted drafts is wrong.
  """

  name: str
  seen_in: str
  mutate: Callable[[Setup], Setup]
  patches: tuple[tuple[Any, str, Any], ...] = ()
  needs_eos: bool = False
  shown_by: str = 'law'

  @contextlib.contextmanager
  def applied(self, setup: Setup):
    """Yields the faulty setup; trace and run it inside of the `with` block."""
    with contextlib.ExitStack() as stack:
      for module, attribute, replacement in self.patches:
        stack.enter_context(mock.patch.object(module, attribute, replacement))
      yield self.mutate(setup)


def row(x_BGV, n_B):
  return jnp.take_along_axis(x_BGV, n_B[:, None, None], axis=1)[:, 0]


def at(x_BGV, tokens_BG):
  return jnp.take_along_axis(x_BGV, tokens_BG[..., None], axis=-1)[..., 0]


def ratio(p_BG1V, q_BGV, tokens_BG):
  num_draft = tokens_BG.shape[1]
  return at(p_BG1V[:, :num_draft], tokens_BG) / at(q_BGV, tokens_BG)


def residual(p_BV, q_BV):
  return jnp.maximum(p_BV - q_BV, 0.0)


def or_p(weights_BV, p_BV):
  return jnp.where(jnp.sum(weights_BV, axis=-1, keepdims=True) > 0, weights_BV, p_BV)


def next_weights(residual=residual, shift=0):
  """Weights after n accepted drafts: a residual of rows n + shift, or the bonus."""

  def weights(p_BG1V, q_BG1V, n_B, bonus_B):
    n_B = jnp.minimum(n_B + jnp.where(bonus_B, 0, shift), p_BG1V.shape[1] - 1)
    p_BV, q_BV = row(p_BG1V, n_B), row(q_BG1V, n_B)
    return jnp.where(bonus_B[:, None], p_BV, or_p(residual(p_BV, q_BV), p_BV))

  return weights


def bonus_weights(bonus):
  """Weights that are right after a rejection; `bonus(p, p_before, q_before)`."""

  def weights(p_BG1V, q_BG1V, n_B, bonus_B):
    before_B = jnp.maximum(n_B - 1, 0)
    p_BV = row(p_BG1V, n_B)
    bonus_BV = bonus(p_BV, row(p_BG1V, before_B), row(q_BG1V, before_B))
    right_BV = next_weights()(p_BG1V, q_BG1V, n_B, bonus_B)
    return jnp.where((bonus_B & (n_B > 0))[:, None], bonus_BV, right_BV)

  return weights


def first_rejection(success_BG):
  return jnp.sum(jnp.cumprod(success_BG.astype(jnp.int32), axis=1), axis=1)


def make_verifier(ratio=ratio, count=first_rejection, weights=None, coins=rng.uniform):
  """A `mutate` that puts a token-wise verifier made of these parts in place."""
  weights = weights or next_weights()

  def verifier(accept_key_B, resample_key_B, draft, logp_BG1V):
    num_draft = draft.tokens_BG.shape[1]
    p_BG1V, q_BGV = jnp.exp(logp_BG1V), jnp.exp(draft.logq_BGV)
    q_BG1V = jnp.pad(q_BGV, ((0, 0), (0, 1), (0, 0)))
    proposed_BG = jnp.arange(num_draft)[None] < draft.count_B[:, None]
    success_BG = coins(accept_key_B, num_draft) < ratio(p_BG1V, q_BGV, draft.tokens_BG)
    num_B = count(success_BG & proposed_BG).astype(jnp.int32)
    weights_BV = weights(p_BG1V, q_BG1V, num_B, num_B >= draft.count_B)
    next_B = rng.categorical(resample_key_B, jnp.log(weights_BV))
    return types.Verdict(num_B, next_B)

  return lambda setup: setup._replace(verifier=verifier)


def shared_count(setup: Setup) -> Setup:
  def verifier(*args):
    verdict = setup.verifier(*args)
    num_B = jnp.full_like(verdict.num_accepted_B, jnp.min(verdict.num_accepted_B))
    return verdict._replace(num_accepted_B=num_B)

  return setup._replace(verifier=verifier)


def use_rule(rule: types.Rule):
  return lambda setup: setup._replace(verifier=verify.make_verifier(rule))


def lenient_rule(lenience: float) -> types.Rule:
  """Token-wise acceptance with min(1, p / (lenience q))."""

  def acceptance(logp_BG1V, draft):
    logq_BGV = draft.logq_BGV + jnp.log(lenience)
    return verify.token_rule.acceptance(logp_BG1V, draft._replace(logq_BGV=logq_BGV))

  return types.Rule(acceptance, 'first_rejection')


def padded_weights(
  logp_BV, logq_BV, weight_B, bonus_B, next_weights=verify._next_weights
):
  """A residual with an epsilon of 1e-3."""
  weights_BV = next_weights(logp_BV, logq_BV, weight_B, bonus_B)
  return jnp.where(bonus_B[:, None], weights_BV, weights_BV + 1e-3)


def rounded_to_bfloat16(logq_XV):
  """What drawing from bfloat16 logits does to a law, unnormalised."""
  return jnp.asarray(logq_XV, jnp.bfloat16).astype(jnp.float32)


def unit_weights(logp_BG1V, draft):
  acceptance = verify.block_rule.acceptance(logp_BG1V, draft)
  return acceptance._replace(weight_BG1=jnp.ones_like(acceptance.weight_BG1))


def joint_ratio_only(logp_BG1V, draft):
  acceptance = verify.block_rule.acceptance(logp_BG1V, draft)
  proposed_BG = jnp.arange(draft.tokens_BG.shape[1])[None] < draft.count_B[:, None]
  prob_BG = jnp.where(proposed_BG, acceptance.weight_BG1[:, 1:], 0.0)
  return acceptance._replace(prob_BG=prob_BG)


def record(transform):
  """A `mutate` that records `transform(logq)` as the law that drafts came from."""

  def mutate(setup: Setup) -> Setup:
    def propose(params, state, key_B, history):
      draft, state = setup.drafter.propose(params, state, key_B, history)
      return draft._replace(logq_BGV=transform(draft.logq_BGV)), state

    return setup._replace(drafter=setup.drafter._replace(propose=propose))

  return mutate


def anew(setup: Setup) -> Setup:
  """The same setup in new functions: `jit` must not reuse an unpatched trace."""
  return record(lambda logq_BGV: logq_BGV)(setup)


def change_extend(change):
  """A `mutate` that puts `change(extend, ...)` in place of the target's extend."""

  def mutate(setup: Setup) -> Setup:
    extend = functools.partial(change, setup.target.extend)
    return setup._replace(target=types.Model(setup.target.init, extend))

  return mutate


def one_position_for_all(extend, params, cache, tokens_BT, start_B):
  return extend(params, cache, tokens_BT, jnp.full_like(start_B, jnp.max(start_B)))


def last_slot_not_kept(extend, params, cache, tokens_BT, start_B):
  output, _ = extend(params, cache, tokens_BT, start_B)
  _, cache = extend(params, cache, tokens_BT[:, :-1], start_B)
  return output, cache


def last_draft_not_fed(extend, params, cache, tokens_BT, start_B):
  """For a draft: the first call of a round feeds the last token only.

  What was drawn last in a fully accepted round then never gets into the cache.
  """
  if tokens_BT.shape[1] != 2:
    return extend(params, cache, tokens_BT, start_B)
  # The first token goes where the second one overwrites it, but for the start token.
  first_B = jnp.where(start_B == 0, 0, start_B + 1)
  first, cache = extend(params, cache, tokens_BT[:, :1], first_B)
  second, cache = extend(params, cache, tokens_BT[:, 1:], start_B + 1)
  both = jax.tree.map(lambda *two: jnp.concatenate(two, axis=1), first, second)
  return both, cache


def rejected_slots_kept(extend, params, cache, tokens_BT, start_B):
  """For a table's cache: the pending token does not replace a rejected draft."""
  old_B1 = jnp.take_along_axis(cache.tokens_BS, start_B[:, None], axis=1)
  is_first_B1 = (start_B == 0)[:, None]
  first_B1 = jnp.where(is_first_B1, tokens_BT[:, :1], old_B1)
  tokens_BT = jnp.concatenate([first_B1, tokens_BT[:, 1:]], axis=1)
  return extend(params, cache, tokens_BT, start_B)


def same_keys_every_round(setup: Setup) -> Setup:
  def block_keys(row_key_B, length_B):
    return rng.block_keys(row_key_B, jnp.ones_like(length_B))

  return setup._replace(block_keys=block_keys)


def drawn_otherwise(law):
  """A `mutate` whose drafts are drawn from `law(logq)` while logq is recorded."""

  def mutate(setup: Setup) -> Setup:
    def draw(key_B, logq_BV):
      return rng.categorical(key_B, law(logq_BV))

    return setup._replace(drafter=table_drafter(setup, draw=draw))

  return mutate


def table_drafter(setup: Setup, **fields) -> types.Drafter:
  """The drafter of a setup whose draft is a table like its target."""
  num_draft = setup.drafter.num_draft
  return model.model_draft(setup.target, warp.make_warp(), num_draft, **fields)


def greedy(logq_BV):
  best_B1 = jnp.argmax(logq_BV, axis=-1, keepdims=True)
  return jnp.where(jnp.arange(logq_BV.shape[-1])[None] == best_B1, 0.0, -jnp.inf)


def top_3(logq_BV):
  return jnp.where(logq_BV >= jnp.sort(logq_BV, axis=-1)[:, -3:-2], logq_BV, -jnp.inf)


def draft_coin_reused(setup: Setup) -> Setup:
  """Drafts by inverse distribution function, accepted with the very same uniform."""

  def coins(key_B, num_draft):
    key_BG = model.split_keys(key_B, None, num_draft)
    return jax.vmap(jax.vmap(jax.random.uniform))(key_BG)

  def draw(key_B, logq_BV):
    return inverse_cdf(jax.vmap(jax.random.uniform)(key_B), logq_BV)

  def block_keys(row_key_B, length_B):
    keys = rng.block_keys(row_key_B, length_B)
    return keys._replace(accept_B=keys.draft_B)

  setup = setup._replace(drafter=table_drafter(setup, draw=draw), block_keys=block_keys)
  return make_verifier(coins=coins)(setup)


def unsure_drafts_dropped(setup: Setup) -> Setup:
  """Anticipation: a draft is not verified if its own probability is low."""

  def propose(params, state, key_B, history):
    draft, state = setup.drafter.propose(params, state, key_B, history)
    sure_BG = at(draft.logq_BGV, draft.tokens_BG) >= jnp.log(0.3)
    return draft._replace(count_B=first_rejection(sure_BG)), state

  return setup._replace(drafter=setup.drafter._replace(propose=propose))


def products_of_coins(setup: Setup) -> Setup:
  """Block rule that accepts the last i with u_1 .. u_i < min(1, p / q)'s product."""

  def verifier(accept_key_B, resample_key_B, draft, logp_BG1V):
    coin_BG = jnp.cumprod(rng.uniform(accept_key_B, draft.tokens_BG.shape[1]), axis=1)
    rule = types.Rule(joint_ratio_only, 'last_acceptance')
    return verify.verify(rule, coin_BG, resample_key_B, draft, logp_BG1V)

  return setup._replace(verifier=verifier)


def rejected_token_kept(setup: Setup) -> Setup:
  def verifier(accept_key_B, resample_key_B, draft, logp_BG1V):
    verdict = setup.verifier(accept_key_B, resample_key_B, draft, logp_BG1V)
    num_draft = draft.tokens_BG.shape[1]
    at_B1 = jnp.minimum(verdict.num_accepted_B, num_draft - 1)[:, None]
    kept_B = jnp.take_along_axis(draft.tokens_BG, at_B1, axis=1)[:, 0]
    rejected_B = verdict.num_accepted_B < draft.count_B
    return verdict._replace(
      next_token_B=jnp.where(rejected_B, kept_B, verdict.next_token_B)
    )

  return setup._replace(verifier=verifier)


def no_bonus(setup: Setup) -> Setup:
  """After a full acceptance the last draft is emitted as the next token."""

  def verifier(accept_key_B, resample_key_B, draft, logp_BG1V):
    num_B, next_B = setup.verifier(accept_key_B, resample_key_B, draft, logp_BG1V)
    full_B = (num_B == draft.count_B) & (num_B > 0)
    last_B1 = jnp.maximum(num_B - 1, 0)[:, None]
    last_B = jnp.take_along_axis(draft.tokens_BG, last_B1, axis=1)[:, 0]
    return types.Verdict(
      jnp.where(full_B, num_B - 1, num_B), jnp.where(full_B, last_B, next_B)
    )

  return setup._replace(verifier=verifier)


def rest_to_the_last_id(p_BV, q_BV):
  """What an inverse distribution function makes of an unnormalised residual."""
  residual_BV = residual(p_BV, q_BV)
  return residual_BV.at[:, -1].add(1 - jnp.sum(residual_BV, axis=-1))


def eos_in_block_ignored(state, *args, eos_id, commit=loop.commit, **kwargs):
  new = commit(state, *args, eos_id=-1, **kwargs)
  last_B = jnp.take_along_axis(new.tokens_BS, new.length_B[:, None] - 1, axis=1)[:, 0]
  ended_B = (last_B == eos_id) & (new.length_B > state.length_B)
  return new._replace(done_B=new.done_B | ended_B)


def budget_overrun(state, *args, remaining_B, commit=loop.commit, **kwargs):
  surplus_B = jnp.where(remaining_B > 1, 0, 1)
  return commit(state, *args, remaining_B=remaining_B + surplus_B, **kwargs)
