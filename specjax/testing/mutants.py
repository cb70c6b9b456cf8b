"""Known faults of speculative decoding, to be detected by tests of exactness.

A test that passes on the right code proves little until it has failed on wrong
code at the same sample size. Each mutant changes one thing of a working setup
(target, drafter, verifier, keys, or a function of the core). `control` is the
harness' own token-wise verifier without a fault and must pass. In three lists:

  MUTANTS         must fail the test of the joint law at the ordinary sample size
  SLOW_MUTANTS    are exact, but must fail a test of the number accepted
  SLIGHT_MUTANTS  survive every ordinary sample; enumeration must show them
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core import loop, rng, types, verify
from specjax.testing import enumerate_law, faults
from specjax.testing.faults import Mutant, Setup

__all__ = [
  'FAULTY_RULES',
  'MUTANTS',
  'SLIGHT_MUTANTS',
  'SLOW_MUTANTS',
  'Mutant',
  'Setup',
  'SlightMutant',
  'control',
]

# Faults of the arithmetic alone, which exact enumeration detects as well.
FAULTY_RULES: dict[str, types.Rule] = {
  'lenience 0.9': faults.lenient_rule(0.9),
  'token-wise rule, last acceptance': verify.token_rule._replace(
    select='last_acceptance'
  ),
  'block rule, first rejection': verify.block_rule._replace(select='first_rejection'),
  'block rule, residual without its weight': verify.block_rule._replace(
    acceptance=faults.unit_weights
  ),
  'block rule, joint ratio as acceptance': verify.block_rule._replace(
    acceptance=faults.joint_ratio_only
  ),
}


control = Mutant('control', 'no fault', faults.make_verifier())

MUTANTS: tuple[Mutant, ...] = (
  Mutant(
    'correction drawn from p',
    'power table 1',
    faults.make_verifier(weights=faults.next_weights(lambda p_BV, q_BV: p_BV)),
  ),
  Mutant(
    'residual |p - q|',
    'power table 2',
    faults.make_verifier(
      weights=faults.next_weights(lambda p_BV, q_BV: jnp.abs(p_BV - q_BV))
    ),
  ),
  Mutant(
    'residual max(q - p, 0)',
    'power table 3',
    faults.make_verifier(
      weights=faults.next_weights(lambda p_BV, q_BV: faults.residual(q_BV, p_BV))
    ),
  ),
  Mutant('rejected token kept', 'power table 3', faults.rejected_token_kept),
  Mutant(
    'residual not normalised',
    'power table 5',
    faults.make_verifier(weights=faults.next_weights(faults.rest_to_the_last_id)),
  ),
  Mutant(
    'residual through a softmax',
    'power table 4',
    faults.make_verifier(
      weights=faults.next_weights(
        lambda p_BV, q_BV: jnp.exp(faults.residual(p_BV, q_BV))
      )
    ),
  ),
  Mutant(
    'residual of the next position',
    'power table 6',
    faults.make_verifier(weights=faults.next_weights(shift=1)),
  ),
  Mutant(
    'ratio inverted',
    'power table 8',
    faults.make_verifier(ratio=lambda p, q, tokens: 1 / faults.ratio(p, q, tokens)),
  ),
  Mutant(
    'accept always',
    'power table 9',
    faults.make_verifier(ratio=lambda p, q, tokens: jnp.ones(tokens.shape)),
  ),
  Mutant(
    'accept with probability p(x)',
    'power table 10',
    faults.make_verifier(ratio=lambda p, q, tokens: faults.at(p[:, :-1], tokens)),
  ),
  *(
    Mutant(name, 'a rule', faults.use_rule(rule)) for name, rule in FAULTY_RULES.items()
  ),
  Mutant(
    'one coin for all positions',
    'power table 13',
    faults.make_verifier(
      coins=lambda key_B, count: jnp.tile(rng.uniform(key_B, 1), (1, count))
    ),
  ),
  Mutant(
    'no stop at the first rejection',
    'power table 15',
    faults.make_verifier(count=lambda success_BG: jnp.sum(success_BG, axis=1)),
  ),
  Mutant(
    'p of the next position in the ratio',
    'power table 16',
    faults.make_verifier(ratio=lambda p, q, tokens: faults.ratio(p[:, 1:], q, tokens)),
  ),
  Mutant(
    'bonus from the law before',
    'power table 17',
    faults.make_verifier(
      weights=faults.bonus_weights(lambda p_BV, before_BV, q_BV: before_BV)
    ),
  ),
  Mutant(
    'bonus from the last q',
    'power table 18',
    faults.make_verifier(
      weights=faults.bonus_weights(lambda p_BV, before_BV, q_BV: q_BV)
    ),
  ),
  Mutant(
    'residual in place of the bonus',
    'power table 19',
    faults.make_verifier(
      weights=faults.bonus_weights(
        lambda p_BV, before_BV, q_BV: faults.or_p(faults.residual(p_BV, q_BV), p_BV)
      )
    ),
  ),
  Mutant(
    'draft recorded at another temperature',
    'power table 21',
    faults.record(lambda logq_BGV: jax.nn.log_softmax(0.7 * logq_BGV)),
  ),
  Mutant(
    'draft of the three likeliest, full law recorded',
    'power table 22',
    faults.drawn_otherwise(faults.top_3),
  ),
  Mutant(
    'greedy draft, soft law recorded',
    'transformers issue 32867',
    faults.drawn_otherwise(faults.greedy),
  ),
  Mutant('same keys every round', 'power table 24', faults.same_keys_every_round),
  Mutant(
    "draft's coin reused for its acceptance",
    'power table 14',
    faults.draft_coin_reused,
  ),
  Mutant('unsure drafts dropped', 'power table 25', faults.unsure_drafts_dropped),
  Mutant(
    'block rule with products of coins',
    'power table 26, vllm-ascend',
    faults.products_of_coins,
  ),
  Mutant('number accepted shared by the batch', 'power table 29', faults.shared_count),
  Mutant(
    'one position for all rows',
    'power table 30, the T5X cache index',
    faults.change_extend(faults.one_position_for_all),
  ),
  Mutant(
    'cache lacks the last draft after a full acceptance',
    'power table 17',
    faults.change_extend(faults.last_slot_not_kept),
  ),
  Mutant(
    'cache keeps rejected drafts',
    'a cache that is not rolled back',
    faults.change_extend(faults.rejected_slots_kept),
  ),
  Mutant(
    'EOS inside a block ignored',
    'power table 27',
    faults.anew,
    ((loop, 'commit', faults.eos_in_block_ignored),),
    needs_eos=True,
  ),
  Mutant(
    'budget overrun by one token',
    'power table 28',
    faults.anew,
    ((loop, 'commit', faults.budget_overrun),),
  ),
)

# The law is right; the number of accepted drafts tells.
SLOW_MUTANTS: tuple[Mutant, ...] = (
  Mutant('no bonus', 'power table 20', faults.no_bonus, shown_by='rate'),
)


class SlightMutant(NamedTuple):
  """A fault too small for a sample of 2e5, which enumeration of the law shows.

  Attributes:
    mutant: the fault in the compiled loop.
    rule: the same fault for `enumerate_law`, under the mutant's patches.
    drawn: law -> the law that drafts are drawn from instead, or None.
    num_samples: what a test at level 1e-6 needs for a power of 0.999.
  """

  mutant: Mutant
  rule: types.Rule
  drawn: Callable[[np.ndarray], np.ndarray] | None
  num_samples: float

  def loop_law(self, target, draft, **fields) -> enumerate_law.Law:
    """`enumerate_law.loop_law` of the fault; arguments are those of that."""
    drawn = self.drawn
    if drawn is not None:
      fields['drawn'] = lambda prefix: drawn(draft(prefix))
    with contextlib.ExitStack() as stack:
      for patch in self.mutant.patches:
        stack.enter_context(mock.patch.object(*patch))
      return enumerate_law.loop_law(self.rule, target, draft, **fields)


def _slight(name, seen_in, rule, num_samples, patches=()):
  mutant = Mutant(name, seen_in, faults.use_rule(rule), patches)
  return SlightMutant(mutant, rule, None, num_samples)


# A rule of its own: what was traced for the right one must not be reused.
_token_rule_anew = types.Rule(
  lambda *args: verify.token_rule.acceptance(*args), 'first_rejection'
)

SLIGHT_MUTANTS: tuple[SlightMutant, ...] = (
  _slight(
    'residual + 0.001',
    'power table 7',
    _token_rule_anew,
    2.0e6,
    ((verify, '_next_weights', faults.padded_weights),),
  ),
  _slight('lenience 0.99', 'power table 12', faults.lenient_rule(0.99), 2.8e6),
  SlightMutant(
    Mutant(
      'draft drawn from bfloat16',
      'power table 23, DeepSpec issue 31',
      faults.drawn_otherwise(faults.rounded_to_bfloat16),
    ),
    verify.token_rule,
    lambda law_V: _probabilities(faults.rounded_to_bfloat16(np.log(law_V))),
    6.7e7,
  ),
)


def _probabilities(logits_V):
  law_V = np.exp(np.asarray(logits_V, np.float64))
  return law_V / law_V.sum()
