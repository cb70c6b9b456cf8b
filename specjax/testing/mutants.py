"""Known faults of speculative decoding, to be detected by tests of exactness.

A test that passes on the right code proves little until it has failed on wrong
code at the same sample size. Each mutant changes one thing of a working setup
(target, drafter, verifier, or a function of the core). All but the control
change the law of the output; `control` is the harness' own token-wise verifier
without a fault and must pass.

Not here, since no sample of ordinary size shows them (exact enumeration does): a
residual with an epsilon of 1e-3, lenience 0.99, draft logits rounded to bfloat16
before drawing and not before recording.
"""

import contextlib
import functools
import types as python_types
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

from specjax.core import loop, rng, types, verify
from specjax.drafters import model as model_module


class Setup(NamedTuple):
  """What `decode` is given: three of its static arguments."""

  target: types.Model
  drafter: types.Drafter
  verifier: Callable[..., types.Verdict]


class Mutant(NamedTuple):
  """A fault.

  Attributes:
    name: in a few words.
    seen_in: where the fault was found, or what it models.
    mutate: `Setup -> Setup`; the result is new, so that `jit` traces it anew.
    patches: `(module, attribute, replacement)`, in force while tracing.
    needs_eos: only outputs that may end early show it.
  """

  name: str
  seen_in: str
  mutate: Callable[[Setup], Setup]
  patches: tuple[tuple[Any, str, Any], ...] = ()
  needs_eos: bool = False

  @contextlib.contextmanager
  def applied(self, setup: Setup):
    """Yields the faulty setup; trace and run it inside of the `with` block."""
    with contextlib.ExitStack() as stack:
      for module, attribute, replacement in self.patches:
        stack.enter_context(mock.patch.object(module, attribute, replacement))
      yield self.mutate(setup)


def _row(x_BGV, n_B):
  return jnp.take_along_axis(x_BGV, n_B[:, None, None], axis=1)[:, 0]


def _at(x_BGV, tokens_BG):
  return jnp.take_along_axis(x_BGV, tokens_BG[..., None], axis=-1)[..., 0]


def _ratio(p_BG1V, q_BGV, tokens_BG):
  num_draft = tokens_BG.shape[1]
  return _at(p_BG1V[:, :num_draft], tokens_BG) / _at(q_BGV, tokens_BG)


def _residual(p_BV, q_BV):
  return jnp.maximum(p_BV - q_BV, 0.0)


def _or_p(weights_BV, p_BV):
  return jnp.where(jnp.sum(weights_BV, axis=-1, keepdims=True) > 0, weights_BV, p_BV)


def _next(residual=_residual, shift=0):
  """Weights after n accepted drafts: a residual of rows n + shift, or the bonus."""

  def weights(p_BG1V, q_BG1V, n_B, bonus_B):
    n_B = jnp.minimum(n_B + jnp.where(bonus_B, 0, shift), p_BG1V.shape[1] - 1)
    p_BV, q_BV = _row(p_BG1V, n_B), _row(q_BG1V, n_B)
    return jnp.where(bonus_B[:, None], p_BV, _or_p(residual(p_BV, q_BV), p_BV))

  return weights


def _bonus(bonus):
  """Weights that are right after a rejection; `bonus(p, p_before, q_before)`."""

  def weights(p_BG1V, q_BG1V, n_B, bonus_B):
    before_B = jnp.maximum(n_B - 1, 0)
    p_BV = _row(p_BG1V, n_B)
    bonus_BV = bonus(p_BV, _row(p_BG1V, before_B), _row(q_BG1V, before_B))
    right_BV = _next()(p_BG1V, q_BG1V, n_B, bonus_B)
    return jnp.where((bonus_B & (n_B > 0))[:, None], bonus_BV, right_BV)

  return weights


def _first_rejection(success_BG):
  return jnp.sum(jnp.cumprod(success_BG.astype(jnp.int32), axis=1), axis=1)


def _verifier(ratio=_ratio, count=_first_rejection, weights=None, coins=rng.uniform):
  """A `mutate` that puts a token-wise verifier made of these parts in place."""
  weights = weights or _next()

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


def _shared_count(setup: Setup) -> Setup:
  def verifier(*args):
    verdict = setup.verifier(*args)
    num_B = jnp.full_like(verdict.num_accepted_B, jnp.min(verdict.num_accepted_B))
    return verdict._replace(num_accepted_B=num_B)

  return setup._replace(verifier=verifier)


def _rule(rule: types.Rule):
  return lambda setup: setup._replace(verifier=verify.make_verifier(rule))


def _lenient_acceptance(logp_BG1V, draft):
  """Token-wise acceptance with min(1, p / (0.9 q))."""
  prob_BG, weight_BG1 = verify.token_rule.acceptance(
    logp_BG1V, draft._replace(logq_BGV=draft.logq_BGV + jnp.log(0.9))
  )
  return types.Acceptance(prob_BG, weight_BG1)


def _unit_weights(logp_BG1V, draft):
  acceptance = verify.block_rule.acceptance(logp_BG1V, draft)
  return acceptance._replace(weight_BG1=jnp.ones_like(acceptance.weight_BG1))


def _joint_ratio_only(logp_BG1V, draft):
  acceptance = verify.block_rule.acceptance(logp_BG1V, draft)
  proposed_BG = jnp.arange(draft.tokens_BG.shape[1])[None] < draft.count_B[:, None]
  prob_BG = jnp.where(proposed_BG, acceptance.weight_BG1[:, 1:], 0.0)
  return acceptance._replace(prob_BG=prob_BG)


# Faults of the arithmetic alone, which exact enumeration detects as well.
FAULTY_RULES: dict[str, types.Rule] = {
  'lenience 0.9': types.Rule(_lenient_acceptance, 'first_rejection'),
  'token-wise rule, last acceptance': verify.token_rule._replace(
    select='last_acceptance'
  ),
  'block rule, first rejection': verify.block_rule._replace(select='first_rejection'),
  'block rule, residual without its weight': verify.block_rule._replace(
    acceptance=_unit_weights
  ),
  'block rule, joint ratio as acceptance': verify.block_rule._replace(
    acceptance=_joint_ratio_only
  ),
}


def _record(transform):
  """A `mutate` that records `transform(logq)` as the law that drafts came from."""

  def mutate(setup: Setup) -> Setup:
    def propose(params, state, key_B, history):
      draft, state = setup.drafter.propose(params, state, key_B, history)
      return draft._replace(logq_BGV=transform(draft.logq_BGV)), state

    return setup._replace(drafter=setup.drafter._replace(propose=propose))

  return mutate


def _anew(setup: Setup) -> Setup:
  """The same setup in new functions: `jit` must not reuse an unpatched trace."""
  return _record(lambda logq_BGV: logq_BGV)(setup)


def _extend(change):
  """A `mutate` that puts `change(extend, ...)` in place of the target's extend."""

  def mutate(setup: Setup) -> Setup:
    extend = functools.partial(change, setup.target.extend)
    return setup._replace(target=types.Model(setup.target.init, extend))

  return mutate


def _one_position_for_all(extend, params, cache, tokens_BT, start_B):
  return extend(params, cache, tokens_BT, jnp.full_like(start_B, jnp.max(start_B)))


def _last_slot_not_kept(extend, params, cache, tokens_BT, start_B):
  output, _ = extend(params, cache, tokens_BT, start_B)
  _, cache = extend(params, cache, tokens_BT[:, :-1], start_B)
  return output, cache


def _rejected_slots_kept(extend, params, cache, tokens_BT, start_B):
  """For a table's cache: the pending token does not replace a rejected draft."""
  old_B1 = jnp.take_along_axis(cache.tokens_BS, start_B[:, None], axis=1)
  is_first_B1 = (start_B == 0)[:, None]
  first_B1 = jnp.where(is_first_B1, tokens_BT[:, :1], old_B1)
  tokens_BT = jnp.concatenate([first_B1, tokens_BT[:, 1:]], axis=1)
  return extend(params, cache, tokens_BT, start_B)


def _same_keys_every_round(row_key_B, length_B, block_keys=rng.block_keys):
  return block_keys(row_key_B, jnp.ones_like(length_B))


def _eos_in_block_ignored(state, *args, eos_id, commit=loop.commit, **kwargs):
  new = commit(state, *args, eos_id=-1, **kwargs)
  last_B = jnp.take_along_axis(new.tokens_BS, new.length_B[:, None] - 1, axis=1)[:, 0]
  ended_B = (last_B == eos_id) & (new.length_B > state.length_B)
  return new._replace(done_B=new.done_B | ended_B)


def _budget_overrun(state, *args, remaining_B, commit=loop.commit, **kwargs):
  surplus_B = jnp.where(remaining_B > 1, 0, 1)
  return commit(state, *args, remaining_B=remaining_B + surplus_B, **kwargs)


_argmax = python_types.SimpleNamespace(
  categorical=lambda key_B, logp_BV: jnp.argmax(logp_BV, axis=-1).astype(jnp.int32)
)

control = Mutant('control', 'no fault', _verifier())

MUTANTS: tuple[Mutant, ...] = (
  Mutant(
    'correction drawn from p',
    'power table 1',
    _verifier(weights=_next(lambda p_BV, q_BV: p_BV)),
  ),
  Mutant(
    'residual |p - q|',
    'power table 2',
    _verifier(weights=_next(lambda p_BV, q_BV: jnp.abs(p_BV - q_BV))),
  ),
  Mutant(
    'residual max(q - p, 0)',
    'power table 3',
    _verifier(weights=_next(lambda p_BV, q_BV: _residual(q_BV, p_BV))),
  ),
  Mutant(
    'residual through a softmax',
    'power table 4',
    _verifier(weights=_next(lambda p_BV, q_BV: jnp.exp(_residual(p_BV, q_BV)))),
  ),
  Mutant(
    'residual of the next position', 'power table 6', _verifier(weights=_next(shift=1))
  ),
  Mutant(
    'ratio inverted',
    'power table 8',
    _verifier(ratio=lambda p, q, tokens: 1 / _ratio(p, q, tokens)),
  ),
  Mutant(
    'accept always',
    'power table 9',
    _verifier(ratio=lambda p, q, tokens: jnp.ones(tokens.shape)),
  ),
  Mutant(
    'accept with probability p(x)',
    'power table 10',
    _verifier(ratio=lambda p, q, tokens: _at(p[:, :-1], tokens)),
  ),
  *(Mutant(name, 'a rule', _rule(rule)) for name, rule in FAULTY_RULES.items()),
  Mutant(
    'one coin for all positions',
    'power table 13',
    _verifier(coins=lambda key_B, count: jnp.tile(rng.uniform(key_B, 1), (1, count))),
  ),
  Mutant(
    'no stop at the first rejection',
    'power table 15',
    _verifier(count=lambda success_BG: jnp.sum(success_BG, axis=1)),
  ),
  Mutant(
    'p of the next position in the ratio',
    'power table 16',
    _verifier(ratio=lambda p, q, tokens: _ratio(p[:, 1:], q, tokens)),
  ),
  Mutant(
    'bonus from the law before',
    'power table 17',
    _verifier(weights=_bonus(lambda p_BV, before_BV, q_BV: before_BV)),
  ),
  Mutant(
    'bonus from the last q',
    'power table 18',
    _verifier(weights=_bonus(lambda p_BV, before_BV, q_BV: q_BV)),
  ),
  Mutant(
    'residual in place of the bonus',
    'power table 19',
    _verifier(
      weights=_bonus(lambda p_BV, before_BV, q_BV: _or_p(_residual(p_BV, q_BV), p_BV))
    ),
  ),
  Mutant(
    'draft recorded at another temperature',
    'power table 21',
    _record(lambda logq_BGV: jax.nn.log_softmax(0.7 * logq_BGV)),
  ),
  Mutant(
    'greedy draft, soft law recorded',
    'transformers issue 32867',
    _anew,
    ((model_module, 'rng', _argmax),),
  ),
  Mutant(
    'same keys every round',
    'power table 24',
    _anew,
    ((rng, 'block_keys', _same_keys_every_round),),
  ),
  Mutant('number accepted shared by the batch', 'power table 29', _shared_count),
  Mutant(
    'one position for all rows',
    'power table 30, the T5X cache index',
    _extend(_one_position_for_all),
  ),
  Mutant(
    'cache lacks the last draft after a full acceptance',
    'power table 17',
    _extend(_last_slot_not_kept),
  ),
  Mutant(
    'cache keeps rejected drafts',
    'a cache that is not rolled back',
    _extend(_rejected_slots_kept),
  ),
  Mutant(
    'EOS inside a block ignored',
    'power table 27',
    _anew,
    ((loop, 'commit', _eos_in_block_ignored),),
    needs_eos=True,
  ),
  Mutant(
    'budget overrun by one token',
    'power table 28',
    _anew,
    ((loop, 'commit', _budget_overrun),),
  ),
)
