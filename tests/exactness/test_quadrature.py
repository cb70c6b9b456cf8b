"""The compiled round, drafting and commit included, has exactly the right law.

Every coin runs over the midpoints of eight intervals, 8^5 rows a round, so the
counted law is a fraction and is compared as one.
"""

from fractions import Fraction

import jax
import numpy as np
import pytest

from specjax.core import verify
from specjax.testing import mutants, quadrature, rational

M = 8
NUM_DRAFT = 2
RULES = {
  'token': (rational.token_rule, verify.token_rule),
  'block': (rational.block_rule, verify.block_rule),
}
# Rows 0..2 follow that token, row 3 the start; in eighths. All probabilities of
# acceptance and all residuals are multiples of 1/8 too, for both rules.
TABLES = {
  'many values': (
    [[0, 2, 6], [1, 3, 4], [2, 3, 3], [3, 1, 4]],
    [[4, 0, 4], [2, 2, 4], [4, 2, 2], [4, 2, 2]],
  ),
  'zeros': (
    [[1, 1, 6], [0, 4, 4], [2, 3, 3], [0, 4, 4]],
    [[1, 1, 6], [4, 2, 2], [4, 2, 2], [4, 4, 0]],
  ),
}


def fractions(table_CV):
  law_CV = [[Fraction(x, M) for x in law_V] for law_V in table_CV]
  return lambda prefix: law_CV[prefix[-1] if prefix else -1]


def completed(law_of_block, p):
  """The law of G + 1 tokens: blocks, continued by the target."""
  law = {}
  for block, mass in law_of_block.items():
    missing = NUM_DRAFT + 1 - len(block)
    rests = {(): 1}
    if missing:
      rests = rational.target_law(lambda y, block=block: p((*block, *y)), missing)
    for rest, share in rests.items():
      output = (*block, *rest)
      law[output] = law.get(output, 0) + mass * share
  return law


@pytest.mark.parametrize('case', TABLES)
@pytest.mark.parametrize('rule', RULES)
def test_law_of_the_compiled_round(rule, case):
  in_rationals, shipped = RULES[rule]
  target, draft = TABLES[case]
  expected = rational.block_law(
    in_rationals, fractions(target), fractions(draft), NUM_DRAFT
  )
  counted = quadrature.round_law(
    shipped, np.divide(target, M), np.divide(draft, M), NUM_DRAFT, M
  )
  assert sum(counted.values()) == 1
  assert counted == expected
  p = fractions(target)
  assert completed(counted, p) == rational.target_law(p, NUM_DRAFT + 1)


@pytest.mark.parametrize('name', mutants.FAULTY_RULES)
def test_faulty_rules_have_another_counted_law(name):
  target, draft = TABLES['many values']
  counted = quadrature.round_law(
    mutants.FAULTY_RULES[name], np.divide(target, M), np.divide(draft, M), NUM_DRAFT, M
  )
  assert completed(counted, fractions(target)) != rational.target_law(
    fractions(target), NUM_DRAFT + 1
  )


def test_inverse_cdf_covers_every_id_once():
  coin_B = quadrature.midpoints(M, 1)[:, 0]
  law_V = np.array([2, 0, 5, 1]) / M
  with np.errstate(divide='ignore'):
    logweight_BV = np.log(np.tile(law_V.astype(np.float32) * 7, (M, 1)))
  tokens_B = quadrature.inverse_cdf(coin_B, jax.numpy.asarray(logweight_BV))
  assert np.bincount(tokens_B, minlength=4).tolist() == [2, 0, 5, 1]


@pytest.mark.parametrize(('points', 'coins'), [(0, 2), (2, 0), (8, 9)])
def test_refuses_senseless_grids(points, coins):
  with pytest.raises(ValueError, match='num_points'):
    quadrature.midpoints(points, coins)
