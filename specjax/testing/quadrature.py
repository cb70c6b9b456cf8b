"""The exact law of the *compiled* round: quadrature in place of random numbers.

If every probability that a round uses is a multiple of 1 / M, a coin matters only
through its interval [k / M, (k + 1) / M). Feeding the midpoints of all intervals
to all coins, M^(2 G + 1) rows at once, makes the counted law exact: no sampling
error, and no rounding as long as float32 errors stay below 1 / (2 M).
"""

import functools
import itertools
from collections import Counter
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core import loop, rng, types, verify, warp
from specjax.drafters import model
from specjax.models.table import table_model


def midpoints(num_points: int, num_coins: int) -> np.ndarray:
  """float32 [M^C, C]; all combinations of (k + 1/2) / M.

  Raises:
    ValueError: fewer than one point or coin, or more than 2^24 rows.
  """
  if min(num_points, num_coins) < 1 or num_points**num_coins > 2**24:
    raise ValueError(
      f'num_points: {num_points}, num_coins: {num_coins}; from 1 to 2^24 rows'
    )
  points = (np.arange(num_points) + 0.5) / num_points
  return np.array(list(itertools.product(points, repeat=num_coins)), np.float32)


def inverse_cdf(coin_B, logweight_BV):
  """int32 [B]; the id whose interval of the distribution function holds the coin."""
  weight_BV = jnp.exp(logweight_BV)
  cdf_BV = jnp.cumsum(weight_BV, axis=-1) / jnp.sum(weight_BV, axis=-1, keepdims=True)
  return jnp.sum(coin_B[:, None] >= cdf_BV[:, :-1], axis=-1, dtype=jnp.int32)


def round_law(
  rule: types.Rule, target_CV, draft_CV, num_draft: int, num_points: int
) -> dict[tuple[int, ...], Fraction]:
  """The law of a round's block, counted over all rows of midpoints.

  Runs `loop.start` and one `loop.step` with `model_draft` and `verify.verify`, all
  compiled as in the loop; only the draws take their numbers from the midpoints.

  Args:
    rule: a verification rule.
    target_CV: probabilities of a table of order 1, [V + 1, V]; multiples of 1 / M.
    draft_CV: the same for the draft.
    num_draft: G.
    num_points: M; 2 G + 1 coins have M^(2 G + 1) rows.

  Returns:
    Block (accepted tokens and the next one) -> probability.
  """
  coin_BC = midpoints(num_points, 2 * num_draft + 1)
  with np.errstate(divide='ignore'):
    logits = [np.log(np.asarray(x, np.float32)) for x in (target_CV, draft_CV)]
  params = types.Params(*map(jnp.asarray, logits))
  tokens_BS, length_B = _one_round(rule, params, coin_BC, num_draft=num_draft)
  count = Counter(
    tuple(map(int, tokens_S[1:length]))
    for tokens_S, length in zip(
      np.asarray(tokens_BS), np.asarray(length_B), strict=True
    )
  )
  return {block: Fraction(n, len(coin_BC)) for block, n in count.items()}


@functools.partial(jax.jit, static_argnums=0, static_argnames='num_draft')
def _one_round(rule, params, coin_BC, *, num_draft):
  num_rows, vocab_size = coin_BC.shape[0], params.target.shape[-1]
  draft_BG, accept_BG = coin_BC[:, :num_draft], coin_BC[:, num_draft:-1]
  no_key_B = rng.row_keys(0, jnp.zeros(num_rows, jnp.int32))

  def next_token(key_B, logweight_BV):
    del key_B
    return inverse_cdf(coin_BC[:, -1], logweight_BV)

  def verifier(accept_key_B, resample_key_B, draft, logp_BG1V):
    del accept_key_B
    return verify.verify(
      rule, accept_BG, resample_key_B, draft, logp_BG1V, draw=next_token
    )

  table = table_model(vocab_size)
  plain_warp = warp.make_warp()
  fields = {
    'target': table,
    'drafter': model.model_draft(
      table, plain_warp, num_draft, keys=lambda *_: draft_BG, draw=inverse_cdf
    ),
    'max_len': num_draft + 2,
  }
  sampling = warp.make_sampling(num_rows, temperature=1.0)
  state = loop.start(params, jnp.zeros((num_rows, 1), jnp.int32), sampling, **fields)
  state = loop.step(
    params,
    state,
    no_key_B,
    sampling,
    verifier=verifier,
    warp=plain_warp,
    eos_id=-1,
    **fields,
  )
  return state.tokens_BS, state.length_B
