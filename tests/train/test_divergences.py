"""Divergences: values and gradients in closed form, limits, and a mutant of each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import logsumexp

from specjax.eval import theory
from specjax.train import divergences

NUM_IDS = 5
NAMED = {
  'forward_kl': divergences.forward_kl,
  'reverse_kl': divergences.reverse_kl,
  'jsd': divergences.jsd(0.3),
  'tvd': divergences.tvd,
  'kl_then_tvd': divergences.kl_then_tvd(0.25),
}


def pair(seed, zeros=False):
  """Logits of q and the law p, float64; with `zeros`, both rule out id 2 and p id 4."""
  rnd = np.random.default_rng(seed)
  p, z = rnd.dirichlet(np.ones(NUM_IDS)), rnd.normal(size=NUM_IDS)
  if zeros:
    p[[2, 4]] = 0
    z[2] = -np.inf
  return p / p.sum(), z


def softmax(z):
  weight = np.exp(z - z.max())
  return weight / weight.sum()


def kl(a, b):
  seen = a > 0
  return float((a[seen] * np.log(a[seen] / b[seen])).sum())


def value(name, p, q):
  """By the definitions, in float64."""
  m = 0.3 * p + 0.7 * q
  return {
    'forward_kl': lambda: kl(p, q),
    'reverse_kl': lambda: kl(q, p),
    'jsd': lambda: 0.3 * kl(p, m) + 0.7 * kl(q, m),
    'tvd': lambda: 1 - np.minimum(p, q).sum(),
    'kl_then_tvd': lambda: 0.75 * kl(p, q) + 0.25 * (1 - np.minimum(p, q).sum()),
  }[name]()


def gradient(name, p, q):
  """d value / d logits of q: q_i (f_i - sum_j q_j f_j), f_i = d value / d q_i."""
  with np.errstate(divide='ignore', invalid='ignore'):
    slope = {
      'forward_kl': -p / q,
      'reverse_kl': np.log(q / p),
      'jsd': 0.7 * np.log(q / (0.3 * p + 0.7 * q)),
      'tvd': -(q < p).astype(float),
      'kl_then_tvd': -0.75 * p / q - 0.25 * (q < p),
    }[name]
  slope = np.where(q > 0, slope, 0.0)
  return q * (slope - (q * slope).sum())


@functools.cache
def compiled(divergence):
  def loss(z, p):
    return divergence(jnp.log(p), jax.nn.log_softmax(z))

  return jax.jit(jax.value_and_grad(loss))


def both(divergence, p, z):
  """Value, and gradient with respect to q's logits."""
  return compiled(divergence)(jnp.asarray(z, jnp.float32), jnp.asarray(p, jnp.float32))


@pytest.mark.parametrize(
  ('name', 'zeros'),
  # Reverse KL is infinite where p rules out an id of q: see below.
  [(name, zeros) for name in NAMED for zeros in (False, True)
   if not (zeros and name == 'reverse_kl')],
)  # fmt: skip
def test_value_and_gradient_in_closed_form(name, zeros):
  for seed in range(5):
    p, z = pair(seed, zeros)
    found, slope = both(NAMED[name], p, z)
    np.testing.assert_allclose(found, value(name, p, softmax(z)), rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(slope, gradient(name, p, softmax(z)), atol=2e-6)
    assert np.abs(slope).max() > 1e-2


@pytest.mark.parametrize('name', NAMED)
def test_closed_forms_are_derivatives(name):
  """The expected gradients above against finite differences of the expected values."""
  p, z = pair(7)
  step = 1e-6
  differences = [
    (
      value(name, p, softmax(z + step * unit))
      - value(name, p, softmax(z - step * unit))
    )
    / (2 * step)
    for unit in np.eye(NUM_IDS)
  ]
  np.testing.assert_allclose(gradient(name, p, softmax(z)), differences, atol=1e-8)


def test_ids_that_only_one_law_has():
  p, q = np.array([0.0, 0.5, 0.5]), np.array([0.5, 0.5, 0.0])
  with np.errstate(divide='ignore'):
    logs = jnp.log(jnp.asarray([p, q], jnp.float32))
  assert np.isposinf(divergences.forward_kl(*logs))
  assert np.isposinf(divergences.reverse_kl(*logs))
  np.testing.assert_allclose(divergences.tvd(*logs), 0.5, atol=1e-6)
  np.testing.assert_allclose(divergences.jsd(0.5)(*logs), 0.5 * np.log(2), atol=1e-6)


@pytest.mark.parametrize('name', NAMED)
def test_zero_with_zero_gradient_where_laws_are_equal_and_positive_elsewhere(name):
  p, z = pair(3)

  def at_itself(z):  # one array for both: a difference by rounding has a sign
    logq = jax.nn.log_softmax(z)
    return NAMED[name](jax.lax.stop_gradient(logq), logq)

  equal, slope = jax.jit(jax.value_and_grad(at_itself))(jnp.asarray(z, jnp.float32))
  assert abs(float(equal)) < 2e-7
  np.testing.assert_allclose(slope, 0.0, atol=2e-7)
  apart, _ = both(NAMED[name], p, z)
  assert apart > 1e-2


def test_jsd_tends_to_both_kls_and_is_symmetric_at_a_half():
  p, z = pair(1)
  logs = jnp.log(jnp.asarray([p, softmax(z)], jnp.float32))
  beta = 1e-3
  np.testing.assert_allclose(
    divergences.jsd(beta)(*logs) / beta, kl(p, softmax(z)), rtol=1e-2
  )
  np.testing.assert_allclose(
    divergences.jsd(1 - beta)(*logs) / beta, kl(softmax(z), p), rtol=1e-2
  )
  half = divergences.jsd(0.5)
  np.testing.assert_allclose(half(*logs), half(*logs[::-1]), rtol=1e-5)
  assert not np.isclose(divergences.jsd(0.3)(*logs), divergences.jsd(0.3)(*logs[::-1]))
  for beta in (0.0, 1.0):
    with pytest.raises(
      ValueError, match=f'beta: {beta}; give a number between 0 and 1'
    ):
      divergences.jsd(beta)


def test_tvd_is_what_drafts_are_rejected_with():
  """alpha = 1 - E[TVD], with the acceptance of `eval.theory`; rows are apart."""
  laws = np.random.default_rng(0).dirichlet(np.ones(7), size=(2, 4, 3))
  found = divergences.tvd(*jnp.log(jnp.asarray(laws, jnp.float32)))
  assert found.shape == (4, 3)
  for place in np.ndindex(4, 3):
    accepted = theory.acceptance(laws[0][place], laws[1][place])
    np.testing.assert_allclose(1 - found[place], accepted, atol=1e-6)


def test_tvd_has_no_gradient_where_laws_hardly_overlap_and_kl_has():
  """Why there is a warm start."""
  p = np.array([1.0, 0.0, 0.0, 0.0, 0.0])
  z = np.array([-20.0, 0.0, 0.0, 0.0, 0.0])
  assert np.abs(both(divergences.tvd, p, z)[1]).max() < 1e-6
  assert np.abs(both(divergences.forward_kl, p, z)[1]).max() > 0.9
  ends = [np.asarray(both(divergences.kl_then_tvd(w), p, z)[1]) for w in (0.0, 1.0)]
  np.testing.assert_allclose(ends[0], both(divergences.forward_kl, p, z)[1])
  np.testing.assert_allclose(ends[1], both(divergences.tvd, p, z)[1])


def test_masked_mean_leaves_padding_out_whatever_it_holds():
  values = jnp.array([[1.0, 3.0, jnp.nan], [5.0, jnp.inf, jnp.nan]])
  real = jnp.array([[True, True, False], [True, False, False]])
  assert divergences.masked_mean(values, real) == 3.0
  assert divergences.masked_mean(values, ~real & False) == 0.0


MUTANTS = {
  'KL the wrong way round': ('forward_kl', divergences.reverse_kl),
  'jsd with beta and 1 - beta swapped': ('jsd', divergences.jsd(0.7)),
  'sum of differences without its half': (
    'tvd', lambda p, q: 2 * divergences.tvd(p, q)
  ),
  'weights of the warm start swapped': (
    'kl_then_tvd', divergences.kl_then_tvd(0.75)
  ),
  'q not normalised': (
    'forward_kl', lambda p, q: divergences.forward_kl(p, q + logsumexp(2 * q))
  ),
}  # fmt: skip


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_found(mutant):
  name, wrong = MUTANTS[mutant]
  p, z = pair(0)
  found, slope = both(wrong, p, z)
  q = softmax(z)
  assert abs(float(found) - value(name, p, q)) > 1e-2
  assert np.abs(slope - gradient(name, p, q)).max() > 1e-2
