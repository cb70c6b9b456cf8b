"""The shipped loop on one pair of random tables, whose laws are known exactly.

The tables are of order 2 over four ids. One decoded row is one independent output.
Options are arrays and rules are chosen by a traced index, so that a number of
drafts and a number of tokens have one compiled program for all of them.
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core import loop, rng, types, verify, warp
from specjax.drafters import model_draft
from specjax.models.table import table_model
from specjax.testing import enumerate_law, mutants, rational, tables

VOCAB_SIZE = 4
ORDER = 2
NUM_DRAFT = 2
NUM_TOKENS = 4  # gamma + 2: the bonus token and the round after it
EOS = 1
WARP = warp.make_warp()
RULES = {
  'token': (rational.token_rule, verify.token_rule),
  'block': (rational.block_rule, verify.block_rule),
}


@functools.cache
def pair(seed: int = 9, agreement: float = 0.0):
  """Log-probability tables of the target and of a draft unlike it."""
  return tables.random_pair(seed, VOCAB_SIZE, ORDER, agreement=agreement)


@functools.cache
def clean(rule: str = 'token', num_draft: int = NUM_DRAFT) -> mutants.Setup:
  """The shipped loop on tables."""
  model = table_model(VOCAB_SIZE, ORDER)
  verifier = verify.make_verifier(RULES[rule][1])
  return mutants.Setup(model, model_draft(model, WARP, num_draft), verifier)


def decode(setup, key_B, *, num_tokens=NUM_TOKENS, eos_id=-1, jit=True, **sampling):
  """Runs the loop once over all rows."""
  num_rows = key_B.shape[0]
  return (loop.decode if jit else inspect.unwrap(loop.decode))(
    types.Params(*map(jnp.asarray, pair())),
    jnp.zeros((num_rows, 1), jnp.int32),
    key_B,
    warp.make_sampling(num_rows, **{'temperature': 1.0, **sampling}),
    target=setup.target,
    drafter=setup.drafter,
    verifier=setup.verifier,
    block_keys=setup.block_keys,
    warp=WARP,
    max_len=num_tokens + 1,
    eos_id=eos_id,
  )


def keys(num_rows: int, seed: int):
  """The rows' keys.

  Raises:
    ValueError: no rows.
  """
  if num_rows < 1:
    raise ValueError(f'num_rows: {num_rows}; without samples nothing is tested')
  return rng.row_keys(seed, jnp.arange(num_rows))


def options(**changes) -> dict[str, Any]:
  """All options that vary, so that every call has the same compiled program."""
  values = {'temperature': 1.0, 'top_k': 0, 'top_p': 1.0, **changes}
  return {name: jnp.asarray(value) for name, value in values.items()}


def switched(verifiers: tuple, num_draft: int = NUM_DRAFT):
  """One compilation for several verifiers: `(index, key_B, num_tokens, ...)`."""

  @functools.partial(jax.jit, static_argnames=('num_tokens',))
  def run(index, key_B, sampling, num_tokens=NUM_TOKENS):
    def verifier(*args):
      return jax.lax.switch(index, list(verifiers), *args)

    setup = clean(num_draft=num_draft)._replace(verifier=verifier)
    return decode(setup, key_B, num_tokens=num_tokens, jit=False, **sampling)

  return run


@functools.cache
def rules_of(num_draft: int):
  """`switched` between the shipped rules, in the order of `RULES`."""
  return switched(tuple(clean(rule, num_draft).verifier for rule in RULES), num_draft)


@functools.cache
def target_law(num_tokens=NUM_TOKENS, eos_id=None, **options):
  """The law of whole outputs; options are those of `tables.conditional`."""
  p = tables.conditional(pair()[0], ORDER, **options)
  return enumerate_law.target_law(p, VOCAB_SIZE, num_tokens, eos_id)


@functools.cache
def first_round_law(rule: str) -> np.ndarray:
  """The law of the number of tokens of a round that begins an output."""
  p, q = (tables.conditional(table, ORDER) for table in pair())
  law = enumerate_law.block_law(
    RULES[rule][1], p, q, vocab_size=VOCAB_SIZE, num_draft=NUM_DRAFT
  )
  law_K = np.zeros(NUM_DRAFT + 1)
  for block, mass in law.items():
    law_K[len(block) - 1] += mass
  return law_K / law_K.sum()


def first_round_counts(state) -> np.ndarray:
  """Rows by their number of tokens in the first round, less one."""
  emitted_B = (np.asarray(state.trace.round_BS) == 1).sum(axis=1)
  return np.bincount(emitted_B - 1, minlength=NUM_DRAFT + 1)
