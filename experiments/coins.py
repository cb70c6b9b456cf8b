"""A pair whose alpha is known exactly, to compare the loop with the formulas."""

import functools
import math

import jax.numpy as jnp
import numpy as np

from specjax.core import loop, rng, types, verify, warp
from specjax.drafters import model_draft
from specjax.drafters.table import unigram_model

_COIN_WARP = warp.make_warp()


@functools.cache
def _coin_drafter(num_draft: int) -> types.Drafter:
  return model_draft(unigram_model, _COIN_WARP, num_draft)


def measure_coins(
  alpha: float, gamma: int, num_rows: int, num_tokens: int, seed: int = 0
) -> tuple[float, float]:
  """Tokens per target call of the shipped loop where alpha is known exactly.

  p = (alpha, 2 - alpha) / 2 and q = (2 - alpha, alpha) / 2 after every prefix:
  acceptances are independent and sum_x min(p, q) is alpha, as the theory assumes.
  Rounds whose drafts the budget cuts short are left out.

  Args:
    alpha: in [0, 1].
    gamma: >= 1.
    num_rows: independent rows.
    num_tokens: of each row.
    seed: of the rows' keys.

  Returns:
    The mean, and its standard error.
  """
  p_V = np.array([alpha / 2, 1 - alpha / 2], np.float32)
  with np.errstate(divide='ignore'):
    logp_V = np.log(p_V)
  params = types.Params(jnp.asarray(logp_V), jnp.asarray(logp_V[::-1]))
  state = loop.decode(
    params,
    jnp.ones((num_rows, 1), jnp.int32),
    rng.row_keys(seed, jnp.arange(num_rows)),
    warp.make_sampling(num_rows, temperature=1.0),
    target=unigram_model,
    drafter=_coin_drafter(gamma),
    verifier=verify.token_verifier,
    warp=_COIN_WARP,
    max_len=num_tokens + 1,
    eos_id=-1,
  )
  round_BS = np.asarray(state.trace.round_BS)[:, 1:]
  sizes = []
  for round_S in round_BS:
    _, starts, size = np.unique(round_S, return_index=True, return_counts=True)
    sizes.append(size[starts + gamma + 1 <= num_tokens])
  flat = np.concatenate(sizes)
  return float(flat.mean()), float(flat.std() / math.sqrt(flat.size))
