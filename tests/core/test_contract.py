"""The loop's contract I1..I10 (see `specjax/core/loop.py`), one by one."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import autoregressive, loop, rng, types, verify
from specjax.core.loop import Source
from specjax.core.types import Params
from specjax.core.warp import make_sampling, make_warp
from specjax.drafters.model import model_draft
from specjax.drafters.ngram import ngram_draft
from specjax.models.table import table_model
from specjax.testing.drafters import constant_draft, random_draft, wrong_at
from specjax.testing.tiny_t5 import NUM_LOGITS, VOCAB_SIZE, tiny_t5

V = 4
ORDER = 2
EOS = 3
TABLE = table_model(V, ORDER)
WARP = make_warp(eos_id=EOS)
T5_WARP = make_warp(VOCAB_SIZE, eos_id=1)


def _table_params(noise=0.5):
  r = np.random.default_rng(0)
  size = ((V + 1) ** ORDER, V)
  target = r.normal(0, 1.5, size)
  draft = target + noise * r.normal(0, 1.5, size)
  return Params(jnp.asarray(target, jnp.float32), jnp.asarray(draft, jnp.float32))


def _decode(num_rows=6, num_draft=3, max_len=9, params=None, sampling=None, **options):
  """Decodes on tables; returns the final state."""
  options = {
    'target': TABLE,
    'drafter': model_draft(TABLE, WARP, num_draft),
    'verifier': verify.token_verifier,
    'warp': WARP,
    'eos_id': EOS,
    **options,
  }
  return loop.decode(
    _table_params() if params is None else params,
    jnp.ones((num_rows, 1), jnp.int32),
    rng.row_keys(0, jnp.arange(num_rows)),
    make_sampling(num_rows, temperature=1.0) if sampling is None else sampling,
    max_len=max_len,
    **options,
  )


class Seen(NamedTuple):
  """A recording state: the real one, and what the last round handed over."""

  real: object
  last: object


def _recording_model(model):
  """Its cache also keeps the last call's (tokens, start, logits)."""

  def init(params, inputs_BE, *, num_slots):
    return Seen(model.init(params, inputs_BE, num_slots=num_slots), ())

  def extend(params, cache, tokens_BT, start_B):
    output, real = model.extend(params, cache.real, tokens_BT, start_B)
    return output, Seen(real, (tokens_BT, start_B, output.logits_BTV))

  return types.Model(init, extend)


def _recording_drafter(drafter):
  """Its state also keeps the last draft, as the verifier met it."""

  def init(params, inputs_BE, *, num_slots):
    return Seen(drafter.init(params, inputs_BE, num_slots=num_slots), ())

  def propose(params, state, key_B, history):
    draft, real = drafter.propose(params, state.real, key_B, history)
    return draft, Seen(real, ())

  def advance(params, state, draft, verdict, output):
    return Seen(drafter.advance(params, state.real, draft, verdict, output), draft)

  return types.Drafter(drafter.num_draft, init, propose, advance)


def _states(num_rows=6, num_draft=3, max_len=9, sampling=None, seed=0, **options):
  """Every state of the compiled loop, the first and the last included.

  `state.cache` and `state.draft_state` are `Seen` tuples.
  """
  target, drafter = _recorders(num_draft)
  arguments = (_table_params(), jnp.ones((num_rows, 1), jnp.int32))
  sampling = make_sampling(num_rows, temperature=1.0) if sampling is None else sampling
  options = {
    'target': target,
    'drafter': drafter,
    'verifier': verify.token_verifier,
    'warp': WARP,
    'eos_id': EOS,
    **options,
  }
  first = loop.start(
    *arguments, sampling, target=target, drafter=drafter, max_len=max_len
  )
  keys = rng.row_keys(seed, jnp.arange(num_rows))
  rest = loop.stream(*arguments, keys, sampling, max_len=max_len, **options)
  return jax.device_get([first, *rest])


@functools.cache
def _recorders(num_draft):
  drafter = model_draft(TABLE, WARP, num_draft)
  return _recording_model(TABLE), _recording_drafter(drafter)


def _context(text):
  """The table's row after `text`, whose first entry stands for the start."""
  last = [V, *text][-2:]
  return last[1] + (V + 1) * last[0]


def test_i1_cache_holds_what_was_emitted_and_the_last_token_is_pending():
  states = _states()
  for state in states:
    for row in range(6):
      held = int(state.length_B[row]) - 1
      np.testing.assert_array_equal(
        state.cache.real.tokens_BS[row, :held], state.tokens_BS[row, :held]
      )
  # The pending token is in no slot yet: its slot holds garbage until it is fed.
  pending = [
    bool(
      s.cache.real.tokens_BS[b, s.length_B[b] - 1] == s.tokens_BS[b, s.length_B[b] - 1]
    )
    for s in states[1:]
    for b in range(6)
    if not s.done_B[b]
  ]
  assert not all(pending)


def test_i2_extend_is_fed_the_pending_token_and_the_drafts_at_length_minus_1():
  states = _states()
  params = _table_params()
  for state, after in itertools.pairwise(states):
    draft = after.draft_state.last
    fed, start, logits = after.cache.last
    np.testing.assert_array_equal(start, state.length_B - 1)
    for b in range(6):
      length = int(state.length_B[b])
      assert fed[b, 0] == state.tokens_BS[b, length - 1]
      np.testing.assert_array_equal(fed[b, 1:], draft.tokens_BG[b])
      # logits[:, i] is the law after the text up to draft i, G the bonus law.
      text = [V, *state.tokens_BS[b, 1:length].tolist(), *draft.tokens_BG[b].tolist()]
      for i in range(4):
        np.testing.assert_array_equal(
          logits[b, i], params.target[_context(text[: length + i])]
        )


@pytest.mark.parametrize('num_draft', [1, 3])
def test_i3_each_round_emits_one_to_g_plus_1_tokens(num_draft):
  states = _states(num_draft=num_draft)
  emitted = []
  for before, after in itertools.pairwise(states):
    live = ~np.asarray(before.done_B)
    emitted += np.asarray(after.length_B - before.length_B)[live].tolist()
  assert set(emitted) == set(range(1, num_draft + 2))


def test_i4_surplus_is_dropped_at_the_budget_never_clamped():
  """A self-draft of G = 7 would overshoot every one of these ends."""
  params = _table_params(noise=0.0)
  plain = autoregressive.decode(
    params,
    jnp.ones((6, 1), jnp.int32),
    rng.row_keys(0, jnp.arange(6)),
    make_sampling(6),
    target=TABLE,
    warp=WARP,
    max_len=9,
    eos_id=-1,
  )
  for max_len in (2, 6, 9):  # no round, and parts of the first and of the second
    state = _decode(
      num_draft=7,
      max_len=max_len,
      params=params,
      eos_id=-1,
      sampling=make_sampling(6),
    )
    assert state.tokens_BS.shape[1] == max_len + 8
    assert state.length_B.tolist() == [max_len] * 6
    np.testing.assert_array_equal(
      state.tokens_BS[:, :max_len], plain.tokens_BS[:, :max_len]
    )
    assert not state.tokens_BS[:, max_len:].any()


def test_i4_writes_stay_inside_the_buffers():
  for state in _states(num_draft=5, max_len=6):
    assert state.tokens_BS.shape == state.cache.real.tokens_BS.shape == (6, 12)
    if state.cache.last:
      fed, start, _ = state.cache.last
      assert int(start.max()) + fed.shape[1] <= 12


def test_i5_done_rows_change_nothing_and_are_read_by_nobody():
  budget = jnp.array([1, 2, 8, 8, 0, 3])
  sampling = make_sampling(6, temperature=1.0, max_new_tokens=budget)
  states = _states(sampling=sampling, eos_id=-1)
  for before, after in itertools.pairwise(states):
    for b in np.flatnonzero(np.asarray(before.done_B)):
      assert after.done_B[b]
      assert after.length_B[b] == before.length_B[b]
      np.testing.assert_array_equal(after.tokens_BS[b], before.tokens_BS[b])
      for old, new in zip(before.trace, after.trace, strict=True):
        np.testing.assert_array_equal(new[b], old[b])
  assert states[-1].length_B.tolist() == (budget + 1).tolist()
  assert states[-1].trace.rounds_B[4] == 0
  long_alone = _decode(
    sampling=make_sampling(6, temperature=1.0, max_new_tokens=8), eos_id=-1
  )
  np.testing.assert_array_equal(states[-1].tokens_BS[2:4], long_alone.tokens_BS[2:4])


def test_i6_recorded_law_is_the_law_of_the_draw():
  """Against the draft's table, warped with options of each row's own."""
  sampling = make_sampling(
    6, temperature=[0.0, 0.5, 1.0, 1.0, 2.0, 1.0], top_k=[0, 0, 0, 2, 3, 0],
    top_p=[1, 1, 1, 1, 1, 0.6],
  )  # fmt: skip
  params = _table_params()
  laws = WARP(
    jnp.tile(params.draft[None], (6, 1, 1)),
    sampling,
    jnp.ones((6, len(params.draft)), jnp.int32),
  )
  states = _states(sampling=sampling)
  for state, after in itertools.pairwise(states):
    draft = after.draft_state.last
    for b in range(6):
      length = int(state.length_B[b])
      text = [V, *state.tokens_BS[b, 1:length].tolist(), *draft.tokens_BG[b].tolist()]
      for i in range(3):
        law = laws[b, _context(text[: length + i])]
        np.testing.assert_allclose(draft.logq_BGV[b, i], law, atol=1e-6)
        assert draft.logq_BGV[b, i, draft.tokens_BG[b, i]] > -np.inf


def test_i7_counts_depend_on_the_past_alone():
  """Same past, other drafts: same counts; and the budget less one is the cap."""
  sampling = make_sampling(
    6, temperature=1.0, max_new_tokens=[1, 2, 3, 4, 4, 4], num_draft=[3, 3, 3, 3, 1, 0]
  )
  firsts = [
    _states(seed=seed, sampling=sampling, eos_id=-1)[1].draft_state.last
    for seed in range(5)
  ]
  assert {tuple(draft.count_B.tolist()) for draft in firsts} == {(0, 1, 2, 3, 1, 0)}
  assert len({draft.tokens_BG.tobytes() for draft in firsts}) == 5


def test_i8_stale_slots_hold_finite_garbage_only():
  """Any finite content of the unused slots gives the same output, bit for bit."""
  t5, draft = tiny_t5(0, num_layers=1), tiny_t5(1, num_layers=1)

  def littered(model):
    """Its parameters are (the model's, what every slot starts with)."""

    def init(params, inputs_BE, *, num_slots):
      cache = model.init(params[0], inputs_BE, num_slots=num_slots)
      return cache._replace(
        slots=jax.tree.map(lambda x: jnp.full_like(x, params[1]), cache.slots)
      )

    def extend(params, cache, tokens_BT, start_B):
      return model.extend(params[0], cache, tokens_BT, start_B)

    return types.Model(init, extend)

  target, drafter = littered(t5.model), model_draft(littered(draft.model), T5_WARP, 3)
  outputs = []
  for value in jnp.array([0.0, 1e4, -3.0]):
    state = loop.decode(
      Params((t5.params, value), (draft.params, value)),
      jnp.array([[3, 4, 5, 1], [6, 1, 0, 0]]),
      rng.row_keys(0, jnp.arange(2)),
      make_sampling(2, temperature=1.0),
      target=target,
      drafter=drafter,
      verifier=verify.token_verifier,
      warp=T5_WARP,
      max_len=14,
      eos_id=1,
    )
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state.cache))
    outputs.append((state.tokens_BS, state.trace.logp_BS))
  for tokens_BS, logp_BS in outputs[1:]:
    np.testing.assert_array_equal(tokens_BS, outputs[0][0])
    np.testing.assert_array_equal(logp_BS, outputs[0][1])


def _exchange(params, first, second):
  """The same T5 with two ids' names exchanged, for one compiled program."""
  order = np.arange(NUM_LOGITS)
  order[[first, second]] = second, first
  embedding = params['token_embedder']['embedding'][order]
  decoder = dict(params['decoder'])
  decoder['logits_dense'] = {'kernel': decoder['logits_dense']['kernel'][:, order]}
  return {**params, 'token_embedder': {'embedding': embedding}, 'decoder': decoder}


@pytest.mark.parametrize('num_draft', [1, 7])
def test_i9_eos_inside_an_accepted_block_ends_the_row_there(num_draft):
  """Declares the tokens of a greedy text in turn to be EOS; the draft agrees."""
  t5 = tiny_t5(0)
  warp = make_warp(VOCAB_SIZE)
  source = [3, 4, 5, 7, 1]
  options = {'target': t5.model, 'warp': warp, 'max_len': 13}
  batch = (rng.row_keys(0, jnp.arange(1)), make_sampling(1))
  plain = autoregressive.decode(
    Params(t5.params), jnp.array([source]), *batch, eos_id=-1, **options
  )
  text = plain.tokens_BS[0, 1:13].tolist()
  tokens = sorted({*text} - {0})
  assert len(tokens) >= 4
  for token in tokens:

    def renamed(ids, token=token):
      return [{token: EOS, EOS: token}.get(each, each) for each in ids]

    params = _exchange(t5.params, token, EOS)
    state = loop.decode(
      Params(params, params),
      jnp.array([renamed(source)]),
      *batch,
      drafter=model_draft(t5.model, warp, num_draft),
      verifier=verify.token_verifier,
      eos_id=EOS,
      **options,
    )
    end = text.index(token) + 1
    assert state.length_B.tolist() == [end + 1]
    assert state.tokens_BS[0, 1 : end + 1].tolist() == renamed(text[:end])
    assert not state.tokens_BS[0, end + 1 :].any()
    trace = state.trace
    origin = np.asarray(trace.source_BS[0])
    assert (origin[1 : end + 1] > 0).all()
    assert not origin[end + 1 :].any()
    assert (origin == Source.ACCEPTED).sum() == int(trace.accepted_BG.sum())
    emitted_by_eos_draft = int(origin[end] == Source.ACCEPTED)
    assert (
      int(trace.rounds_B[0] + trace.accepted_BG.sum()) - emitted_by_eos_draft == end
    )


def test_i9_what_comes_first_in_the_text_decides_the_end():
  table = jnp.full(((V + 1) ** ORDER, V), -50.0).at[:, EOS].set(50.0)
  for budget in (1, 2):
    state = _decode(
      params=Params(table, table), sampling=make_sampling(6, max_new_tokens=budget)
    )
    assert (state.tokens_BS[:, 1] == EOS).all()
    assert state.length_B.tolist() == [2] * 6


def _all_but_certain(accept_key_B, resample_key_B, draft, logp_BG1V):
  """Coins just below 1: whatever has p / q < .999 is rejected."""
  coin_BG = jnp.full(draft.tokens_BG.shape, 0.999, jnp.float32)
  return verify.verify(verify.token_rule, coin_BG, resample_key_B, draft, logp_BG1V)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
@pytest.mark.parametrize('num_draft', [1, 5])
def test_i10_a_self_draft_is_accepted_at_every_position_of_every_round(
  num_draft, temperature
):
  """A draft cache that lags by one token after full acceptance shows here."""
  t5 = tiny_t5(0)
  state = loop.decode(
    Params(t5.params, t5.params),
    jnp.array([[3, 4, 5, 7, 1], [8, 2, 1, 0, 0], [9, 9, 9, 9, 1]]),
    rng.row_keys(0, jnp.arange(3)),
    make_sampling(3, temperature=temperature),
    target=t5.model,
    drafter=model_draft(t5.model, T5_WARP, num_draft),
    verifier=_all_but_certain,
    warp=T5_WARP,
    max_len=32,
    eos_id=-1,
  )
  assert int(state.trace.drafted_BG.sum()) > 40
  np.testing.assert_array_equal(state.trace.accepted_BG, state.trace.drafted_BG)


def test_i10_draft_cache_equals_a_recomputed_one_after_every_round():
  """With the first rejection forced to each position in turn, and to none."""
  t5 = tiny_t5(0)
  positions = (0, 3, 4)
  drafter = wrong_at(model_draft(t5.model, T5_WARP, 4), positions)
  inputs = jnp.array([[3, 4, 5, 7, 1], [8, 2, 1, 0, 0], [9, 9, 9, 9, 1]])

  @jax.jit
  def recomputed(tokens_BS):
    cache = t5.model.init(t5.params, inputs, num_slots=tokens_BS.shape[1])
    return t5.model.extend(t5.params, cache, tokens_BS, jnp.zeros(3, jnp.int32))[1]

  for state in loop.stream(
    Params(t5.params, t5.params),
    inputs,
    rng.row_keys(0, jnp.arange(3)),
    make_sampling(3),
    target=t5.model,
    drafter=drafter,
    verifier=verify.token_verifier,
    warp=T5_WARP,
    max_len=20,
    eos_id=-1,
  ):
    fresh = recomputed(state.tokens_BS)
    for b in range(3):
      # Slot length-2 may lag (the last draft was never fed), no earlier one.
      held = int(state.length_B[b]) - 2
      for old, new in zip(
        jax.tree.leaves(state.draft_state.slots),
        jax.tree.leaves(fresh.slots),
        strict=True,
      ):
        np.testing.assert_allclose(old[b, :, :held], new[b, :, :held], atol=1e-5)
  rounds = [-(-19 // (position + 1)) for position in positions]
  assert state.trace.rounds_B.tolist() == rounds


@pytest.mark.parametrize('rule', ['token', 'block'])
def test_trace_tells_where_every_token_came_from(rule):
  verifier = getattr(verify, f'{rule}_verifier')
  state = _decode(num_rows=64, max_len=20, verifier=verifier, eos_id=-1)
  trace = state.trace
  source, rounds = np.asarray(trace.source_BS), np.asarray(trace.round_BS)
  assert set(np.unique(source[:, 1:20])) == {1, 2, 3, 4}
  for b in range(64):
    assert rounds[b, 1] == 1
    assert rounds[b, 1:20].max() == trace.rounds_B[b]
    for number in range(1, int(trace.rounds_B[b]) + 1):
      codes = source[b, rounds[b] == number]
      assert (codes[:-1] == Source.ACCEPTED).all()
      assert codes[-1] != Source.ACCEPTED
      assert (codes[-1] == Source.PLAIN) <= (len(codes) == 1)
  assert (source == Source.ACCEPTED).sum() == trace.accepted_BG.sum()
  assert int(trace.rounds_B.sum() + trace.accepted_BG.sum()) == 64 * 19
  # Successes come first in a block: per position, accepted never grows.
  assert (np.diff(np.asarray(trace.accepted_BG), axis=1) <= 0).all()


def test_trace_log_probabilities_are_the_warped_targets():
  state = _decode(sampling=make_sampling(6, temperature=0.7, top_k=3))
  params = _table_params()
  sampling = make_sampling(1, temperature=0.7, top_k=3)
  slots = jnp.full((1, len(params.target)), 1, jnp.int32)
  laws = np.asarray(WARP(params.target[None], sampling, slots))[0]
  tokens_BS, logp_BS = np.asarray(state.tokens_BS), np.asarray(state.trace.logp_BS)
  for b in range(6):
    length = int(state.length_B[b])
    text = [V, *tokens_BS[b, 1:length].tolist()]
    want = [laws[_context(text[:s]), text[s]] for s in range(1, length)]
    np.testing.assert_allclose(logp_BS[b, 1:length], want, atol=1e-5)
    assert not logp_BS[b, length:].any()


def test_only_real_proposals_are_counted():
  """gamma 7 with 3 new tokens; EOS as second token; n-gram without a match."""
  params = _table_params(noise=0.0)
  short = _decode(
    num_draft=7, params=params, eos_id=-1, sampling=make_sampling(6, max_new_tokens=3)
  ).trace
  assert short.drafted_BG.tolist() == [[1, 1, 0, 0, 0, 0, 0]] * 6
  assert short.accepted_BG.tolist() == short.drafted_BG.tolist()
  assert short.rounds_B.tolist() == [1] * 6

  nothing = _decode(
    drafter=ngram_draft(7, V), eos_id=-1, num_rows=1, max_len=3,
    sampling=make_sampling(1, temperature=1.0),
  ).trace  # fmt: skip
  assert not nothing.accepted_BG[0, 2:].any()
  assert nothing.drafted_BG[0, 0] <= 1

  eos = constant_draft(7, V, EOS)
  table = jnp.full(((V + 1) ** ORDER, V), -50.0).at[:, EOS].set(50.0)
  state = _decode(
    drafter=eos, num_rows=1, params=Params(table, None), sampling=make_sampling(1)
  )
  assert state.length_B.tolist() == [2]
  assert int(state.trace.accepted_BG.sum()) == 1
  assert state.trace.source_BS[0, 1] == Source.ACCEPTED


def test_stream_passes_through_the_states_of_the_loop():
  options = {
    'target': TABLE,
    'drafter': model_draft(TABLE, WARP, 3),
    'verifier': verify.token_verifier,
    'warp': WARP,
    'max_len': 9,
    'eos_id': EOS,
  }
  arguments = (
    _table_params(),
    jnp.ones((6, 1), jnp.int32),
    rng.row_keys(5, jnp.arange(6)),
    make_sampling(6, temperature=1.0),
  )
  states = list(loop.stream(*arguments, **options))
  final = loop.decode(*arguments, **options)
  assert len(states) == int(final.step)
  for a, b in zip(jax.tree.leaves(states[-1]), jax.tree.leaves(final), strict=True):
    np.testing.assert_array_equal(a, b)
  lengths = np.stack([s.length_B for s in states])
  assert (np.diff(lengths, axis=0) >= 0).all()


def test_new_arrays_never_recompile():
  _decode()
  before = loop.decode._cache_size()
  for call in range(20):
    _decode(
      sampling=make_sampling(
        6,
        temperature=0.1 * call,
        top_k=call % 3,
        top_p=1 - 0.01 * call,
        min_new_tokens=call % 2,
        max_new_tokens=3 + call % 5,
        num_draft=call % 4,
      ),
    )
  assert loop.decode._cache_size() == before


def test_errors_name_what_is_wrong():
  with pytest.raises(ValueError, match='max_len: 1'):
    _decode(max_len=1)


def test_random_draft_of_another_width_is_refused_by_shape():
  """A draft law over other ids than the target's can not be verified."""
  with pytest.raises((TypeError, ValueError)):
    _decode(drafter=random_draft(2, NUM_LOGITS))
