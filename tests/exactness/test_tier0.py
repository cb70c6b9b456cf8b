"""Three laws of the loop, equal: rational, float64 of the shipped rule, target's.

The rational law must equal the product of the target's laws exactly, and the
float64 law of `core.verify.verify_law`, composed over rounds, the rational one to
1e-12. Nothing is sampled here.
"""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import rng, types, verify, warp
from specjax.testing import enumerate_law, rational, tables

TOLERANCE = 1e-12
RULES = {
  'token': (rational.token_rule, verify.token_rule),
  'block': (rational.block_rule, verify.block_rule),
}


@pytest.fixture(autouse=True)
def x64():
  with jax.enable_x64(True):
    yield


def one_hot(law):
  """The point mass on the likeliest id, the first one of equals."""

  def point(prefix):
    law_V = list(law(prefix))
    return [Fraction(int(i == law_V.index(max(law_V)))) for i in range(len(law_V))]

  return point


def half(law, first):
  """A law on the first, or on the other, ids alone."""

  def restricted(prefix):
    law_V = list(law(prefix))
    middle = len(law_V) // 2
    kept_V = [x if (i < middle) == first else Fraction(0) for i, x in enumerate(law_V)]
    return [x / sum(kept_V) for x in kept_V]

  return restricted


def case_of(name, vocab_size, order=1):
  """(p, q) of a named case, in rationals."""

  def law(seed, zeros=0):
    return rational.random_conditional(seed, vocab_size, order, zeros)

  p, q = law('p'), law('q')
  return {
    'random': lambda: (p, q),
    'zeros in p': lambda: (law('p', 1), q),
    'zeros in q': lambda: (p, law('q', 1)),
    'zeros in both': lambda: (law('p', 1), law('q', 1)),
    'equal': lambda: (p, p),
    'disjoint': lambda: (half(p, True), half(q, False)),
    'one-hot p': lambda: (one_hot(p), q),
    'one-hot q': lambda: (p, one_hot(q)),
    'one-hot both': lambda: (one_hot(p), one_hot(q)),
  }[name]()


CASES = (
  'random',
  'zeros in p',
  'zeros in q',
  'zeros in both',
  'equal',
  'disjoint',
  'one-hot p',
  'one-hot q',
  'one-hot both',
)


def check(rule, p, q, vocab_size, num_draft, num_tokens, **fields):
  """Asserts that the three laws are equal; returns the rational one."""
  in_rationals, in_floats = RULES[rule]
  fields = {'num_draft': num_draft, 'num_tokens': num_tokens, 'order': 1, **fields}
  exact = rational.loop_law(in_rationals, p, q, **fields)
  assert exact == rational.target_law(p, num_tokens, fields.get('eos_id'))
  shipped = enumerate_law.loop_law(
    in_floats,
    rational.as_float(p),
    rational.as_float(q),
    vocab_size=vocab_size,
    **fields,
  )
  assert rational.max_difference(shipped, exact) < TOLERANCE
  return exact


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('num_draft', [1, 2, 3])
@pytest.mark.parametrize('case', CASES)
def test_two_full_rounds(case, num_draft, rule):
  p, q = case_of(case, vocab_size=3)
  check(rule, p, q, 3, num_draft, num_tokens=2 * (num_draft + 1))


@pytest.mark.parametrize('rule', RULES)
def test_two_full_rounds_of_four_drafts(rule):
  p, q = case_of('zeros in both', vocab_size=3)
  law = check(rule, p, q, 3, num_draft=4, num_tokens=10)
  assert len(law) == 2**10


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('num_draft', [1, 2, 3, 4])
def test_four_ids(num_draft, rule):
  p, q = case_of('zeros in q', vocab_size=4)
  check(rule, p, q, 4, num_draft, num_tokens=min(2 * (num_draft + 1), 6))


@pytest.mark.parametrize('rule', RULES)
def test_laws_that_depend_on_two_tokens(rule):
  p, q = case_of('random', vocab_size=3, order=2)
  check(rule, p, q, 3, num_draft=2, num_tokens=6, order=2)


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('num_draft', [1, 3])
def test_eos_and_budget(num_draft, rule):
  p, q = case_of('random', vocab_size=3)
  law = check(rule, p, q, 3, num_draft, num_tokens=7, eos_id=2)
  assert {len(output) for output in law} == set(range(1, 8))


def varying(prefix):
  return (2 * len(prefix) + sum(prefix)) % 4


@pytest.mark.parametrize('eos_id', [None, 0])
@pytest.mark.parametrize('rule', RULES)
def test_number_of_drafts_varies_by_round(rule, eos_id):
  # The oracle runs a round of G' < G drafts, the shipped rule one of G with a
  # count of G': the masking of what is not proposed is judged here.
  p, q = case_of('random', vocab_size=3)
  check(rule, p, q, 3, num_draft=3, num_tokens=7, eos_id=eos_id, count=varying)


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('case', ['random', 'zeros in both'])
def test_law_of_one_block(case, rule):
  """Blocks, not outputs: the number accepted and its joint law with the tokens."""
  in_rationals, in_floats = RULES[rule]
  p, q = case_of(case, vocab_size=3)
  exact = rational.block_law(in_rationals, p, q, 3)
  shipped = enumerate_law.block_law(
    in_floats, rational.as_float(p), rational.as_float(q), vocab_size=3, num_draft=3
  )
  assert rational.max_difference(shipped, exact) < TOLERANCE


def test_first_draft_is_accepted_with_the_overlap_and_block_accepts_more():
  gains = []
  for seed in range(10):
    p = rational.random_conditional(f'p{seed}', 3)
    q = rational.random_conditional(f'q{seed}', 3, zeros=seed % 2)
    token, block = (rational.block_law(rule[0], p, q, 3) for rule in RULES.values())
    first = sum(mass for y, mass in token.items() if len(y) > 1)
    assert first == sum(min(a, b) for a, b in zip(p(()), q(()), strict=True))
    gains.append(rational.expected_accepted(block) - rational.expected_accepted(token))
  assert min(gains) >= 0
  assert max(gains) > Fraction(1, 50)


@pytest.mark.parametrize('rule', RULES)
def test_coins_next_to_the_threshold_decide(rule):
  """A relative 2^-40 below the probability accepts, 2^-40 above it rejects."""
  num_rows, num_draft = 64, 3
  random = np.random.default_rng(0)
  p_BG1V = random.dirichlet(np.ones(4), (num_rows, num_draft + 1))
  q_BGV = random.dirichlet(np.ones(4), (num_rows, num_draft))
  draft = types.Draft(
    jnp.asarray(random.integers(0, 4, (num_rows, num_draft)), jnp.int32),
    jnp.log(q_BGV),
    jnp.full(num_rows, num_draft, jnp.int32),
  )
  logp_BG1V = jnp.log(p_BG1V)
  prob_BG = np.asarray(RULES[rule][1].acceptance(logp_BG1V, draft).prob_BG)
  assert ((prob_BG > 0) & (prob_BG < 1)).sum(axis=0).min() > num_rows / 4
  key_B = rng.row_keys(0, jnp.arange(num_rows))

  @jax.jit
  def accepted(coin_BG):
    verdict = verify.verify(RULES[rule][1], coin_BG, key_B, draft, logp_BG1V)
    return verdict.num_accepted_B

  # Coins of 0 before the position, which succeed, and of 1 after it, which fail.
  for i in range(num_draft):
    coin_BG = np.where(np.arange(num_draft) < i, 0.0, np.ones((num_rows, num_draft)))
    live_B = (prob_BG[:, : i + 1] > 0).all(axis=1)
    coin_BG[:, i] = prob_BG[:, i] * (1 - 2.0**-40)
    np.testing.assert_array_equal(accepted(coin_BG)[live_B], i + 1)
    coin_BG[:, i] = prob_BG[:, i] * (1 + 2.0**-40)
    np.testing.assert_array_equal(accepted(coin_BG)[live_B], i)


def filtered_pair(order=1):
  """Tables, and their laws under a target's and a draft's own filters, by `warp`."""
  target, draft = tables.random_pair(11, 4, order)

  def law(table, **options):
    sampling = warp.make_sampling(len(table), **options)
    slot_B1 = jnp.ones((len(table), 1), jnp.int32)
    logits_B1V = jnp.asarray(table)[:, None]
    logp_B1V = warp.make_warp()(logits_B1V, sampling, slot_B1)
    return tables.conditional(np.asarray(logp_B1V)[:, 0])

  p = law(target, temperature=0.7, top_k=3, top_p=0.9)
  return target, p, law(draft, temperature=1.3, top_k=2), law(draft, temperature=0)


@pytest.mark.parametrize('rule', RULES)
def test_filters_that_differ_between_target_and_draft(rule):
  target, p, *drafts = filtered_pair()
  by_hand = tables.conditional(target, temperature=0.7, top_k=3, top_p=0.9)
  for prefix in [(), (0,), (1,), (2,), (3,)]:
    np.testing.assert_allclose(p(prefix), by_hand(prefix), atol=1e-6)
    assert 1 <= (p(prefix) > 0).sum() <= 3
  expected = enumerate_law.target_law(p, 4, 6)
  for q in drafts:
    law = enumerate_law.loop_law(
      RULES[rule][1], p, q, vocab_size=4, num_draft=2, num_tokens=6, order=1
    )
    assert enumerate_law.max_difference(law, expected) < TOLERANCE


def test_the_oracle_sees_a_fault():
  def corrected_from_p(p_G1V, q_GV, tokens_G):
    for n, mass, _ in rational.token_rule(p_G1V, q_GV, tokens_G):
      yield n, mass, p_G1V[n]

  p, q = case_of('random', vocab_size=3)
  fields = {'num_draft': 1, 'num_tokens': 3, 'order': 1}
  law = rational.loop_law(corrected_from_p, p, q, **fields)
  assert sum(law.values()) == 1
  assert law != rational.target_law(p, 3)


@pytest.mark.parametrize(
  'law', [[Fraction(1, 2), Fraction(1, 3)], [Fraction(3, 2), Fraction(-1, 2)]]
)
def test_refuses_what_is_no_law(law):
  def even(prefix):
    return [Fraction(1, 2)] * 2

  fields = {'num_draft': 1, 'num_tokens': 2}
  with pytest.raises(ValueError, match=r'target.*sum to 1'):
    rational.loop_law(rational.token_rule, lambda y: law, even, **fields)
  with pytest.raises(ValueError, match=r'draft.*sum to 1'):
    rational.loop_law(rational.token_rule, even, lambda y: law, **fields)
  with pytest.raises(ValueError, match=r'target.*sum to 1'):
    rational.target_law(lambda y: law, 2)
