"""Verification: arithmetic, then a draw.

`Rule.acceptance` and `verify_law` are deterministic and enumerable; randomness
enters in `verify`, with injectable coins. Two rules share everything else:

  token-wise  Leviathan et al. 2023, Algorithm 1 (arXiv 2211.17192); Chen et al.
              2023 (arXiv 2302.01318). Accept x_i iff u < min(1, p/q); stop at the
              first rejection; correct from norm(max(p - q, 0)).
  block       Sun et al. 2024, Algorithm 2 (arXiv 2403.10444). Verifies the joint
              ratio; the *last* success counts, so a later coin may override an
              earlier failure. Never worse, and equal to token-wise at G = 1.

No epsilons: p(x) = 0 is never accepted because the comparison is strict, and a
residual without mass (p == q up to rounding) falls back to p.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax import shapes
from specjax.core import rng
from specjax.core.types import Acceptance, Draft, Rule, Verdict

Verifier = Callable[..., Verdict]


def _log_ratio(logp_BG1V, draft: Draft):
  """log p(x_i) - log q(x_i) for the drafted tokens; -inf where p(x_i) = 0."""
  num_draft = draft.tokens_BG.shape[1]
  token_BG1 = draft.tokens_BG[..., None]
  logp_BG = jnp.take_along_axis(logp_BG1V[:, :num_draft], token_BG1, axis=-1)[..., 0]
  logq_BG = jnp.take_along_axis(draft.logq_BGV, token_BG1, axis=-1)[..., 0]
  return logp_BG - logq_BG


def _proposed(draft: Draft):
  """bool [B, G]: position i holds a real proposal."""
  return jnp.arange(draft.tokens_BG.shape[1])[None] < draft.count_B[:, None]


def _token_acceptance(logp_BG1V, draft: Draft) -> Acceptance:
  """Algorithm 1: prob_i = min(1, p_i(x_i) / q_i(x_i)); every weight is 1."""
  prob_BG = jnp.exp(jnp.minimum(_log_ratio(logp_BG1V, draft), 0.0))
  return Acceptance(
    prob_BG=jnp.where(_proposed(draft), prob_BG, 0.0),
    weight_BG1=jnp.ones(logp_BG1V.shape[:2], prob_BG.dtype),
  )


def _block_acceptance(logp_BG1V, draft: Draft) -> Acceptance:
  """Algorithm 2 of block verification.

  P_0 = 1, P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)). For i < count, with
  Z_i = sum_x max(P_i p_{i+1}(x) - q_{i+1}(x), 0), the coin of i succeeds with
  probability Z_i / (Z_i + 1 - P_i), where 0 / 0 is 1; that of `count` with
  P_count. The residual after i accepted tokens is max(P_i p_{i+1} - q_{i+1}, 0).
  """
  num_draft = draft.tokens_BG.shape[1]
  proposed_BG = _proposed(draft)
  ratio_BG = jnp.exp(jnp.where(proposed_BG, _log_ratio(logp_BG1V, draft), -jnp.inf))

  def grow(weight_B, ratio_B):
    weight_B = jnp.minimum(1.0, weight_B * ratio_B)
    return weight_B, weight_B

  one_B = jnp.ones(ratio_BG.shape[:1], ratio_BG.dtype)
  _, weight_GB = jax.lax.scan(grow, one_B, ratio_BG.T)
  weight_BG = weight_GB.T
  # Row i of p and q is the law of x_{i+1}, so weight i meets row i.
  p_BGV = jnp.exp(logp_BG1V[:, 1:num_draft])
  q_BGV = jnp.exp(draft.logq_BGV[:, 1:])
  inner_BG = weight_BG[:, :-1]
  mass_BG = jnp.sum(jnp.maximum(inner_BG[..., None] * p_BGV - q_BGV, 0.0), axis=-1)
  total_BG = mass_BG + (1.0 - inner_BG)
  inner_BG = jnp.where(
    total_BG > 0, mass_BG / jnp.where(total_BG > 0, total_BG, 1.0), 1.0
  )
  is_last_BG = jnp.arange(1, num_draft + 1)[None] == draft.count_B[:, None]
  prob_BG = jnp.concatenate([inner_BG, weight_BG[:, -1:]], axis=1)
  prob_BG = jnp.where(is_last_BG, weight_BG, prob_BG)
  return Acceptance(
    prob_BG=jnp.where(proposed_BG, prob_BG, 0.0),
    weight_BG1=jnp.concatenate([one_B[:, None], weight_BG], axis=1),
  )


token_rule = Rule(_token_acceptance, 'first_rejection')
block_rule = Rule(_block_acceptance, 'last_acceptance')


def _next_weights(logp_BV, logq_BV, weight_B, bonus_B):
  """Unnormalised law of the next token: the residual, or p for the bonus."""
  p_BV = jnp.exp(logp_BV)
  residual_BV = jnp.maximum(weight_B[:, None] * p_BV - jnp.exp(logq_BV), 0.0)
  no_mass_B1 = jnp.sum(residual_BV, axis=-1, keepdims=True) <= 0
  return jnp.where(bonus_B[:, None] | no_mass_B1, p_BV, residual_BV)


def verify_law(rule: Rule, logp_BG1V, draft: Draft):
  """The exact law of a verdict, given the drafted tokens.

  Args:
    rule: a verification rule.
    logp_BG1V: float [B, G + 1, V]; the warped target's log-laws.
    draft: the proposal.

  Returns:
    num_law_BG1: P(num_accepted = n); next_law_BG1V: the law of the next token
    given n. Entries for n > count are 0 and p.
  """
  acceptance = rule.acceptance(logp_BG1V, draft)
  prob_BG, weight_BG1 = acceptance
  one_B1 = jnp.ones_like(prob_BG[:, :1])
  if rule.select == 'first_rejection':
    reached_BG1 = jnp.concatenate([one_B1, jnp.cumprod(prob_BG, axis=1)], axis=1)
    num_law_BG1 = reached_BG1 * jnp.concatenate([1.0 - prob_BG, one_B1], axis=1)
  else:
    later_BG = jnp.cumprod((1.0 - prob_BG)[:, ::-1], axis=1)[:, ::-1]
    fail_BG1 = jnp.concatenate([later_BG, one_B1], axis=1)
    num_law_BG1 = fail_BG1 * jnp.concatenate([one_B1, prob_BG], axis=1)
  num_draft = prob_BG.shape[1]
  no_law_B1V = jnp.full_like(logp_BG1V[:, :1], -jnp.inf)
  logq_BG1V = jnp.concatenate([draft.logq_BGV, no_law_B1V], axis=1)
  bonus_BG1 = jnp.arange(num_draft + 1)[None] >= draft.count_B[:, None]
  weights_BG1V = jax.vmap(_next_weights, in_axes=1, out_axes=1)(
    logp_BG1V, logq_BG1V, weight_BG1, bonus_BG1
  )
  total_BG1 = jnp.sum(weights_BG1V, axis=-1, keepdims=True)
  return num_law_BG1, weights_BG1V / total_BG1


def count_accepted(rule: Rule, success_BG) -> shapes.Int_B:
  """Number of accepted tokens, given which coins succeeded."""
  if rule.select == 'first_rejection':
    return jnp.sum(jnp.cumprod(success_BG.astype(jnp.int32), axis=1), axis=1)
  position_G = jnp.arange(1, success_BG.shape[1] + 1, dtype=jnp.int32)
  return jnp.max(jnp.where(success_BG, position_G[None], 0), axis=1, initial=0)


def verify(
  rule: Rule,
  coin_BG: shapes.Float_BG,
  resample_key_B: shapes.RowKeys,
  draft: Draft,
  logp_BG1V: shapes.LogLaw_BG1V,
  draw: Callable[..., shapes.Int_B] = rng.categorical,
) -> Verdict:
  """Decides with the given coins: position i succeeds iff coin < prob (strict).

  Args:
    rule: a verification rule.
    coin_BG: float32 [B, G] in [0, 1).
    resample_key_B: the key is consumed by the draw of the next token.
    draft: the proposal.
    logp_BG1V: float32 [B, G + 1, V]; the warped target's log-laws.
    draw: `(resample_key_B, log-weights [B, V]) -> token_B`; tests pass quadrature.
  """
  num_draft = coin_BG.shape[1]
  if num_draft == 0:  # plain decoding: every token is a bonus token
    next_token_B = draw(resample_key_B, logp_BG1V[:, 0])
    return Verdict(jnp.zeros_like(next_token_B), next_token_B)
  acceptance = rule.acceptance(logp_BG1V, draft)
  num_B = count_accepted(rule, coin_BG < acceptance.prob_BG).astype(jnp.int32)
  bonus_B = num_B >= draft.count_B
  logp_BV = _row(logp_BG1V, num_B)
  logq_BV = _row(draft.logq_BGV, jnp.minimum(num_B, num_draft - 1))
  weight_B = _row(acceptance.weight_BG1[..., None], num_B)[:, 0]
  weights_BV = _next_weights(logp_BV, logq_BV, weight_B, bonus_B)
  return Verdict(num_B, draw(resample_key_B, jnp.log(weights_BV)))


def _row(x_BGX, index_B):
  """x[b, index[b]]: a slice for one row, since what XLA on CPU fuses with a gather
  it runs one element at a time."""
  if x_BGX.shape[0] == 1:
    return jax.lax.dynamic_index_in_dim(x_BGX, index_B[0], axis=1, keepdims=False)
  return jnp.take_along_axis(x_BGX, index_B[:, None, None], axis=1)[:, 0]


def make_verifier(rule: Rule) -> Verifier:
  """`verifier(accept_key_B, resample_key_B, draft, logp_BG1V) -> Verdict`."""

  def verifier(accept_key_B, resample_key_B, draft: Draft, logp_BG1V) -> Verdict:
    coin_BG = rng.uniform(accept_key_B, draft.tokens_BG.shape[1])
    return verify(rule, coin_BG, resample_key_B, draft, logp_BG1V)

  return verifier


token_verifier = make_verifier(token_rule)
block_verifier = make_verifier(block_rule)
