"""A rule for timing only: it accepts drafts with a given probability. NOT exact.

The loop's speed depends on how many drafts are accepted, and random weights accept
none. With this rule a pair that was never trained runs at any acceptance rate, for
the same work as with the real one. Its outputs have nobody's law: no configuration
and no command line reaches it.
"""

import jax.numpy as jnp

from specjax.core.types import Acceptance, Draft, Rule
from specjax.core.verify import Verifier, make_verifier


def controlled_rule(alpha) -> Rule:
  """Accepts each draft with probability alpha, whatever p and q. TIMING ONLY.

  Args:
    alpha: in [0, 1]; a number, or a float32 scalar under `jit`, so that one program
      serves all rates.

  Returns:
    A token-wise rule that is not exact.
  """

  def acceptance(logp_BG1V, draft: Draft) -> Acceptance:
    proposed_BG = jnp.arange(draft.tokens_BG.shape[1])[None] < draft.count_B[:, None]
    return Acceptance(
      prob_BG=jnp.where(proposed_BG, jnp.float32(alpha), 0.0),
      weight_BG1=jnp.ones(logp_BG1V.shape[:2], jnp.float32),
    )

  return Rule(acceptance, 'first_rejection')


def controlled_verifier(alpha) -> Verifier:
  """`controlled_rule` as a verifier. TIMING ONLY."""
  return make_verifier(controlled_rule(alpha))
