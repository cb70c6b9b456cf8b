"""One logits -> log-law function, against NumPy and at its edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.core.warp import make_sampling, make_warp


def _reference(x, temperature=1.0, top_k=0, top_p=1.0, dead=()):
  """float64, by sorting: temperature, then top-k, then top-p of what is left."""
  x = np.asarray(x, np.float64).copy()
  x[list(dead)] = -np.inf
  if temperature == 0:
    return np.eye(len(x))[np.argmax(x)]
  z = x / temperature
  if top_k:
    z[z < np.sort(z)[-min(top_k, len(z))]] = -np.inf
  p = np.exp(z - z.max())
  p /= p.sum()
  if top_p < 1:
    ordered = np.sort(p)[::-1]
    last = ordered[np.searchsorted(np.cumsum(ordered), top_p)]
    p[p < last] = 0
    p /= p.sum()
  return p


@settings(max_examples=25, deadline=None)
@given(
  seed=st.integers(0, 2**31 - 1),
  temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
  top_k=st.sampled_from([0, 1, 3, 11, 12]),
  top_p=st.sampled_from([0.05, 0.5, 0.93, 1.0]),
)
def test_matches_sorting_in_float64(seed, temperature, top_k, top_p):
  x = np.random.default_rng(seed).normal(0, 3, (2, 3, 11)).astype(np.float32)
  sampling = make_sampling(2, temperature=temperature, top_k=top_k, top_p=top_p)
  logp = make_warp()(jnp.asarray(x), sampling, jnp.ones((2, 3), jnp.int32))
  for b in range(2):
    for t in range(3):
      want = _reference(x[b, t], temperature, top_k, top_p)
      np.testing.assert_allclose(np.exp(logp[b, t]), want, atol=2e-6)


def test_rows_have_their_own_options():
  x = jnp.asarray(np.random.default_rng(0).normal(0, 2, (4, 1, 7)), jnp.float32)
  options = [(0.0, 0, 1.0), (1.0, 2, 1.0), (0.5, 0, 0.6), (2.0, 3, 0.9)]
  t, k, p = (list(column) for column in zip(*options, strict=True))
  sampling = make_sampling(4, temperature=t, top_k=k, top_p=p)
  law = np.exp(make_warp()(x, sampling, jnp.ones((4, 1), jnp.int32)))
  for b, option in enumerate(options):
    np.testing.assert_allclose(law[b, 0], _reference(x[b, 0], *option), atol=2e-6)


def test_ties_are_kept_by_filters_and_broken_low_by_greedy():
  x = jnp.asarray([[[1.0, 3.0, 3.0, 0.0]]])
  slot = jnp.ones((1, 1), jnp.int32)
  greedy = make_warp()(x, make_sampling(1), slot)
  assert np.exp(greedy[0, 0]).tolist() == [0, 1, 0, 0]
  top_1 = make_warp()(x, make_sampling(1, temperature=1.0, top_k=1), slot)
  np.testing.assert_allclose(np.exp(top_1[0, 0]), [0, 0.5, 0.5, 0], atol=1e-7)
  top_p = make_warp()(x, make_sampling(1, temperature=1.0, top_p=0.1), slot)
  np.testing.assert_allclose(np.exp(top_p[0, 0]), [0, 0.5, 0.5, 0], atol=1e-7)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_padding_and_banned_ids_have_probability_zero(temperature):
  """The 28 padding rows of T5's embedding were never trained and may win."""
  x = jnp.zeros((1, 1, 8)).at[..., 6:].set(50.0).at[..., 2].set(40.0)
  warp = make_warp(vocab_size=6, banned_ids=(2,))
  logp = warp(x, make_sampling(1, temperature=temperature), jnp.ones((1, 1), jnp.int32))
  want = _reference(x[0, 0], temperature, dead=(2, 6, 7))
  np.testing.assert_allclose(np.exp(logp[0, 0]), want, atol=1e-7)


def test_min_new_tokens_holds_eos_back_by_absolute_slot():
  x = jnp.zeros((2, 3, 4)).at[..., 1].set(9.0)
  sampling = make_sampling(2, min_new_tokens=[0, 2])
  slot = jnp.array([[1, 2, 3], [1, 2, 3]])
  logp = make_warp(eos_id=1)(x, sampling, slot)
  assert jnp.argmax(logp, -1).tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize('temperature', [1e-4, 1e-30, 1e-45])
def test_tiny_temperatures_stay_finite(temperature):
  x = jnp.asarray([[[1e4, -1e4, 9.999e3, 0.0]]])
  sampling = make_sampling(1, temperature=temperature)
  law = np.exp(make_warp()(x, sampling, jnp.ones((1, 1), jnp.int32)))[0, 0]
  assert law.tolist() == [1, 0, 0, 0]


def test_bfloat16_logits_give_a_float32_law():
  x = jnp.asarray(np.random.default_rng(0).normal(0, 3, (1, 2, 40)), jnp.bfloat16)
  logp = make_warp()(x, make_sampling(1, temperature=1.0), jnp.ones((1, 2), jnp.int32))
  assert logp.dtype == jnp.float32
  np.testing.assert_allclose(np.exp(np.asarray(logp, np.float64)).sum(-1), 1, atol=1e-6)


def test_equal_arguments_give_the_identical_function():
  assert make_warp(10, 1, (2,)) is make_warp(10, 1, (2,))
  assert make_warp(10, 1) is not make_warp(11, 1)


def test_width_does_not_change_a_law():
  """A token judged in a wide pass meets the law of a narrow one, bit for bit."""
  x = jnp.asarray(np.random.default_rng(1).normal(0, 3, (1, 6, 300)), jnp.float32)
  sampling = make_sampling(1, temperature=0.7, top_k=50, top_p=0.9)
  warp = jax.jit(make_warp())
  slot = jnp.arange(1, 7)[None]
  wide = warp(x, sampling, slot)
  narrow = [warp(x[:, t : t + 1], sampling, slot[:, t : t + 1]) for t in range(6)]
  np.testing.assert_allclose(wide, jnp.concatenate(narrow, 1), rtol=0, atol=1e-6)
  np.testing.assert_array_equal(wide > -jnp.inf, jnp.concatenate(narrow, 1) > -jnp.inf)
