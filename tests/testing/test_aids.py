"""Adversarial drafters, mutants, tables, the Python loop and the tiny T5."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import loop, rng, types, warp
from specjax.drafters import model_draft
from specjax.models.table import table_model
from specjax.testing import drafters, mutants, tables
from specjax.testing.loops import python_while_loop
from specjax.testing.tiny_t5 import NUM_LOGITS, tiny_t5

VOCAB_SIZE = 4
NUM_ROWS = 4000
MODEL = table_model(VOCAB_SIZE)
WARP = warp.make_warp()
TABLE = jnp.asarray(tables.random_pair(0, VOCAB_SIZE)[0])


def propose(drafter, params=None, num_rows=NUM_ROWS, temperature=1.0):
  history = types.History(
    jnp.tile(jnp.array([[0, 3, 2, 1, 1, 1, 1, 1]], jnp.int32), (num_rows, 1)),
    jnp.full(num_rows, 3, jnp.int32),
    warp.make_sampling(num_rows, temperature=temperature),
  )
  state = drafter.init(params, jnp.zeros((num_rows, 1), jnp.int32), num_slots=8)
  key_B = rng.row_keys(0, jnp.arange(num_rows))
  return jax.jit(drafter.propose)(params, state, key_B, history)[0]


def test_random_draft_is_uniform_and_independent():
  draft = propose(drafters.random_draft(2, VOCAB_SIZE))
  np.testing.assert_allclose(draft.logq_BGV, np.log(1 / VOCAB_SIZE), rtol=1e-6)
  pairs = np.bincount(np.asarray(draft.tokens_BG @ jnp.array([4, 1])), minlength=16)
  assert (abs(pairs - NUM_ROWS / 16) < 5 * np.sqrt(NUM_ROWS / 16)).all()


def test_constant_draft():
  draft = propose(drafters.constant_draft(2, VOCAB_SIZE, 3), num_rows=2)
  assert (draft.tokens_BG == 3).all()
  np.testing.assert_array_equal(np.exp(draft.logq_BGV[0, 0]), np.eye(VOCAB_SIZE)[3])


def test_contrary_draft_is_never_what_a_greedy_target_says():
  draft = propose(drafters.contrary_draft(MODEL, 2), TABLE, num_rows=1)
  assert draft.tokens_BG[0, 0] == np.argmin(TABLE[2])
  assert draft.tokens_BG[0, 1] == np.argmin(TABLE[draft.tokens_BG[0, 0]])


@pytest.mark.parametrize('position', [0, 1, 2])
def test_wrong_at_changes_one_position(position):
  honest = model_draft(MODEL, WARP, 2)
  right = propose(honest, TABLE, num_rows=50)
  wrong = propose(drafters.wrong_at(honest, position), TABLE, num_rows=50)
  changed_BG = np.asarray(right.tokens_BG != wrong.tokens_BG)
  expected_BG = np.broadcast_to(np.arange(2) == position, changed_BG.shape)
  np.testing.assert_array_equal(changed_BG, expected_BG)
  drawn = np.take_along_axis(wrong.logq_BGV, np.asarray(wrong.tokens_BG)[..., None], -1)
  assert (drawn[changed_BG] == 0).all()


def plus_one(length_B):
  return length_B - 2


def test_counted():
  honest = model_draft(MODEL, WARP, 2)
  draft = propose(drafters.counted(honest, plus_one), TABLE, num_rows=3)
  assert draft.count_B.tolist() == [1, 1, 1]


def test_mutants_are_named_and_leave_nothing_behind():
  assert len(mutants.MUTANTS) >= 10
  names = [mutant.name for mutant in mutants.MUTANTS]
  assert len(set(names)) == len(names)
  setup = mutants.Setup(MODEL, model_draft(MODEL, WARP, 2), None)
  before = (rng.block_keys, loop.commit)
  for mutant in mutants.MUTANTS:
    with mutant.applied(setup) as faulty:
      assert faulty != setup
      patched = [getattr(module, name) for module, name, _ in mutant.patches]
      assert patched == [replacement for *_, replacement in mutant.patches]
  assert (rng.block_keys, loop.commit) == before


def test_patched_functions_have_the_signatures_of_the_core():
  # A parameter renamed in the core must not turn a mutant into another fault.
  assert {'eos_id', 'remaining_B'} <= set(inspect.signature(loop.commit).parameters)
  assert list(inspect.signature(rng.block_keys).parameters) == ['row_key_B', 'length_B']


def test_random_pair():
  p_CV, q_CV = tables.random_pair(0, 5, order=2, zeros_p=1, zeros_q=2)
  assert p_CV.shape == q_CV.shape == (36, 5)
  assert (np.isneginf(p_CV).sum(axis=1) == 1).all()
  assert (np.isneginf(q_CV).sum(axis=1) == 2).all()
  np.testing.assert_allclose(np.exp(p_CV).sum(axis=1), 1.0, rtol=1e-5)
  same_p, same_q = tables.random_pair(0, 5, agreement=1.0)
  np.testing.assert_allclose(same_p, same_q, atol=1e-6)


def test_conditional():
  logits_CV = np.log(np.arange(1, 33).reshape(16, 2) + 0.0)[:9]
  law = tables.conditional(logits_CV, order=2)
  np.testing.assert_allclose(law((1, 0)), np.array([7, 8]) / 15)  # row 0 + 3 * 1
  np.testing.assert_allclose(law((0, 1, 0)), law((1, 0)))
  np.testing.assert_allclose(law(()), np.array([17, 18]) / 35)  # row 2 + 3 * 2
  np.testing.assert_allclose(law((1,)), np.array([15, 16]) / 31)  # row 1 + 3 * 2
  cold = tables.conditional(logits_CV, order=2, temperature=0.5)
  np.testing.assert_allclose(cold((1, 0)), np.array([49, 64]) / 113)
  greedy = tables.conditional(logits_CV, order=2, temperature=0)
  assert greedy((1, 0)).tolist() == [0, 1]


def test_python_while_loop():
  arguments = (lambda x: x < 100, lambda x: 2 * x + 1, jnp.int32(0))
  assert python_while_loop(*arguments) == jax.lax.while_loop(*arguments) == 127
  assert python_while_loop(lambda x: False, lambda x: 1 / 0, 5) == 5


def test_tiny_t5():
  tiny = tiny_t5(seed=3)
  head = np.array(tiny.params['decoder']['logits_dense']['kernel'])
  again, other = tiny_t5(seed=3), tiny_t5(seed=4)
  assert tiny.model is again.model
  assert tiny.oracle is again.oracle
  jax.tree.map(np.testing.assert_array_equal, tiny.params, again.params)
  # What is kept between calls is not the tree that a caller may change.
  assert tiny.params['decoder'] is not again.params['decoder']
  np.testing.assert_array_equal(again.params['decoder']['logits_dense']['kernel'], head)
  kernel = ('decoder', 'logits_dense', 'kernel')
  mine, theirs = tiny.params, other.params
  for name in kernel:
    mine, theirs = mine[name], theirs[name]
  assert mine.shape == (16, NUM_LOGITS)
  assert not np.array_equal(mine, theirs)
  sizes = [leaf.size for leaf in jax.tree.leaves(tiny.params)]
  assert sum(sizes) < 20_000
