"""The enumeration itself: against rational arithmetic, and what it refuses."""

import itertools
from fractions import Fraction

import jax
import numpy as np
import pytest

from specjax.core import types, verify
from specjax.testing import enumerate_law, tables


def uniform(prefix):
  del prefix
  return np.full(2, 0.5)


def arguments(**fields):
  return {'vocab_size': 2, 'num_draft': 1, 'num_tokens': 2, **fields}


def test_target_law_is_the_product():
  p = tables.conditional(tables.random_pair(0, 3)[0])
  law = enumerate_law.target_law(p, 3, 3)
  assert len(law) == 27
  assert law[2, 0, 1] == pytest.approx(p(())[2] * p((2,))[0] * p((2, 0))[1])
  ended = enumerate_law.target_law(p, 3, 3, eos_id=2)
  assert ended[2,] == pytest.approx(p(())[2])
  assert sum(ended.values()) == pytest.approx(1.0)


def rational_block(p, q, num_draft):
  """Algorithm 1 in rationals, for laws that do not depend on the prefix."""
  law = {}
  ids = range(len(p))
  accept = [min(Fraction(1), p[x] / q[x]) for x in ids]
  residual = [max(p[x] - q[x], Fraction(0)) for x in ids]
  for drafts in itertools.product(ids, repeat=num_draft):
    mass = Fraction(1)
    for x in drafts:
      mass *= q[x]
    for n in range(num_draft + 1):
      next_law = p if n == num_draft else [r / sum(residual) for r in residual]
      rejected = 1 if n == num_draft else 1 - accept[drafts[n]]
      for t in ids:
        block = (*drafts[:n], t)
        law[block] = law.get(block, 0) + mass * rejected * next_law[t]
      if n < num_draft:
        mass *= accept[drafts[n]]
  return law


def test_block_law_equals_rational_arithmetic():
  p = [Fraction(1, 2), Fraction(3, 10), Fraction(1, 5)]
  q = [Fraction(3, 5), Fraction(3, 10), Fraction(1, 10)]
  expected = rational_block(p, q, 2)
  with jax.enable_x64(True):
    law = enumerate_law.block_law(
      verify.token_rule,
      lambda prefix: np.array(p, float),
      lambda prefix: np.array(q, float),
      vocab_size=3,
      num_draft=2,
    )
  assert sum(expected.values()) == 1
  assert max(abs(law.get(y, 0.0) - mass) for y, mass in expected.items()) < 1e-15


def test_order_saves_work_only():
  p, q = (tables.conditional(table) for table in tables.random_pair(1, 3))
  fields = arguments(vocab_size=3, num_draft=2, num_tokens=4)
  with jax.enable_x64(True):
    full = enumerate_law.loop_law(verify.block_rule, p, q, **fields)
    short = enumerate_law.loop_law(verify.block_rule, p, q, order=1, **fields)
  assert enumerate_law.max_difference(full, short) < 1e-15


@pytest.mark.parametrize(
  ('law', 'message'),
  [
    (np.array([0.5, 0.6]), 'sum to 1'),
    (np.array([1.5, -0.5]), 'must be >= 0'),
    (np.array([0.2, 0.3, 0.5]), 'has shape'),
    (np.array([np.nan, 1.0]), 'must be >= 0'),
  ],
)
def test_refuses_what_is_no_law(law, message):
  with pytest.raises(ValueError, match=rf'target.*{message}'):
    enumerate_law.loop_law(verify.token_rule, lambda y: law, uniform, **arguments())
  with pytest.raises(ValueError, match=rf'draft.*{message}'):
    enumerate_law.loop_law(verify.token_rule, uniform, lambda y: law, **arguments())
  with pytest.raises(ValueError, match=message):
    enumerate_law.target_law(lambda y: law, 2, 2)


def test_refuses_a_count_out_of_range():
  with pytest.raises(ValueError, match='count: 2 after'):
    enumerate_law.loop_law(
      verify.token_rule, uniform, uniform, count=lambda y: 2, **arguments()
    )


def test_refuses_a_rule_that_is_no_law():
  def acceptance(logp_BG1V, draft):
    accepted = verify.token_rule.acceptance(logp_BG1V, draft)
    return types.Acceptance(accepted.prob_BG * np.nan, accepted.weight_BG1)

  rule = types.Rule(acceptance, 'first_rejection')
  with pytest.raises(ValueError, match='num law does not sum to 1'):
    enumerate_law.loop_law(rule, uniform, uniform, **arguments())
