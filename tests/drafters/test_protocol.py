"""What the loop relies on, for every drafter."""

import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import rng, types, warp
from specjax.drafters import (
  bigram_draft,
  fit_bigram,
  fit_unigram,
  model_draft,
  ngram_draft,
  unigram_draft,
)
from specjax.models.table import table_model
from specjax.testing import drafters, tables
from specjax.testing.tiny_t5 import NUM_LOGITS, VOCAB_SIZE, tiny_t5

NUM_DRAFT = 3
NUM_SLOTS = 14
WARP = warp.make_warp(VOCAB_SIZE, eos_id=1)
TEXTS = [[3, 4, 5, 3, 4, 1], [6, 7, 6, 7, 1]]
PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'adding-a-drafter.md'


class Case(NamedTuple):
  drafter: types.Drafter
  params: Any = None
  num_logits: int = NUM_LOGITS


def documented(*arguments) -> types.Drafter:
  """The example of docs/adding-a-drafter.md."""
  block = re.search(r'```python\n(.*?)```', PAGE.read_text(), re.DOTALL)
  found: dict[str, Any] = {}
  exec(block[1], found)
  return found['echo_draft'](*arguments)


def at_most_two(length_B):
  return jnp.minimum(length_B % 4, 2)


def cases() -> dict[str, Case]:
  t5 = tiny_t5(seed=1, num_layers=1)
  table = jnp.asarray(tables.random_pair(0, NUM_LOGITS, 2)[0])
  table_draft = model_draft(table_model(NUM_LOGITS, 2), WARP, NUM_DRAFT)
  return {
    'model, T5': Case(model_draft(t5.model, WARP, NUM_DRAFT), t5.params),
    'model, table': Case(table_draft, table),
    'ngram': Case(ngram_draft(NUM_DRAFT, NUM_LOGITS)),
    'unigram': Case(
      unigram_draft(WARP, NUM_DRAFT), jnp.asarray(fit_unigram(TEXTS, NUM_LOGITS))
    ),
    'bigram': Case(
      bigram_draft(WARP, NUM_DRAFT), jnp.asarray(fit_bigram(TEXTS, NUM_LOGITS))
    ),
    'documented': Case(documented(NUM_DRAFT, NUM_LOGITS)),
    'random': Case(drafters.random_draft(NUM_DRAFT, NUM_LOGITS)),
    'constant': Case(drafters.constant_draft(NUM_DRAFT, NUM_LOGITS, 5)),
    'always EOS': Case(drafters.constant_draft(NUM_DRAFT, NUM_LOGITS, 1)),
    'contrary': Case(
      drafters.contrary_draft(table_model(NUM_LOGITS, 2), NUM_DRAFT), table
    ),
    'wrong at 1': Case(drafters.wrong_at(table_draft, 1), table),
    'counted': Case(drafters.counted(table_draft, at_most_two), table),
  }


CASES = cases()
INPUTS_BE = jnp.array(
  [[3, 4, 5, 6, 3, 4, 7, 1], [5, 6, 1, 0, 0, 0, 0, 0], [8, 8, 8, 8, 1, 0, 0, 0]],
  jnp.int32,
)
TOKENS_BS = np.zeros((3, NUM_SLOTS), np.int32)
TOKENS_BS[:, 1:7] = [[9, 3, 4, 5, 6, 3], [5, 0, 0, 0, 0, 0], [8, 8, 2, 9, 8, 8]]
LENGTHS = [[1, 1, 1], [4, 2, 7], [7, 1, 3]]


def history(length_B, temperature=1.0, num_draft=NUM_DRAFT):
  tokens_BS = np.where(
    np.arange(NUM_SLOTS) < np.array(length_B)[:, None],
    TOKENS_BS,
    11,  # undefined, and an id that shows
  )
  sampling = warp.make_sampling(3, temperature=temperature, num_draft=num_draft)
  return types.History(jnp.asarray(tokens_BS), jnp.asarray(length_B), sampling)


def keys(seed=0):
  return rng.row_keys(seed, jnp.arange(3))


@pytest.fixture(scope='module', params=CASES)
def case(request):
  """Functions compiled once for all tests of a drafter."""
  case = CASES[request.param]
  init = jax.jit(case.drafter.init, static_argnames='num_slots')
  state = init(case.params, INPUTS_BE, num_slots=NUM_SLOTS)
  return case._replace(
    drafter=case.drafter._replace(propose=jax.jit(case.drafter.propose))
  ), state


def propose(case, state, history, key_B=None):
  key_B = keys() if key_B is None else key_B
  return case.drafter.propose(case.params, state, key_B, history)


@pytest.mark.parametrize('length_B', LENGTHS)
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_draft_is_well_formed(case, length_B, temperature):
  case, state = case
  draft, new_state = propose(case, state, history(length_B, temperature))
  assert case.drafter.num_draft == NUM_DRAFT
  assert draft.tokens_BG.shape == (3, NUM_DRAFT)
  assert draft.logq_BGV.shape == (3, NUM_DRAFT, case.num_logits)
  assert draft.count_B.shape == (3,)
  assert draft.tokens_BG.dtype == jnp.int32
  assert draft.logq_BGV.dtype == jnp.float32
  assert draft.count_B.dtype == jnp.int32
  assert ((draft.count_B >= 0) & (draft.count_B <= NUM_DRAFT)).all()
  assert ((draft.tokens_BG >= 0) & (draft.tokens_BG < case.num_logits)).all()
  np.testing.assert_allclose(np.exp(draft.logq_BGV).sum(-1), 1.0, atol=1e-5)
  drawn = np.take_along_axis(draft.logq_BGV, np.array(draft.tokens_BG)[..., None], -1)
  assert (drawn > -np.inf).all()
  same = jax.tree.map(
    lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), state, new_state
  )
  assert all(jax.tree.leaves(same))
  for leaf in jax.tree.leaves(new_state):
    assert np.isfinite(leaf).all()


def test_the_cap_is_kept(case):
  case, state = case
  for cap in (0, 1, 2):
    draft, _ = propose(case, state, history(LENGTHS[1], num_draft=cap))
    assert (draft.count_B <= cap).all()


def test_counts_do_not_depend_on_the_draws(case):
  case, state = case
  for length_B in LENGTHS:
    drafts = [propose(case, state, history(length_B), keys(seed))[0] for seed in (0, 1)]
    np.testing.assert_array_equal(drafts[0].count_B, drafts[1].count_B)


def test_same_inputs_give_the_same_outputs(case):
  case, state = case
  first = propose(case, state, history(LENGTHS[1]))
  again = propose(case, state, history(LENGTHS[1]))
  jax.tree.map(np.testing.assert_array_equal, first, again)


def test_what_lies_behind_the_length_is_not_read(case):
  case, state = case
  seen = history(LENGTHS[1])
  behind_BS = np.arange(NUM_SLOTS) >= np.array(LENGTHS[1])[:, None]
  other = seen._replace(tokens_BS=jnp.where(behind_BS, 4, seen.tokens_BS))
  first, _ = propose(case, state, seen)
  second, _ = propose(case, state, other)
  jax.tree.map(np.testing.assert_array_equal, first, second)


def test_rows_do_not_depend_on_their_neighbours(case):
  case, state = case
  first, _ = propose(case, state, history(LENGTHS[1]))
  order = np.array([2, 0, 1])
  seen = jax.tree.map(lambda leaf: leaf[order], history(LENGTHS[1]))
  turned, _ = propose(
    case, jax.tree.map(lambda leaf: leaf[order], state), seen, keys()[order]
  )
  np.testing.assert_array_equal(first.tokens_BG[order], turned.tokens_BG)
  np.testing.assert_array_equal(first.count_B[order], turned.count_B)
  np.testing.assert_allclose(first.logq_BGV[order], turned.logq_BGV, atol=1e-5)


def test_advance_keeps_the_structure(case):
  case, state = case
  draft, state = propose(case, state, history(LENGTHS[1]))
  verdict = types.Verdict(jnp.zeros(3, jnp.int32), jnp.ones(3, jnp.int32))
  output = types.Output(jnp.zeros((3, NUM_DRAFT + 1, case.num_logits)))
  advanced = case.drafter.advance(case.params, state, draft, verdict, output)
  assert jax.tree.structure(advanced) == jax.tree.structure(state)


def test_the_same_arguments_give_the_identical_drafter():
  t5 = tiny_t5(seed=1, num_layers=1)
  assert model_draft(t5.model, WARP, 2) is model_draft(t5.model, WARP, 2)
  assert ngram_draft(2, 9) is ngram_draft(2, 9)
  assert unigram_draft(WARP, 2) is unigram_draft(WARP, 2)
  assert bigram_draft(WARP, 2) is not bigram_draft(WARP, 3)
