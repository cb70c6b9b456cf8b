"""Chi-square tests of the compiled loop on tables, and mutants that must fail.

Every test compares the joint law of whole outputs, at least gamma + 2 tokens, so
that the bonus token and the next round are covered, with the law enumerated from
the target's table. Level 1e-6 per test, seeds fixed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import loop, rng, types, verify, warp
from specjax.drafters import model_draft
from specjax.models.table import table_model
from specjax.testing import chi_square, enumerate_law, mutants, tables
from specjax.testing.drafters import counted

pytestmark = pytest.mark.usefixtures('optimised')  # what users run is sampled

LEVEL = 1e-6
NUM_ROWS = 2**17
ORDER = 2
VERIFIERS = {'token': verify.token_verifier, 'block': verify.block_verifier}
WARP = warp.make_warp()


def pair(seeds=(0, 100), vocab_size=3, **fields):
  """Tables of two kinds of source: neighbouring rows follow different laws."""
  kinds = [tables.random_pair(seed, vocab_size, ORDER, **fields) for seed in seeds]
  return tuple(np.stack(tables_of_kind) for tables_of_kind in zip(*kinds, strict=True))


def setup_of(rule, num_draft, vocab_size=3):
  model = table_model(vocab_size, ORDER)
  return mutants.Setup(model, model_draft(model, WARP, num_draft), VERIFIERS[rule])


def arguments(params, **fields):
  source_B1 = (jnp.arange(NUM_ROWS, dtype=jnp.int32) % 2)[:, None]
  return (
    types.Params(*map(jnp.asarray, params)),
    source_B1,
    rng.row_keys(0, jnp.arange(NUM_ROWS)),
    warp.make_sampling(NUM_ROWS, **{'temperature': 1.0, **fields}),
  )


def sample(setup, params, *, num_tokens, eos_id=-1, decode=loop.decode, **fields):
  return decode(
    *arguments(params, **fields),
    target=setup.target,
    drafter=setup.drafter,
    verifier=setup.verifier,
    block_keys=setup.block_keys,
    warp=WARP,
    max_len=num_tokens + 1,
    eos_id=eos_id,
  )


def p_values(state, target, num_tokens, eos_id=None, temperature=1.0):
  """The test of each kind of source."""
  results = []
  for kind, table in enumerate(target):
    law = enumerate_law.target_law(
      tables.conditional(table, ORDER, temperature),
      table.shape[-1],
      num_tokens,
      eos_id,
    )
    counts = chi_square.count_outputs(
      state.tokens_BS[kind::2], state.length_B[kind::2], law
    )
    results.append(chi_square.chi_square(*counts).p_value)
  return results


def switch(verifiers, index):
  """One compilation for several verifiers: `index` says which one of them runs."""
  return lambda *args: jax.lax.switch(index, list(verifiers), *args)


@functools.partial(jax.jit, static_argnames=('num_draft', 'num_tokens', 'eos_id'))
def decode_rules(index, params, temperature, varying, *, num_draft, num_tokens, eos_id):
  """One compilation for each gamma: rule, laws and options are traced."""

  def count(length_B):
    return jnp.where(varying, length_B % (num_draft + 1), num_draft)

  setup = setup_of('token', num_draft)
  return sample(
    setup._replace(
      drafter=counted.__wrapped__(setup.drafter, count),
      verifier=switch(VERIFIERS.values(), index),
    ),
    params,
    num_tokens=num_tokens,
    eos_id=eos_id,
    temperature=temperature,
    decode=loop.decode.__wrapped__,
  )


def sample_rule(
  rule, params, num_draft, num_tokens, temperature=1.0, eos_id=-1, varying=False
):
  index = list(VERIFIERS).index(rule)
  static = {'num_draft': num_draft, 'num_tokens': num_tokens, 'eos_id': eos_id}
  return decode_rules(index, params, temperature, varying, **static)


@pytest.mark.parametrize('rule', VERIFIERS)
@pytest.mark.parametrize('num_draft', [1, 2, 3, 4])
def test_joint_law(num_draft, rule):
  params, num_tokens = pair(), num_draft + 2
  state = sample_rule(rule, params, num_draft, num_tokens)
  assert min(p_values(state, params[0], num_tokens)) > LEVEL


@pytest.mark.parametrize('rule', VERIFIERS)
@pytest.mark.parametrize('temperature', [0.5, 2.0])
def test_joint_law_at_another_temperature(temperature, rule):
  params = pair()
  state = sample_rule(rule, params, 2, 4, temperature=temperature)
  assert min(p_values(state, params[0], 4, temperature=temperature)) > LEVEL
  # The test sees the temperature at all.
  assert max(p_values(state, params[0], 4)) < LEVEL


@pytest.mark.parametrize('rule', VERIFIERS)
def test_joint_law_with_eos(rule):
  params = pair()
  state = sample_rule(rule, params, 2, 4, eos_id=1)
  assert min(p_values(state, params[0], 4, eos_id=1)) > LEVEL


@pytest.mark.parametrize('rule', VERIFIERS)
def test_joint_law_with_impossible_ids(rule):
  params = pair(zeros_p=1, zeros_q=1)
  state = sample_rule(rule, params, 2, 4)
  assert min(p_values(state, params[0], 4)) > LEVEL


@pytest.mark.parametrize('rule', VERIFIERS)
def test_joint_law_when_the_number_of_drafts_varies(rule):
  params = pair()
  state = sample_rule(rule, params, 2, 4, varying=True)
  assert min(p_values(state, params[0], 4)) > LEVEL
  drafted_G = np.asarray(state.trace.drafted_BG).sum(axis=0)
  assert drafted_G[0] > drafted_G[1] > 0


@pytest.mark.parametrize('rule', VERIFIERS)
def test_number_accepted_follows_the_enumerated_law(rule):
  params = pair()
  state = sample_rule(rule, params, 2, 4)
  # The first round of a row has its whole budget before it.
  emitted_B = (np.asarray(state.trace.round_BS) == 1).sum(axis=1)
  for kind in (0, 1):
    law = enumerate_law.block_law(
      {'token': verify.token_rule, 'block': verify.block_rule}[rule],
      tables.conditional(params[0][kind], ORDER),
      tables.conditional(params[1][kind], ORDER),
      vocab_size=3,
      num_draft=2,
    )
    law_K = np.zeros(3)
    for block, mass in law.items():
      law_K[len(block) - 1] += mass
    counts_K = np.bincount(emitted_B[kind::2] - 1, minlength=3)
    chi_square.assert_law(counts_K, law_K / law_K.sum(), LEVEL)


# The mutants, at the size of sample and on the tables that the clean loop passes.

NUM_TOKENS = 4
QUICK = {
  'xla_backend_optimization_level': 0,
  'xla_llvm_disable_expensive_passes': True,
}
CLEAN = setup_of('token', 2, vocab_size=4)


@functools.cache
def mutant_tables():
  return pair(seeds=(9, 5), vocab_size=4, agreement=0.0)


def mutant_p_values(state, eos_id=None):
  return p_values(state, mutant_tables()[0], NUM_TOKENS, eos_id)


def only_verifier(mutant):
  setup = mutant.mutate(CLEAN)
  return not mutant.patches and setup == CLEAN._replace(verifier=setup.verifier)


VERIFIER_MUTANTS = [m for m in mutants.MUTANTS if only_verifier(m)]
OTHER_MUTANTS = [m for m in mutants.MUTANTS if not only_verifier(m)]
# Of every kind; half of them are invisible to tests of the first token.
OFTEN = [
  'correction drawn from p',
  'residual |p - q|',
  'ratio inverted',
  'one coin for all positions',
  'no stop at the first rejection',
  'bonus from the law before',
  'bonus from the last q',
  'residual in place of the bonus',
  'block rule, joint ratio as acceptance',
]
SELDOM = [m.name for m in VERIFIER_MUTANTS if m.name not in OFTEN]
SWITCHED = {
  'token': verify.token_verifier,
  'block': verify.block_verifier,
  'control': mutants.control.mutate(CLEAN).verifier,
  **{m.name: m.mutate(CLEAN).verifier for m in VERIFIER_MUTANTS},
}


@functools.partial(jax.jit, static_argnames='names')
def decode_switched(index, params, names):
  verifiers = [SWITCHED[name] for name in names]
  return sample(
    CLEAN._replace(verifier=switch(verifiers, index)),
    params,
    num_tokens=NUM_TOKENS,
    decode=loop.decode.__wrapped__,
  )


def sample_switched(name):
  names = OFTEN if name in OFTEN else [n for n in SWITCHED if n not in OFTEN]
  return decode_switched(names.index(name), mutant_tables(), tuple(names))


def decode_mutant(*args, **static):
  """`loop.decode` anew, compiled in less time than it takes to optimise."""
  decode = jax.jit(
    functools.partial(loop.decode.__wrapped__, **static), compiler_options=QUICK
  )
  return decode(*args)


@pytest.mark.parametrize('name', ['token', 'block', 'control'])
@pytest.mark.slow
def test_clean_loop_passes_where_mutants_fail(name):
  assert min(mutant_p_values(sample_switched(name))) > LEVEL


@pytest.mark.parametrize(
  'name', [*OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in SELDOM)]
)
def test_mutant_verifier_fails(name):
  assert min(mutant_p_values(sample_switched(name))) < LEVEL


@pytest.mark.parametrize('mutant', OTHER_MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.slow
def test_mutant_loop_fails(mutant):
  eos_id = 1 if mutant.needs_eos else None
  with mutant.applied(CLEAN) as faulty:
    state = sample(
      faulty,
      mutant_tables(),
      num_tokens=NUM_TOKENS,
      eos_id=-1 if eos_id is None else eos_id,
      decode=decode_mutant,
    )
  assert min(mutant_p_values(state, eos_id)) < LEVEL


@pytest.mark.slow
def test_clean_loop_with_eos_passes_where_mutants_fail():
  state = sample(CLEAN, mutant_tables(), num_tokens=NUM_TOKENS, eos_id=1)
  assert min(mutant_p_values(state, eos_id=1)) > LEVEL


@functools.cache
def field_report_tables():
  law_p, law_q = np.log([0.5, 0.3, 0.2]), np.log([0.6, 0.3, 0.1])
  shape = (4**ORDER, 3)
  one_kind = (np.broadcast_to(law, shape) for law in (law_p, law_q))
  return tuple(np.stack([law, law]).astype(np.float32) for law in one_kind)


@pytest.mark.parametrize('temperature', [0.5, 1.0, 2.0])
def test_soft_drafts_are_drawn_from_what_is_recorded(temperature):
  # A greedy draft beside its soft law would never emit token 1 first.
  params = field_report_tables()
  state = sample_rule('token', params, 1, 3, temperature=temperature)
  assert min(p_values(state, params[0], 3, temperature=temperature)) > LEVEL
