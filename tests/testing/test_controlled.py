"""The rule for timing accepts at its rate, and no user can reach it."""

import inspect
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import config
from specjax.core import loop, rng, types, warp
from specjax.drafters import model_draft
from specjax.eval import theory
from specjax.models.table import table_model
from specjax.testing import tables
from specjax.testing.chi_square import chi_square
from specjax.testing.controlled import controlled_verifier

VOCAB_SIZE, NUM_DRAFT, NUM_ROWS = 4, 3, 4_000
MODEL = table_model(VOCAB_SIZE)
WARP = warp.make_warp()


@jax.jit
def first_round(alpha):
  """The number of tokens that each row's first round emits."""
  target, draft = map(jnp.asarray, tables.random_pair(0, VOCAB_SIZE, agreement=0.1))
  state = inspect.unwrap(loop.decode)(
    types.Params(target, draft),
    jnp.zeros((NUM_ROWS, 1), jnp.int32),
    rng.row_keys(0, jnp.arange(NUM_ROWS)),
    warp.make_sampling(NUM_ROWS, temperature=1.0),
    target=MODEL,
    drafter=model_draft(MODEL, WARP, NUM_DRAFT),
    verifier=controlled_verifier(alpha),
    warp=WARP,
    max_len=NUM_DRAFT + 2,
    eos_id=-1,
  )
  return jnp.sum(state.trace.round_BS == 1, axis=1)


def test_acceptance_is_alpha():
  for alpha in (0.3, 0.8):
    emitted_B = np.asarray(first_round(alpha))
    counts_K = np.bincount(emitted_B - 1, minlength=NUM_DRAFT + 1)
    law_K = theory.token_law(alpha, NUM_DRAFT)
    assert chi_square(counts_K, law_K).p_value > 1e-6
  assert (first_round(0.0) == 1).all()
  assert (first_round(1.0) == NUM_DRAFT + 1).all()


def test_no_user_reaches_it():
  assert config.RULES == ('token', 'block')
  package = pathlib.Path(specjax.__file__).parent
  users = [
    path.relative_to(package).parts[0]
    for path in package.rglob('*.py')
    if 'controlled' in path.read_text(encoding='utf-8')
  ]
  assert set(users) == {'testing'}
