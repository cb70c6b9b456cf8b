"""A gamma chosen from past rounds leaves the law as it is; one that peeks does not.

The law of the output is enumerated with the very policy that decoding uses,
`tuning.choose`, over all histories of rounds; the loop in pieces is compiled and run
with it too. The same policy, told of the round that it decides about, must be found.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import autoregressive, coupling, rng, rounds, types, verify, warp
from specjax.drafters import model_draft
from specjax.eval import tuning
from specjax.models.table import table_model
from specjax.testing import chi_square, enumerate_law, tables

V, ORDER, MAX_GAMMA = 2, 1, 3
TOLERANCE = 1e-12
COSTS = tuning.Costs(((0, 1.0), (2, 1.7), (3, 2.0)))
# Every gamma is open, and a single round may overrule the prior.
SEEN = tuning.initial(MAX_GAMMA)._replace(num_judged=tuning.MIN_ROUNDS)
RULES = {'token': verify.token_rule, 'block': verify.block_rule}


def gamma_after(past):
  """What `specjax.auto` chooses for one row after rounds of (gamma, accepted)."""
  state = SEEN
  for gamma, num_accepted in past:
    accepted_G = [int(i < num_accepted) for i in range(MAX_GAMMA)]
    state = tuning.observe(state, gamma, 1, 1, accepted_G)
  if past and past[-1][0] == 0:
    return 0  # plain rounds are kept to the end of a text
  return tuning.choose(state, COSTS, is_start=not past).gamma


def laws(seed):
  """(p, q): conditional laws on a random pair of tables."""
  target, draft = tables.random_pair(seed, V, ORDER)
  return tables.conditional(target), tables.conditional(draft)


@pytest.mark.parametrize('rule', RULES)
def test_the_policy_leaves_the_law_as_it_is(rule):
  chosen = set()

  def choose(past):
    chosen.add(gamma_after(past))
    return gamma_after(past)

  with jax.enable_x64(True):
    p, q = laws(0)
    law = enumerate_law.adaptive_law(
      RULES[rule], p, q, vocab_size=V, num_tokens=5, choose=choose
    )
  expected = enumerate_law.target_law(p, V, 5)
  assert chosen == {0, 1, 2, 3}  # or else this says little about choosing
  assert enumerate_law.max_difference(law, expected) < TOLERANCE


verify_law = jax.jit(verify.verify_law, static_argnums=0)


def peeking(p, q):
  """Rounds of MAX_GAMMA drafts, cut to what the policy says once it has seen how many
  of them are accepted."""

  def round_law(prefix, past, gamma):
    del gamma
    tokens_BG = np.array(list(np.ndindex(*(V,) * MAX_GAMMA)), np.int32)

    def laws_after(law, count):
      heads = [
        [(*prefix, *row[:i]) for i in range(count)] for row in tokens_BG.tolist()
      ]
      return np.array([[law(head) for head in row] for row in heads])

    logp_BG1V, q_BGV = np.log(laws_after(p, MAX_GAMMA + 1)), laws_after(q, MAX_GAMMA)
    drawn_B = np.take_along_axis(q_BGV, tokens_BG[..., None], -1).prod(axis=(1, 2))

    def verdict(count):
      count_B = np.full(len(tokens_BG), count, np.int32)
      draft = types.Draft(tokens_BG, np.log(q_BGV), count_B)
      return map(np.asarray, verify_law(verify.token_rule, logp_BG1V, draft))

    law, (num_law_BG1, _) = {}, verdict(MAX_GAMMA)
    for num_accepted in range(MAX_GAMMA + 1):
      gamma = gamma_after((*past, (MAX_GAMMA, num_accepted)))
      kept = min(num_accepted, gamma)
      _, next_law_BG1V = verdict(gamma)
      mass_BV = (drawn_B * num_law_BG1[:, num_accepted])[:, None] * next_law_BG1V[
        :, kept
      ]
      for row, token in np.ndindex(*mass_BV.shape):
        block = (*tokens_BG[row, :kept].tolist(), token)
        law[block] = law.get(block, 0.0) + mass_BV[row, token]
    return law

  return round_law


def test_a_policy_that_peeks_is_found():
  with jax.enable_x64(True):
    p, q = laws(0)
    law = enumerate_law.adaptive_law(
      verify.token_rule,
      p,
      q,
      vocab_size=V,
      num_tokens=3,
      choose=lambda past: MAX_GAMMA,
      round_law=peeking(p, q),
    )
  assert sum(law.values()) == pytest.approx(1)
  expected = enumerate_law.target_law(p, V, 3)
  assert enumerate_law.max_difference(law, expected) > 1e-3


WARP = warp.make_warp()
MODEL = table_model(V, ORDER)
MAX_LEN = 7


def decode_in_pieces(key_B, sampling, seed, *, gammas=None, is_coupled=False):
  """One round at a time; gamma by the policy from all rows' past, or as given."""
  params = types.Params(*map(jnp.asarray, tables.random_pair(seed, V, ORDER)))
  keys = {'keys': coupling.slot_keys} if is_coupled else {}
  static = {'target': MODEL, 'warp': WARP, 'max_len': MAX_LEN, 'eos_id': -1}

  def drafter(gamma):
    return model_draft(MODEL, WARP, gamma, **keys) if gamma else autoregressive.no_draft

  inputs_B1 = jnp.zeros((key_B.shape[0], 1), jnp.int32)
  state = None
  seen, chosen = SEEN, []
  before = np.zeros(MAX_GAMMA)
  while state is None or not bool(state.done_B.all()):
    if gammas is not None:
      gamma = gammas[len(chosen)]
    elif chosen and chosen[-1] == 0:
      gamma = 0
    else:
      gamma = tuning.choose(seen, COSTS, is_start=not chosen).gamma
    verifier, block_keys = verify.token_verifier, rng.block_keys
    if is_coupled and gamma:
      verifier, block_keys = coupling.gumbel_verifier, coupling.slot_block_keys(gamma)
    num_live = len(key_B) if state is None else int((~state.done_B).sum())
    rows = (key_B, sampling, 1)
    policy = {
      'drafter': drafter(gamma), 'verifier': verifier, 'block_keys': block_keys
    }  # fmt: skip
    if state is None:
      state = rounds.begin_and_run(
        params, inputs_B1, *rows, max_draft=MAX_GAMMA, **policy, **static
      )
    else:
      state = rounds.run(params, state, *rows, **policy, **static)
    accepted_G = np.asarray(state.trace.accepted_BG.sum(axis=0))
    seen = tuning.observe(seen, gamma, 1, num_live, (accepted_G - before).tolist())
    before = accepted_G
    chosen.append(gamma)
  return state, chosen


def test_the_compiled_loop_with_the_policy_has_the_targets_law():
  num_rows = 2**15
  key_B = rng.row_keys(0, jnp.arange(num_rows))
  sampling = warp.make_sampling(num_rows, temperature=1.0)
  state, chosen = decode_in_pieces(key_B, sampling, seed=0)
  assert len(set(chosen)) > 1
  p, _ = laws(0)
  law = enumerate_law.target_law(p, V, MAX_LEN - 1)
  counts = chi_square.count_outputs(state.tokens_BS, state.length_B, law)
  chi_square.assert_law(*counts, level=1e-6)


@pytest.mark.parametrize('gammas', [(3, 1, 2, 1, 1, 1), (1, 3, 0, 0, 0, 0)])
def test_coupled_samples_do_not_depend_on_the_gammas(gammas):
  # Bit for bit, which no fault of a buffer's width or of a cache survives.
  num_rows = 64
  key_B = rng.row_keys(1, jnp.arange(num_rows))
  sampling = warp.make_sampling(
    num_rows, temperature=1.0, max_new_tokens=2 + np.arange(num_rows) % 5
  )
  run = functools.partial(decode_in_pieces, key_B, sampling, 1)
  state, chosen = run(gammas=gammas, is_coupled=True)
  plain, _ = run(gammas=(0,) * MAX_LEN)
  assert tuple(chosen) == gammas[: len(chosen)]
  np.testing.assert_array_equal(state.length_B, plain.length_B)
  np.testing.assert_array_equal(
    state.tokens_BS[:, :MAX_LEN], plain.tokens_BS[:, :MAX_LEN]
  )
  # The trace has a place for every position of the longest draft.
  assert state.trace.accepted_BG.shape == (num_rows, MAX_GAMMA)
  assert int(state.trace.drafted_BG[:, 0].sum()) > 0
