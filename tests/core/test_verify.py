"""The two rules: arithmetic, boundaries, and the draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import rng, verify
from specjax.core.types import Draft

ULP = 2.0**-23  # float32 uniforms are multiples of it
RULES = {'token': verify.token_rule, 'block': verify.block_rule}
decide = jax.jit(verify.verify, static_argnums=0)
law_of = jax.jit(verify.verify_law, static_argnums=0)
block_keys = jax.jit(rng.block_keys)


def _log(p):
  with np.errstate(divide='ignore'):
    return jnp.asarray(np.log(np.asarray(p, np.float64)), jnp.float32)


def _case(p_G1V, q_GV, tokens_G, count=None):
  """One row."""
  count = len(tokens_G) if count is None else count
  draft = Draft(
    jnp.asarray([tokens_G], jnp.int32),
    _log(q_GV)[None],
    jnp.asarray([count], jnp.int32),
  )
  return _log(p_G1V)[None], draft


def _decide(rule, p_G1V, q_GV, tokens_G, coins, count=None):
  logp, draft = _case(p_G1V, q_GV, tokens_G, count)
  keys = rng.row_keys(0, jnp.arange(1))
  verdict = decide(rule, jnp.asarray([coins], jnp.float32), keys, draft, logp)
  return int(verdict.num_accepted_B[0]), int(verdict.next_token_B[0])


@pytest.mark.parametrize('rule', RULES.values(), ids=RULES)
def test_forbidden_token_is_never_accepted_not_even_by_a_zero_coin(rule):
  p, q = [[1.0, 0.0], [1.0, 0.0]], [[0.5, 0.5]]
  assert _decide(rule, p, q, [1], [0.0]) == (0, 0)


@pytest.mark.parametrize('rule', RULES.values(), ids=RULES)
def test_token_at_least_as_likely_is_always_accepted(rule):
  p, q = [[0.75, 0.25], [0.0, 1.0]], [[0.5, 0.5]]
  assert _decide(rule, p, q, [0], [1 - ULP]) == (1, 1)


@pytest.mark.parametrize('rule', RULES.values(), ids=RULES)
def test_coin_at_the_probability_rejects(rule):
  """Strict: the coin's law on multiples of 2^-23 gives exactly p/q = 1/2."""
  p, q = [[0.25, 0.75], [1.0, 0.0]], [[0.5, 0.5]]
  logp, draft = _case(p, q, [0])
  prob = float(rule.acceptance(logp, draft).prob_BG[0, 0])
  assert abs(prob - 0.5) < 1e-6
  assert _decide(rule, p, q, [0], [prob])[0] == 0
  assert _decide(rule, p, q, [0], [prob - ULP])[0] == 1


@pytest.mark.parametrize('rule', RULES.values(), ids=RULES)
def test_residual_without_mass_falls_back_to_p(rule):
  """p == q and a coin forced to fail: reachable by rounding only."""
  p, q = [[0.3, 0.0, 0.7], [0.0, 0.0, 1.0]], [[0.3, 0.0, 0.7]]
  logp, draft = _case(p, q, [0])
  forced = verify.Rule(
    lambda *args: rule.acceptance(*args)._replace(prob_BG=jnp.zeros((1, 1))),
    rule.select,
  )
  _, next_law = law_of(forced, logp, draft)
  np.testing.assert_allclose(next_law[0, 0], p[0], atol=1e-6)
  draws = {
    int(
      decide(
        forced, jnp.ones((1, 1)), rng.row_keys(seed, jnp.arange(1)), draft, logp
      ).next_token_B[0]
    )
    for seed in range(32)
  }
  assert draws == {0, 2}


@pytest.mark.parametrize('rule', RULES.values(), ids=RULES)
def test_laws_one_ulp_apart_stay_inside_the_support(rule):
  p = np.array([0.3, 0.0, 0.7])
  q = np.asarray(jnp.asarray(p, jnp.bfloat16).astype(jnp.float32))
  logp, draft = _case([p, p], [q], [0])
  num_law, next_law = law_of(rule, logp, draft)
  assert np.isfinite(num_law).all()
  assert np.isfinite(next_law).all()
  assert float(next_law[0, :, 1].max()) == 0


@pytest.mark.parametrize('rule', RULES.values(), ids=RULES)
def test_positions_from_count_on_are_not_judged(rule):
  """count = 1 of G = 3: whatever lies behind, NaN-free, and the bonus is p_1."""
  p = [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
  q = [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
  assert _decide(rule, p, q, [0, 1, 1], [0.0, 0.0, 0.0], count=1) == (1, 2)
  assert _decide(rule, p, q, [0, 1, 1], [0.0, 0.0, 0.0], count=0)[0] == 0
  logp, draft = _case(p, q, [0, 1, 1], count=1)
  num_law, next_law = law_of(rule, logp, draft)
  np.testing.assert_allclose(num_law[0], [0, 1, 0, 0], atol=1e-6)
  np.testing.assert_allclose(next_law[0, 1], p[1], atol=1e-6)


def test_block_equals_token_at_one_draft():
  r = np.random.default_rng(0)
  for _ in range(10):
    p, q = r.dirichlet(np.ones(4), 2), r.dirichlet(np.ones(4), 1)
    logp, draft = _case(p, q, [int(r.integers(4))])
    a, b = (law_of(rule, logp, draft) for rule in RULES.values())
    np.testing.assert_allclose(a[0], b[0], atol=1e-6)
    np.testing.assert_allclose(a[1], b[1], atol=1e-6)


def _expected_accepted(rule, p_V, q_V, num_draft):
  total = 0.0
  for tokens in np.ndindex(*(len(p_V),) * num_draft):
    logp, draft = _case([p_V] * (num_draft + 1), [q_V] * num_draft, list(tokens))
    num_law, _ = law_of(rule, logp, draft)
    weight = np.prod([q_V[t] for t in tokens])
    total += weight * float((num_law[0] * np.arange(num_draft + 1)).sum())
  return total


def test_expected_accepted_of_the_block_paper():
  """arXiv 2403.10444, section 2: M_b = (1/3, 2/3), M_s = (2/3, 1/3), gamma = 2."""
  p, q = [1 / 3, 2 / 3], [2 / 3, 1 / 3]
  assert _expected_accepted(verify.token_rule, p, q, 2) == pytest.approx(
    10 / 9, abs=1e-5
  )
  assert _expected_accepted(verify.block_rule, p, q, 2) == pytest.approx(
    11 / 9, abs=1e-5
  )


def test_acceptance_is_the_overlap():
  """Theorem 3.5 (Leviathan et al. 2023): beta = sum_x min(p, q) = 1 - TV."""
  p, q = [0.5, 0.3, 0.2], [0.6, 0.3, 0.1]
  assert _expected_accepted(verify.token_rule, p, q, 1) == pytest.approx(0.9, abs=1e-6)


def test_uniform_draft_of_a_one_hot_target_accepts_one_in_v():
  """A wrong count of matches accepts everything; a shifted index accepts nothing."""
  num_rows, V, G = 1 << 14, 5, 3
  one_hot = np.eye(V)[[4, 2, 0, 1]]  # a law per position: a shift shows
  tokens = np.random.default_rng(0).integers(0, V, (num_rows, G))
  draft = Draft(
    jnp.asarray(tokens, jnp.int32),
    jnp.full((num_rows, G, V), -np.log(V), jnp.float32),
    jnp.full(num_rows, G, jnp.int32),
  )
  logp = jnp.tile(_log(one_hot)[None], (num_rows, 1, 1))
  keys = block_keys(rng.row_keys(0, jnp.arange(num_rows)), jnp.ones(num_rows, int))
  verdict = jax.jit(verify.token_verifier)(keys.accept_B, keys.resample_B, draft, logp)
  want = np.cumprod(tokens == np.array([4, 2, 0])[None], axis=1).sum(1)
  np.testing.assert_array_equal(verdict.num_accepted_B, want)
  np.testing.assert_array_equal(
    verdict.next_token_B, np.array([4, 2, 0, 1])[verdict.num_accepted_B]
  )


def test_the_draw_follows_the_law():
  """`verify` against `verify_law` on one fixed block: joint of (n, next token)."""
  num_rows = 1 << 17
  r = np.random.default_rng(3)
  p, q = r.dirichlet(np.ones(3), 3), r.dirichlet(np.ones(3), 2)
  keys = block_keys(rng.row_keys(0, jnp.arange(num_rows)), jnp.ones(num_rows, int))
  for rule in RULES.values():
    logp, draft = _case(p, q, [1, 2])
    num_law, next_law = law_of(rule, logp, draft)
    want = np.asarray(num_law[0, :, None] * next_law[0], np.float64).ravel() * num_rows
    many = jax.tree.map(lambda x: jnp.repeat(x, num_rows, 0), (draft, logp))
    verdict = jax.jit(verify.make_verifier(rule))(keys.accept_B, keys.resample_B, *many)
    cell = np.asarray(verdict.num_accepted_B) * 3 + np.asarray(verdict.next_token_B)
    count = np.bincount(cell, minlength=9)
    assert count[want < 1e-3].sum() == 0
    live = want > 5
    chi2 = ((count - want)[live] ** 2 / want[live]).sum()
    assert chi2 < 43  # at most 8 degrees of freedom: p < 1e-6 beyond 42.7
