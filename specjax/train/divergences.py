"""Distances of a draft's law q from a target's law p, one number per token.

For draft distillation: DistillSpec (Zhou et al. 2023, arXiv 2310.08461) compares
these four; GKD (Agarwal et al. 2023, arXiv 2306.13649) defines JSD(beta). What
speculative decoding gains hangs on one of them alone,

  alpha = 1 - E[ TVD(p, q) ]     (Leviathan et al. 2023, Theorem 3.5, Corollary 3.6)

but TVD's gradient is bounded by the probability that q gives to an id, and so is
next to nothing while the two laws hardly overlap: `kl_then_tvd` begins with KL.

All take log-laws, float32 [..., V], -inf for ids that a law rules out, and return
float32 [...] >= 0 (up to rounding), 0 iff p = q. Gradients are with respect to
logq and finite wherever the divergence is; nothing is clipped or floored.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Divergence = Callable[[jax.Array, jax.Array], jax.Array]


def _kl(loga_XV: jax.Array, logb_XV: jax.Array) -> jax.Array:
  """sum_x a(x) (log a(x) - log b(x)), where 0 log 0 = 0; inf if b rules out an id of a.

  The inner `where` keeps -inf - -inf out of the gradient, which an outer one alone
  would turn into NaN.
  """
  is_there = loga_XV > -jnp.inf
  loga_XV = jnp.where(is_there, loga_XV, 0.0)
  difference_XV = loga_XV - jnp.where(is_there, logb_XV, 0.0)
  return jnp.sum(jnp.where(is_there, jnp.exp(loga_XV) * difference_XV, 0.0), axis=-1)


def forward_kl(logp_XV: jax.Array, logq_XV: jax.Array) -> jax.Array:
  """KL(p || q) = sum_x p(x) log(p(x) / q(x)), in [0, inf].

  Covers all that the target may say. With p a point mass it is the cross-entropy
  to that token; with the target's law, Hinton et al. 2015.

  Example:
    >>> laws = jnp.log(jnp.array([[0.5, 0.5], [0.25, 0.75]]))
    >>> round(float(forward_kl(*laws)), 4)
    0.1438
  """
  return _kl(logp_XV, logq_XV)


def reverse_kl(logp_XV: jax.Array, logq_XV: jax.Array) -> jax.Array:
  """KL(q || p) = sum_x q(x) log(q(x) / p(x)), in [0, inf].

  Seeks a mode: it punishes drafts that the target would reject.

  Example:
    >>> laws = jnp.log(jnp.array([[0.5, 0.5], [0.25, 0.75]]))
    >>> round(float(reverse_kl(*laws)), 4)
    0.1308
  """
  return _kl(logq_XV, logp_XV)


def jsd(beta: float) -> Divergence:
  """JSD(beta) = beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q.

  GKD, equation 1. In [0, log 2]; symmetric at 1/2; JSD / beta tends to KL(p || q)
  for beta to 0, JSD / (1 - beta) to KL(q || p) for beta to 1.

  Args:
    beta: in (0, 1).

  Returns:
    The divergence.

  Raises:
    ValueError: beta out of range.

  Example:
    >>> apart = jnp.log(jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    >>> round(float(jsd(0.5)(*apart)), 4)  # log 2
    0.6931
  """
  if not 0 < beta < 1:
    raise ValueError(
      f'beta: {beta}; give a number between 0 and 1 (forward_kl and reverse_kl are '
      'its limits)'
    )

  def divergence(logp_XV: jax.Array, logq_XV: jax.Array) -> jax.Array:
    mixed = logp_XV + jnp.log(beta), logq_XV + jnp.log1p(-beta)
    # `logaddexp` has NaN for a gradient where both are -inf.
    is_there = jnp.maximum(*mixed) > -jnp.inf
    left, right = (jnp.where(is_there, each, 0.0) for each in mixed)
    logm_XV = jnp.where(is_there, jnp.logaddexp(left, right), -jnp.inf)
    return beta * _kl(logp_XV, logm_XV) + (1 - beta) * _kl(logq_XV, logm_XV)

  return divergence


def tvd(logp_XV: jax.Array, logq_XV: jax.Array) -> jax.Array:
  """TVD(p, q) = 1/2 sum_x |p(x) - q(x)| = 1 - sum_x min(p(x), q(x)), in [0, 1].

  The first form: it is exactly 0 at p = q, where the second leaves the rounding of
  two sums. Its gradient at p(x) = q(x) is the subgradient 0.

  Example:
    >>> laws = jnp.log(jnp.array([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]]))
    >>> round(float(tvd(*laws)), 4)
    0.1
  """
  return 0.5 * jnp.sum(jnp.abs(jnp.exp(logp_XV) - jnp.exp(logq_XV)), axis=-1)


def kl_then_tvd(tvd_weight: Any) -> Divergence:
  """(1 - w) KL(p || q) + w TVD(p, q): from the one to the other as training goes on.

  Args:
    tvd_weight: w, a number or a scalar array in [0, 1].
  """

  def divergence(logp_XV: jax.Array, logq_XV: jax.Array) -> jax.Array:
    kl = forward_kl(logp_XV, logq_XV)
    return (1 - tvd_weight) * kl + tvd_weight * tvd(logp_XV, logq_XV)

  return divergence


def masked_mean(values_X: jax.Array, real_X: jax.Array) -> jax.Array:
  """Mean of the values where `real_X` is true; 0 if it nowhere is.

  Values that are left out may be anything, NaN too.
  """
  kept_X = jnp.where(real_X, values_X, 0.0)
  return jnp.sum(kept_X) / jnp.maximum(jnp.sum(real_X), 1)
