"""Faults that no ordinary sample shows, or whose law is right.

Enumeration shows the former; a rate test the latter; and that drafts are drawn
from the very array that is recorded is checked bit by bit.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import rng, types, verify, warp
from specjax.drafters import model_draft
from specjax.models.table import table_model
from specjax.testing import enumerate_law, faults, mutants, rational, suite, tables, toy

TOLERANCE = 1e-12
SLIGHT = {slight.mutant.name: slight for slight in mutants.SLIGHT_MUTANTS}


def laws():
  """The pair of the power table: q = 0.65 p + 0.35 noise."""
  return map(tables.conditional, tables.random_pair(5, 4))


@pytest.mark.parametrize('name', SLIGHT)
def test_enumeration_shows_slight_mutants(name):
  p, q = laws()
  fields = {'vocab_size': 4, 'num_draft': 2, 'num_tokens': 4, 'order': 1}
  with jax.enable_x64(True):
    law = SLIGHT[name].loop_law(p, q, **fields)
    again = enumerate_law.loop_law(verify.token_rule, p, q, **fields)
  expected = enumerate_law.target_law(p, 4, 4)
  assert enumerate_law.max_difference(law, expected) > 1e6 * TOLERANCE
  # The patch is gone and nothing of it was kept in a compiled function.
  assert enumerate_law.max_difference(again, expected) < TOLERANCE


def test_an_acceptance_above_the_best_possible_is_a_bias():
  """Block verification is optimal: whoever accepts more is wrong."""
  p, q = laws()
  fields = {'vocab_size': 4, 'num_draft': 3}

  def accepted(rule):
    return enumerate_law.expected_accepted(
      enumerate_law.block_law(rule, p, q, **fields)
    )

  best = accepted(verify.block_rule)
  assert accepted(verify.token_rule) < best
  for name in ('lenience 0.9', 'block rule, joint ratio as acceptance'):
    assert accepted(mutants.FAULTY_RULES[name]) > best + 0.01


def checksum(logq_BV):
  """An id that depends on every bit of a law."""
  bits_BV = jax.lax.bitcast_convert_type(logq_BV, jnp.int32)
  mixed_BV = bits_BV * jnp.asarray([[1, 3, 5, 7]], jnp.int32)
  return (jnp.sum(mixed_BV, axis=-1) >> 3) % logq_BV.shape[-1]


def drafts_with(draw, num_draft=4, num_rows=64):
  params = jnp.asarray(tables.random_pair(1, 4, 2)[1])
  model = table_model(4, 2)
  drafter = model_draft(model, warp.make_warp(), num_draft, draw=draw)
  sampling = warp.make_sampling(
    num_rows,
    temperature=jnp.linspace(0.3, 2.0, num_rows),
    top_k=jnp.arange(num_rows) % 4,
  )
  inputs_B1 = jnp.zeros((num_rows, 1), jnp.int32)
  state = drafter.init(params, inputs_B1, num_slots=12)
  history = types.History(
    jnp.zeros((num_rows, 12), jnp.int32), jnp.full(num_rows, 3), sampling
  )
  key_B = rng.row_keys(0, jnp.arange(num_rows))
  draft, _ = drafter.propose(params, state, key_B, history)
  recorded_BG = jax.vmap(checksum, 1, 1)(draft.logq_BGV)
  return np.asarray(draft.tokens_BG == recorded_BG)


@pytest.mark.slow
def test_drafts_are_drawn_from_what_is_recorded_bit_by_bit():
  # The injected draw names the array it was given, so that tokens tell.
  assert drafts_with(lambda key_B, logq_BV: checksum(logq_BV)).all()
  assert not drafts_with(
    lambda key_B, logq_BV: checksum(faults.rounded_to_bfloat16(logq_BV))
  ).all()


@pytest.mark.slow
def test_no_bonus_has_the_right_law_and_the_wrong_rate():
  (slow,) = mutants.SLOW_MUTANTS
  state = toy.decode(slow.mutate(toy.clean()), toy.keys(2**15, 0))
  law = toy.target_law()
  counted = suite.judge('no bonus', *suite.count_outputs(*state[:2], law))
  assert counted.passed
  clean = toy.decode(toy.clean(), toy.keys(2**15, 0))
  assert rate_p_value(state) < suite.LEVEL < rate_p_value(clean)


def rate_p_value(state):
  counts_K = toy.first_round_counts(state)
  return suite.chi_square(counts_K, toy.first_round_law('token')).p_value


def test_every_row_of_the_power_table_is_there():
  listed = [*mutants.MUTANTS, *mutants.SLOW_MUTANTS]
  listed += [slight.mutant for slight in mutants.SLIGHT_MUTANTS]
  rows = ' '.join(mutant.seen_in.replace(',', '') for mutant in listed).split()
  numbered = {int(word) for word in rows if word.isdigit()}
  named = {'lenience 0.9': 11}
  numbered |= {named[mutant.name] for mutant in listed if mutant.name in named}
  assert numbered >= set(range(1, 31))
  names = [mutant.name for mutant in listed]
  assert len(names) == len(set(names)) >= 29


def test_rational_difference_takes_both_kinds():
  assert rational.max_difference({(0,): 0.5}, {(1,): 0.25}) == 0.5
