"""The exact law of the whole loop, without sampling, against the target's."""

import functools

import jax
import numpy as np
import pytest

from specjax.core import verify
from specjax.testing import enumerate_law, mutants, tables

TOLERANCE = 1e-12
RULES = {'token': verify.token_rule, 'block': verify.block_rule}
# Twice a full block where that is quick, so that rounds follow each other.
NUM_TOKENS = {1: 4, 2: 6, 3: 8, 4: 6}


def one_hot(seed, vocab_size):
  p_CV, q_CV = tables.random_pair(seed, vocab_size)
  return (
    functools.partial(greedy, tables.conditional(p_CV)),
    tables.conditional(q_CV),
  )


def greedy(law, prefix):
  law_V = law(prefix)
  return np.eye(law_V.size)[law_V.argmax()]


def conditionals(case, vocab_size, order=1):
  """(p, q) of a named case."""
  random = functools.partial(tables.random_pair, 3, vocab_size, order)
  if case == 'one-hot p':
    return one_hot(3, vocab_size)
  if case == 'one-hot both':
    p, q = one_hot(4, vocab_size)
    return p, functools.partial(greedy, q)
  p_CV, q_CV = {
    'random': random,
    'unlike': functools.partial(random, agreement=0.0),
    'zeros in p': functools.partial(random, zeros_p=1),
    'zeros in q': functools.partial(random, zeros_q=1),
    'zeros in both': functools.partial(random, zeros_p=1, zeros_q=1),
    'equal': functools.partial(random, agreement=1.0),
    'disjoint': lambda: disjoint(vocab_size),
  }[case]()
  return tables.conditional(p_CV, order), tables.conditional(q_CV, order)


def disjoint(vocab_size):
  p_CV, q_CV = tables.random_pair(5, vocab_size)
  in_p_V = np.arange(vocab_size) < vocab_size // 2
  return np.where(in_p_V, p_CV, -np.inf), np.where(in_p_V, -np.inf, q_CV)


CASES = (
  'random',
  'unlike',
  'zeros in p',
  'zeros in q',
  'zeros in both',
  'equal',
  'disjoint',
  'one-hot p',
  'one-hot both',
)


@pytest.fixture(autouse=True)
def x64():
  with jax.enable_x64(True):
    yield


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('num_draft', [1, 2, 3, 4])
@pytest.mark.parametrize('case', CASES)
def test_loop_law_is_the_target_law(case, num_draft, rule):
  p, q = conditionals(case, vocab_size=3)
  num_tokens = NUM_TOKENS[num_draft]
  law = enumerate_law.loop_law(
    RULES[rule],
    p,
    q,
    vocab_size=3,
    num_draft=num_draft,
    num_tokens=num_tokens,
    order=1,
  )
  expected = enumerate_law.target_law(p, 3, num_tokens)
  assert sum(law.values()) == pytest.approx(1.0, abs=TOLERANCE)
  assert enumerate_law.max_difference(law, expected) < TOLERANCE


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('num_draft', [1, 2, 3, 4])
def test_four_ids_and_order_two(num_draft, rule):
  p, q = conditionals('zeros in both', vocab_size=4, order=2)
  law = enumerate_law.loop_law(
    RULES[rule], p, q, vocab_size=4, num_draft=num_draft, num_tokens=5, order=2
  )
  expected = enumerate_law.target_law(p, 4, 5)
  assert enumerate_law.max_difference(law, expected) < TOLERANCE


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('num_draft', [1, 3])
def test_eos_and_budget(num_draft, rule):
  p, q = conditionals('random', vocab_size=3)
  law = enumerate_law.loop_law(
    RULES[rule],
    p,
    q,
    vocab_size=3,
    num_draft=num_draft,
    num_tokens=6,
    eos_id=1,
    order=1,
  )
  expected = enumerate_law.target_law(p, 3, 6, eos_id=1)
  assert {len(output) for output in law} == {1, 2, 3, 4, 5, 6}
  assert enumerate_law.max_difference(law, expected) < TOLERANCE


@pytest.mark.parametrize('rule', RULES)
def test_number_of_drafts_varies_by_round(rule):
  p, q = conditionals('random', vocab_size=3)
  law = enumerate_law.loop_law(
    RULES[rule],
    p,
    q,
    vocab_size=3,
    num_draft=3,
    num_tokens=6,
    count=lambda prefix: (2 * len(prefix) + sum(prefix)) % 4,
    order=1,
  )
  expected = enumerate_law.target_law(p, 3, 6)
  assert enumerate_law.max_difference(law, expected) < TOLERANCE


@pytest.mark.parametrize('name', mutants.FAULTY_RULES)
def test_faulty_rules_have_another_law(name):
  p, q = map(tables.conditional, tables.random_pair(5, 4, agreement=0.0))
  law = enumerate_law.loop_law(
    mutants.FAULTY_RULES[name],
    p,
    q,
    vocab_size=4,
    num_draft=2,
    num_tokens=4,
    order=1,
  )
  expected = enumerate_law.target_law(p, 4, 4)
  assert enumerate_law.max_difference(law, expected) > 1e-3


def test_block_rule_accepts_at_least_as_much():
  gains = []
  for seed in range(20):
    p_CV, q_CV = tables.random_pair(seed, 3, agreement=0.3)
    token, block = (
      enumerate_law.expected_accepted(
        enumerate_law.block_law(
          rule,
          tables.conditional(p_CV),
          tables.conditional(q_CV),
          vocab_size=3,
          num_draft=3,
        )
      )
      for rule in RULES.values()
    )
    gains.append(block - token)
  assert min(gains) > -TOLERANCE
  assert max(gains) > 0.02


def test_paper_example_of_block_verification():
  # Sun et al. 2024, section 1: M_b = (1/3, 2/3), M_s = (2/3, 1/3), two drafts:
  # 10/9 accepted by the token-wise rule and 11/9 by the block rule.
  def accepted(rule):
    return enumerate_law.expected_accepted(
      enumerate_law.block_law(
        rule,
        lambda prefix: np.array([1 / 3, 2 / 3]),
        lambda prefix: np.array([2 / 3, 1 / 3]),
        vocab_size=2,
        num_draft=2,
      )
    )

  assert accepted(verify.token_rule) == pytest.approx(10 / 9, abs=TOLERANCE)
  assert accepted(verify.block_rule) == pytest.approx(11 / 9, abs=TOLERANCE)
