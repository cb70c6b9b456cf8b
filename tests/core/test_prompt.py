"""From a prompt: the law, greedy identity, and both caches as the contract has them.

On tables, whose cache is the tokens; on T5s in `tests/interop/test_t5x.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import autoregressive, loop, prompt, rng, types, verify, warp
from specjax.drafters import (
  model_draft,
  ngram_draft,
)
from specjax.models.table import table_model
from specjax.testing import drafters, enumerate_law, tables
from specjax.testing.chi_square import chi_square, count_outputs

V, ORDER, EOS = 4, 2, 3
TABLE = table_model(V, ORDER)
WARP = warp.make_warp(eos_id=EOS)
PAIR = tables.random_pair(9, V, ORDER, agreement=0.3)
PARAMS = types.Params(*map(jnp.asarray, PAIR))
DRAFTER = model_draft(TABLE, WARP, 2)
# Row i has prompt i mod 4: none, shorter, longest (cut at a pad), one ending twice.
PROMPTS = [(), (2,), (1, 2, 2), (2, 1)]
PADDED = [[0, 0, 0], [2, 0, 0], [1, 2, 2], [2, 1, 0]]


def decode(
  prompt_BP,
  *,
  params=PARAMS,
  drafter=None,
  verifier=verify.token_verifier,
  max_len=20,
  seed=0,
  eos_id=EOS,
  **options,
):
  num_rows = prompt_BP.shape[0]
  return loop.decode(
    params,
    jnp.ones((num_rows, 1), jnp.int32),
    rng.row_keys(seed, jnp.arange(num_rows)),
    warp.make_sampling(num_rows, **{'temperature': 1.0, **options}),
    target=TABLE,
    drafter=DRAFTER if drafter is None else drafter,
    verifier=verifier,
    warp=WARP,
    max_len=max_len,
    eos_id=eos_id,
    prompt_BP=jnp.asarray(prompt_BP, jnp.int32),
  )


def tiled(num_rows):
  return np.resize(np.array(PADDED), (num_rows, 3))


@pytest.mark.parametrize(
  'verifier',
  [verify.token_verifier, verify.block_verifier],
  ids=['token', 'block'],
)
def test_the_law_after_a_prompt_is_the_targets(verifier):
  state = decode(tiled(12_000), verifier=verifier, max_new_tokens=2)
  tokens_BS, length_B = np.asarray(state.tokens_BS), np.asarray(state.length_B)
  p = tables.conditional(PAIR[0], ORDER)
  for row, text in enumerate(PROMPTS):
    given = enumerate_law.target_law(lambda after, t=text: p(t + after), V, 2, EOS)
    law = {text + after: mass for after, mass in given.items()}
    counts_K, law_K = count_outputs(tokens_BS[row::4], length_B[row::4], law)
    assert counts_K.sum() == 3000
    assert chi_square(counts_K, law_K).p_value > 1e-6, text


def test_the_law_of_a_wrong_prompt_is_told_apart():
  state = decode(tiled(12_000), max_new_tokens=2)
  p = tables.conditional(PAIR[0], ORDER)
  given = enumerate_law.target_law(lambda after: p((2, 2, 2, *after)), V, 2, EOS)
  law = {(1, 2, 2, *after): mass for after, mass in given.items()}
  moved = {(2, 1, *key[3:]): mass for key, mass in law.items()}
  rows = slice(3, None, 4)
  counts_K, law_K = count_outputs(
    np.asarray(state.tokens_BS)[rows], np.asarray(state.length_B)[rows], moved
  )
  assert chi_square(counts_K, law_K).p_value < 1e-6


def test_an_output_cut_anywhere_goes_on_as_it_was():
  """Plain decoding draws by slot, so that even samples are the same."""
  plain = functools.partial(decode, drafter=autoregressive.no_draft, eos_id=-1)
  whole = plain(np.zeros((8, 8)))
  tokens_BP = np.array(whole.tokens_BS)[:, 1:9]
  for cut in (1, 4):
    state = plain(np.where(np.arange(8) < cut, tokens_BP, 0))
    np.testing.assert_array_equal(state.tokens_BS, whole.tokens_BS)
    assert (np.asarray(state.trace.rounds_B) < np.asarray(whole.trace.rounds_B)).any()


def test_no_prompt_and_an_empty_one_are_the_same():
  empty = decode(np.zeros((8, 3)))
  without = loop.decode(
    PARAMS,
    jnp.ones((8, 1), jnp.int32),
    rng.row_keys(0, jnp.arange(8)),
    warp.make_sampling(8, temperature=1.0),
    target=TABLE,
    drafter=DRAFTER,
    verifier=verify.token_verifier,
    warp=WARP,
    max_len=20,
    eos_id=EOS,
  )
  np.testing.assert_array_equal(empty.tokens_BS, without.tokens_BS)
  np.testing.assert_array_equal(empty.trace.logp_BS, without.trace.logp_BS)


@functools.partial(jax.jit, static_argnames='max_len')
def entered(prompt_BP, max_len):
  num_rows = prompt_BP.shape[0]
  sampling = warp.make_sampling(num_rows, max_new_tokens=2, min_new_tokens=1)
  options = {'target': TABLE, 'drafter': DRAFTER, 'max_len': max_len}
  sources_BE = jnp.ones((num_rows, 1), jnp.int32)
  state = loop.start(PARAMS, sources_BE, sampling, **options)
  return prompt.enter(PARAMS, state, sampling, prompt_BP, **options)


def test_state_on_entry():
  """I1, I10: emitted, in both caches but for the pending token, nothing traced."""
  state, sampling = entered(jnp.array(PADDED), max_len=6)
  np.testing.assert_array_equal(state.length_B, [1, 2, 4, 3])
  np.testing.assert_array_equal(state.tokens_BS[:, 1:4], PADDED)
  np.testing.assert_array_equal(sampling.max_new_tokens_B, [2, 3, 5, 4])
  np.testing.assert_array_equal(sampling.min_new_tokens_B, [1, 2, 4, 3])
  remaining_B = loop.remaining_budget(state, sampling, 6)
  np.testing.assert_array_equal(remaining_B, [2, 2, 2, 2])
  assert not state.done_B.any()
  assert not np.asarray(state.trace.source_BS).any()
  for row in range(4):
    held = int(state.length_B[row]) - 1
    for cache in (state.cache, state.draft_state):
      np.testing.assert_array_equal(
        cache.tokens_BS[row, :held], state.tokens_BS[row, :held]
      )


def test_a_prompt_ends_at_its_first_pad_or_fills_the_buffer():
  state, _ = entered(jnp.array([[1, 2, 2], [1, 0, 2]]), max_len=4)
  np.testing.assert_array_equal(state.done_B, [True, False])
  np.testing.assert_array_equal(state.length_B, [4, 2])
  np.testing.assert_array_equal(state.tokens_BS[:, :4], [[0, 1, 2, 2], [0, 1, 0, 0]])


def test_a_prompt_too_long_is_refused():
  with pytest.raises(ValueError, match=r'prompt: 3 tokens, but max_len 3'):
    entered(jnp.array([[1, 2, 2]]), max_len=3)


def test_budgets_count_from_the_prompts_end():
  # EOS is id 3: not among the first three new tokens, of a budget of three.
  for seed in range(10):
    state = decode(tiled(8), seed=seed, max_new_tokens=3, min_new_tokens=3)
    new_B = np.asarray(state.length_B) - 1 - np.resize([0, 1, 3, 2], 8)
    np.testing.assert_array_equal(new_B, 3)
    assert not (np.asarray(state.tokens_BS) == EOS).any()


def stateless():
  """Those without a cache, and their parameters."""
  return {
    'ngram': (ngram_draft(2, V), None),
    'random': (drafters.random_draft(2, V), None),
    'constant': (drafters.constant_draft(2, V, 1), None),
  }


@functools.cache
def switching_drafter():
  """One compilation for all of them; `Params.draft` is a number."""

  def propose(index, state, key_B, history):
    branches = [
      functools.partial(
        lambda drafter, params: drafter.propose(params, state, key_B, history)[0],
        drafter,
        params,
      )
      for drafter, params in stateless().values()
    ]
    return jax.lax.switch(index, branches), state

  return ngram_draft(2, V)._replace(propose=propose)


def greedy(drafter, draft_params):
  params = types.Params(PARAMS.target, draft_params)
  return decode(tiled(8), params=params, drafter=drafter, temperature=0)


@functools.cache
def plain():
  return greedy(autoregressive.no_draft, None)


@pytest.mark.parametrize('name', ['ngram', 'random', 'constant'])
def test_greedy_output_after_a_prompt_is_plain_decodings(name):
  state = greedy(switching_drafter(), jnp.int32([*stateless()].index(name)))
  np.testing.assert_array_equal(state.tokens_BS[:, :20], plain().tokens_BS[:, :20])


def test_a_model_draft_after_a_prompt():
  state = greedy(DRAFTER, PARAMS.draft)
  np.testing.assert_array_equal(state.tokens_BS[:, :20], plain().tokens_BS[:, :20])


def test_a_self_draft_is_always_accepted_after_a_prompt():
  """The draft's cache holds the prompt: a gap would show as rejections."""
  state = greedy(DRAFTER, PARAMS.target)
  np.testing.assert_array_equal(state.tokens_BS[:, :20], plain().tokens_BS[:, :20])
  assert not (np.asarray(state.trace.source_BS) == loop.Source.CORRECTION).any()
  assert int(state.trace.accepted_BG.sum()) > 15
