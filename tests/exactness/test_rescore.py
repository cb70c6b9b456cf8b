"""Every law that any round used is that of one uncached pass over the same text.

Inside the compiled loop the verifier writes down what it is given: the warped rows
of p and q and the drafts, of every round. An oracle without a cache then reads, for
each round, the emitted prefix and that round's drafts. A stale, misplaced or
lagging key or value changes some row; without statistics, this finds it at the
position where it happened.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import loop, rng, types, verify, warp
from specjax.drafters import model_draft
from specjax.testing import faults
from specjax.testing.tiny_t5 import VOCAB_SIZE, tiny_t5

NUM_ROWS, MAX_LEN, EOS, NUM_DRAFT = 24, 20, 1, 3
MAX_ROUNDS = NUM_ROWS * (MAX_LEN - 1)
TOLERANCE = 1e-5
WARP = warp.make_warp(VOCAB_SIZE, eos_id=EOS)
VERIFIERS = {'token': verify.token_verifier, 'block': verify.block_verifier}
# Laws that are far from uniform but not point masses: all sources occur.
TARGET = tiny_t5(0, gain=2.0)
DRAFT = tiny_t5(0, gain=1.0)  # the target with a flatter head: agrees often
INPUTS = np.random.default_rng(0).integers(1, VOCAB_SIZE, (NUM_ROWS, 7))
INPUTS[::2, 4:] = 0
ROW = np.arange(NUM_ROWS)
OPTIONS = {
  'temperature': np.where(ROW % 4 < 3, 1.0, 0.7),
  'top_k': ROW % 5 * 2,
  'top_p': np.where(ROW % 3 == 1, 0.85, 1.0),
  'max_new_tokens': 8 + ROW % 12,
  'min_new_tokens': ROW % 7,
}
FAULTS = {
  'none': (None, None),
  'the last draft is not kept': (faults.last_slot_not_kept, None),
  'one position for all rows': (faults.one_position_for_all, None),
  'the draft lags after a full acceptance': (None, faults.last_draft_not_fed),
}
TARGET_FAULTS, DRAFT_FAULTS = (
  list(dict.fromkeys(kind)) for kind in zip(*FAULTS.values(), strict=True)
)

# What users do not run is compiled without XLA's expensive passes.
QUICK = {
  'xla_backend_optimization_level': 0,
  'xla_llvm_disable_expensive_passes': True,
}
ROUNDS: list = []  # of the run that was last: (draft, logp_BG1V) of each round


def recording(index):
  """The verifier of that index, which writes down what it is given."""

  def verifier(accept_key_B, resample_key_B, draft, logp_BG1V):
    jax.debug.callback(
      lambda *seen: ROUNDS.append(seen), draft, logp_BG1V, ordered=True
    )
    args = (accept_key_B, resample_key_B, draft, logp_BG1V)
    return jax.lax.switch(index, list(VERIFIERS.values()), *args)

  return verifier


def decode(index, target, draft):
  return loop.decode.__wrapped__(
    types.Params(TARGET.params, DRAFT.params),
    jnp.asarray(INPUTS, jnp.int32),
    rng.row_keys(0, jnp.arange(NUM_ROWS)),
    warp.make_sampling(NUM_ROWS, **OPTIONS),
    target=target,
    drafter=model_draft.__wrapped__(draft, WARP, NUM_DRAFT),
    verifier=recording(index),
    warp=WARP,
    max_len=MAX_LEN,
    eos_id=EOS,
  )


@jax.jit
def decode_clean(index):
  return decode(index, TARGET.model, DRAFT.model)


def any_fault_of(model, changes, fault):
  """A model with the fault of that index, 0 for none."""
  extends = [
    functools.partial(change, model.extend) if change else model.extend
    for change in changes
  ]

  def extend(*args):
    return jax.lax.switch(fault, extends, *args)

  return model._replace(extend=extend)


@functools.partial(jax.jit, compiler_options=QUICK)
def decode_faulty(of_target, of_draft):
  """One compilation for all faults; the clean one among them is the control."""
  return decode(
    0,
    any_fault_of(TARGET.model, TARGET_FAULTS, of_target),
    any_fault_of(DRAFT.model, DRAFT_FAULTS, of_draft),
  )


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def oracle(name, row_X, text_XS):
  """Warped log-laws [X, S, V] by a pass without a cache; entry s is of slot s + 1."""
  model = {'target': TARGET, 'draft': DRAFT}[name]
  inputs_XE = jnp.asarray(INPUTS, jnp.int32)[row_X]
  cache = model.oracle.init(model.params, inputs_XE, num_slots=text_XS.shape[1])
  start_X = jnp.zeros(len(row_X), jnp.int32)
  output, _ = model.oracle.extend(model.params, cache, text_XS, start_X)
  sampling = warp.make_sampling(
    len(row_X), **{name: jnp.asarray(value)[row_X] for name, value in OPTIONS.items()}
  )
  slot_XS = jnp.broadcast_to(jnp.arange(text_XS.shape[1])[None] + 1, text_XS.shape)
  return WARP(output.logits_BTV, sampling, slot_XS)


def recorded_and_right(run, *args):
  """Runs; of all rounds of all live rows, what was used beside what is right.

  Returns:
    The state, and {'p', 'q', 'log p': (recorded, right)}: the rows of p, those of
    q, and the log p in the trace of each emitted token.
  """
  ROUNDS.clear()
  state = jax.tree.map(np.asarray, run(*args))
  jax.effects_barrier()
  assert len(ROUNDS) == state.step
  row_X, round_X = np.nonzero(np.arange(len(ROUNDS)) < state.trace.rounds_B[:, None])
  tokens_XG, q_XGV, p_XG1V = (
    np.stack(arrays)[round_X, row_X]
    for arrays in zip(*((d.tokens_BG, d.logq_BGV, p) for d, p in ROUNDS), strict=True)
  )
  # A round's text: what was emitted before it, and its drafts.
  round_XS = state.trace.round_BS[row_X]
  length_X = (round_XS == round_X[:, None] + 1).argmax(axis=1)
  slot_XG = length_X[:, None] + np.arange(NUM_DRAFT)
  text_XS = state.tokens_BS[row_X].copy()
  np.put_along_axis(text_XS, slot_XG, tokens_XG, axis=1)
  missing = MAX_ROUNDS - len(row_X)
  fed = np.pad(row_X, (0, missing)), np.pad(text_XS, ((0, missing), (0, 0)))
  all_X1 = np.arange(len(row_X))[:, None]
  p_XSV, q_XSV = (np.asarray(oracle(name, *fed)) for name in ('target', 'draft'))
  # Row i of a round judges slot length + i, whose law is that of the token before.
  right_p = p_XSV[all_X1, length_X[:, None] - 1 + np.arange(NUM_DRAFT + 1)]
  # A slot's round holds the law of its token, as does the text up to that slot.
  case_E, slot_E = np.nonzero(round_XS == round_X[:, None] + 1)
  token_E = state.tokens_BS[row_X[case_E], slot_E]
  return state, {
    'p': (p_XG1V, right_p),
    'q': (q_XGV, q_XSV[all_X1, slot_XG - 1]),
    'log p': (
      state.trace.logp_BS[row_X[case_E], slot_E],
      right_p[case_E, slot_E - length_X[case_E], token_E],
    ),
  }


def largest_difference(recorded, right):
  """Of log-laws; inf where one of them rules out an id and the other does not."""
  assert recorded.shape == right.shape
  same = recorded == right  # -inf both, mostly
  return np.abs(np.where(same, 0.0, recorded) - np.where(same, 0.0, right)).max()


@pytest.mark.parametrize('rule', VERIFIERS)
def test_every_row_that_a_round_used_is_that_of_one_pass(rule):
  state, laws = recorded_and_right(decode_clean, list(VERIFIERS).index(rule))
  sources = set(np.unique(state.trace.source_BS).tolist())
  assert sources >= {loop.Source.ACCEPTED, loop.Source.CORRECTION, loop.Source.BONUS}
  assert len(set(state.length_B.tolist())) > 3
  assert laws['p'][0].shape[0] > 90
  assert np.isneginf(laws['p'][0]).any(axis=-1).mean() > 0.5  # filters were at work
  assert laws['log p'][0].size == (state.length_B - 1).sum() > 200
  for name, both in laws.items():
    assert largest_difference(*both) < TOLERANCE, name


@pytest.mark.parametrize('name', FAULTS)
@pytest.mark.slow
def test_faults_of_a_cache_are_found(name):
  """A wrong slot of the target shows in p alone, one of the draft in q alone."""
  in_target, in_draft = FAULTS[name]
  _, laws = recorded_and_right(
    decode_faulty, TARGET_FAULTS.index(in_target), DRAFT_FAULTS.index(in_draft)
  )
  p, q, logp = (largest_difference(*laws[name]) for name in ('p', 'q', 'log p'))
  assert (p > 1000 * TOLERANCE) == (logp > 1000 * TOLERANCE) == bool(in_target)
  assert (q > 1000 * TOLERANCE) == bool(in_draft)
  assert min(p, q) < TOLERANCE
