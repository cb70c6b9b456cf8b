"""Counts, alpha and latencies against hand counts and direct evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import autoregressive, loop, rng, verify
from specjax.core.loop import Source
from specjax.core.types import Params, Sampling
from specjax.core.warp import make_warp
from specjax.drafters import model_draft, ngram_draft
from specjax.eval import metrics, theory
from specjax.models.table import table_model
from specjax.testing.tiny_t5 import tiny_t5

EOS = 1
NUM_IDS = 6
TABLE = table_model(NUM_IDS)
WARP = make_warp()


def make_sampling(num_rows, temperature=0.0, max_new=20, num_draft=7):
  def row(value, dtype):
    return jnp.broadcast_to(jnp.asarray(value, dtype), (num_rows,))

  return Sampling(
    temperature_B=row(temperature, jnp.float32),
    top_k_B=row(0, jnp.int32),
    top_p_B=row(1.0, jnp.float32),
    min_new_tokens_B=row(0, jnp.int32),
    max_new_tokens_B=row(max_new, jnp.int32),
    num_draft_B=row(num_draft, jnp.int32),
  )


def chain(*tokens):
  """A table whose greedy output is `tokens`; a token may occur once."""
  table = np.zeros((NUM_IDS + 1, NUM_IDS), np.float32)
  for before, after in zip((NUM_IDS, *tokens), tokens):  # noqa: B905
    table[before, after] = 9.0
  return jnp.asarray(table)


def random_table(seed, scale=2.0):
  table = np.random.default_rng(seed).normal(size=(NUM_IDS + 1, NUM_IDS)) * scale
  return jnp.asarray(table, jnp.float32)


def decode(target, draft, sampling, drafter, *, max_len=32, eos_id=EOS, seed=0):
  num_rows = sampling.top_k_B.shape[0]
  return loop.decode(
    Params(target, draft),
    jnp.full((num_rows, 3), 2, jnp.int32),
    rng.row_keys(seed, jnp.arange(num_rows)),
    sampling,
    target=TABLE,
    drafter=drafter,
    verifier=verify.token_verifier,
    warp=WARP,
    max_len=max_len,
    eos_id=eos_id,
  )


def assert_identities(summary):
  assert (
    summary.num_target_calls + summary.num_accepted_tokens
    == summary.num_emitted_tokens + summary.num_eos_accepted
  )
  assert sum(summary.draft_tokens_per_position) == summary.num_draft_tokens
  assert sum(summary.accepted_tokens_per_position) == summary.num_accepted_tokens
  assert 0 <= summary.num_accepted_tokens <= summary.num_draft_tokens
  assert 0.0 <= summary.acceptance_rate <= 1.0
  assert 0.0 <= summary.alpha_estimate <= 1.0
  assert all(0.0 <= rate <= 1.0 for rate in summary.acceptance_rate_per_position)
  assert summary.num_drafts <= summary.num_target_calls


def test_short_budget_counts_only_what_was_proposed():
  table = chain(2, 3, 4, 5)
  state = decode(table, table, make_sampling(1, max_new=3), model_draft(TABLE, WARP, 7))
  summary = metrics.summarize(state, EOS)
  assert_identities(summary)
  assert summary.num_draft_tokens == 2  # not 7: the third token needs no draft
  assert summary.num_accepted_tokens == 2
  assert summary.acceptance_rate == 1.0
  assert summary.acceptance_rate_per_position == (1.0, 1.0, 0, 0, 0, 0, 0)
  assert summary.num_target_calls == 1
  assert summary.block_efficiency == 3.0


def test_eos_at_token_2_inside_a_block():
  table = chain(2, EOS)
  state = decode(table, table, make_sampling(1), model_draft(TABLE, WARP, 7))
  summary = metrics.summarize(state, EOS)
  assert_identities(summary)
  assert summary.num_emitted_tokens == 2
  assert summary.num_accepted_tokens == 2  # what EOS cut off is not accepted
  assert summary.num_draft_tokens == 7  # but it was proposed
  assert summary.acceptance_rate == pytest.approx(2 / 7)
  assert summary.num_target_calls == 1
  assert summary.num_eos_accepted == 1


def test_eos_as_correction_is_no_accepted_draft():
  state = decode(
    chain(2, EOS), chain(2, 3), make_sampling(1), model_draft(TABLE, WARP, 7)
  )
  summary = metrics.summarize(state, EOS)
  assert_identities(summary)
  assert (summary.num_emitted_tokens, summary.num_accepted_tokens) == (2, 1)
  assert (summary.num_eos_accepted, summary.num_corrections) == (0, 1)
  assert summary.alpha_estimate == 0.5


@pytest.mark.parametrize('alpha', [0.25, 0.5])
@pytest.mark.parametrize('found', [1.0, 0.5])
def test_another_gammas_block_efficiency_from_the_counts_by_position(alpha, found):
  """Independent acceptances, in a part of the calls: Eq. 1 in that part, else 1."""
  calls = 4096
  accepted_G = tuple(round(calls * found * alpha**i) for i in range(1, 4))
  counts = metrics.Summary(
    num_target_calls=calls,
    num_drafts=round(calls * found),
    num_draft_tokens=round(3 * calls * found),
    num_accepted_tokens=sum(accepted_G),
    num_corrections=round(calls * found) - accepted_G[-1],
    num_emitted_tokens=calls + sum(accepted_G),
    num_eos_accepted=0,
    draft_tokens_per_position=(round(calls * found),) * 3,
    accepted_tokens_per_position=accepted_G,
  )
  for gamma in range(7):
    expected = found * theory.expected_tokens(alpha, gamma) + 1 - found
    assert counts.block_efficiency_at(gamma) == pytest.approx(expected)
  assert counts.block_efficiency_at(3) == counts.block_efficiency


def test_ngram_without_a_match_has_defined_rates():
  table = chain(3, 4, 5)
  sampling = make_sampling(1, max_new=3)
  summary = metrics.summarize(
    decode(table, None, sampling, ngram_draft(7, NUM_IDS)), EOS
  )
  assert_identities(summary)
  assert summary.num_draft_tokens == 0
  assert summary.num_drafts == 0
  assert summary.acceptance_rate == 0.0
  assert summary.alpha_estimate == 0.0
  assert summary.acceptance_rate_per_position == (0.0,) * 7
  assert summary.block_efficiency == 1.0
  assert summary.block_efficiency_at(3) == 1.0


def test_plain_decoding_and_rows_that_never_ran():
  sampling = make_sampling(2, max_new=[3, 0])
  state = autoregressive.decode(
    Params(chain(2, 3, 4, 5)),
    jnp.full((2, 3), 2, jnp.int32),
    rng.row_keys(0, jnp.arange(2)),
    sampling,
    target=TABLE,
    warp=WARP,
    max_len=32,
    eos_id=EOS,
  )
  summary = metrics.summarize(state, EOS)
  assert_identities(summary)
  assert (summary.num_target_calls, summary.num_emitted_tokens) == (3, 3)
  assert summary.acceptance_rate_per_position == ()
  nothing = metrics.summarize(
    decode(chain(2), None, make_sampling(1, max_new=0), ngram_draft(7, NUM_IDS)), EOS
  )
  assert nothing.num_target_calls == 0
  assert nothing.block_efficiency == 0.0


@pytest.mark.parametrize('method', ['copy', 'other', 'ngram'])
def test_identities_and_hand_counts_on_ragged_batches(method):
  num_rows, num_draft = 16, 3
  target = random_table(0)
  sampling = make_sampling(
    num_rows,
    temperature=np.where(np.arange(num_rows) % 2, 1.0, 0.0),
    max_new=1 + np.arange(num_rows) % 11,
    num_draft=np.arange(num_rows) % (num_draft + 1),
  )
  drafter, draft = {
    'copy': (model_draft(TABLE, WARP, num_draft), target),
    'other': (model_draft(TABLE, WARP, num_draft), random_table(1)),
    'ngram': (ngram_draft(num_draft, NUM_IDS), None),
  }[method]
  state = decode(target, draft, sampling, drafter, eos_id=EOS)
  summary = metrics.summarize(state, EOS)
  assert_identities(summary)

  # By hand, from the states between rounds: a row that grows by n emitted n - 1
  # accepted drafts, or n if its last token is an EOS that had been drafted.
  states = loop.stream(
    Params(target, draft),
    jnp.full((num_rows, 3), 2, jnp.int32),
    rng.row_keys(0, jnp.arange(num_rows)),
    sampling,
    target=TABLE,
    drafter=drafter,
    verifier=verify.token_verifier,
    warp=WARP,
    max_len=32,
    eos_id=EOS,
  )
  calls = accepted = 0
  length_B = np.ones(num_rows, int)
  for now in states:
    grown_B = np.asarray(now.length_B) - length_B
    length_B = np.asarray(now.length_B)
    calls += int((grown_B > 0).sum())
    for row in np.flatnonzero(grown_B):
      source = int(now.trace.source_BS[row, length_B[row] - 1])
      accepted += int(grown_B[row]) - (source != Source.ACCEPTED)
  assert summary.num_target_calls == calls
  assert summary.num_accepted_tokens == accepted
  assert summary.num_emitted_tokens == (length_B - 1).sum()
  if method == 'copy':
    assert summary.num_corrections == 0
    assert summary.alpha_estimate == 1.0


def test_total_pools_counts():
  table = chain(2, EOS)
  one = metrics.summarize(
    decode(table, table, make_sampling(1), model_draft(TABLE, WARP, 7)), EOS
  )
  other = metrics.summarize(
    decode(table, chain(3), make_sampling(1), model_draft(TABLE, WARP, 7)), EOS
  )
  both = metrics.total([one, other])
  assert_identities(both)
  assert both.num_draft_tokens == one.num_draft_tokens + other.num_draft_tokens
  assert both.acceptance_rate == pytest.approx(
    (one.num_accepted_tokens + other.num_accepted_tokens)
    / (one.num_draft_tokens + other.num_draft_tokens)
  )
  assert set(one.as_dict()) >= {'acceptance_rate', 'block_efficiency', 'num_drafts'}
  with pytest.raises(ValueError, match=r'gammas \[\]'):
    metrics.total([])
  with pytest.raises(ValueError, match=r'gammas \[1, 7\]'):
    metrics.total(
      [one, one._replace(draft_tokens_per_position=(7,))],
    )


@pytest.mark.parametrize('temperature', [0.0, 0.7])
def test_alpha_is_the_mean_over_the_texts_prefixes(temperature):
  num_rows = 4
  target, draft = random_table(2), random_table(3)
  sampling = make_sampling(
    num_rows, temperature=temperature, max_new=1 + np.arange(num_rows)
  )
  state = decode(target, draft, sampling, model_draft(TABLE, WARP, 3))
  measured = metrics.alpha(
    Params(target, draft),
    jnp.full((num_rows, 3), 2, jnp.int32),
    state.tokens_BS,
    state.length_B,
    sampling,
    target=TABLE,
    draft=TABLE,
    warp=WARP,
  )

  def law(table, token):
    logits = np.asarray(table, np.float64)[token]
    if temperature == 0:
      return np.eye(NUM_IDS)[logits.argmax()]
    weights = np.exp((logits - logits.max()) / temperature)
    return weights / weights.sum()

  expected = np.zeros(num_rows)
  for row in range(num_rows):
    length = int(state.length_B[row])
    text = [NUM_IDS, *np.asarray(state.tokens_BS)[row, 1:length].tolist()]
    expected[row] = sum(
      theory.acceptance(law(target, token), law(draft, token)) for token in text[:-1]
    )
  np.testing.assert_allclose(measured.sum_B, expected, atol=1e-5)
  np.testing.assert_array_equal(measured.count_B, np.asarray(state.length_B) - 1)
  assert measured.mean == pytest.approx(expected.sum() / measured.count_B.sum())


def test_alpha_of_copies_of_strangers_and_of_nothing():
  table = random_table(4)
  sampling = make_sampling(4, temperature=1.0)
  state = decode(table, table, sampling, model_draft(TABLE, WARP, 3))

  def alpha(params, length_B, **kwargs):
    return metrics.alpha(
      params,
      jnp.full((4, 3), 2, jnp.int32),
      state.tokens_BS,
      length_B,
      sampling,
      target=TABLE,
      warp=WARP,
      **kwargs,
    ).mean

  assert alpha(Params(table, table), state.length_B, draft=TABLE) == pytest.approx(1.0)
  only_0 = jnp.zeros((NUM_IDS + 1, NUM_IDS)).at[:, 0].set(60.0)
  only_1 = jnp.zeros((NUM_IDS + 1, NUM_IDS)).at[:, 1].set(60.0)
  assert alpha(Params(only_0, only_1), state.length_B, draft=TABLE) < 1e-6
  assert alpha(Params(table, table), jnp.ones(4, jnp.int32), draft=TABLE) == 0.0
  # A draft that is warped otherwise, and one with padding ids of its own.
  hot = make_warp(banned_ids=(0, 2))
  changed = alpha(Params(table, table), state.length_B, draft=TABLE, draft_warp=hot)
  assert changed < 0.999
  wide = table_model(NUM_IDS + 2)
  wide_table = jnp.full((NUM_IDS + 3, NUM_IDS + 2), -60.0)
  wide_table = wide_table.at[:NUM_IDS, :NUM_IDS].set(table[:NUM_IDS])
  wide_table = wide_table.at[NUM_IDS + 2, :NUM_IDS].set(table[NUM_IDS])
  assert alpha(Params(table, wide_table), state.length_B, draft=wide) == pytest.approx(
    1.0
  )


def test_alpha_of_t5s_equals_the_uncached_one():
  target, draft = tiny_t5(seed=0), tiny_t5(seed=1, num_layers=1)
  inputs_BE = jnp.array([[3, 4, 5, 0], [6, 7, 0, 0]], jnp.int32)
  params = Params(target.params, draft.params)
  tokens_BS = jax.random.randint(jax.random.key(0), (2, 11), 1, 12)
  length_B = jnp.array([6, 10], jnp.int32)

  def alpha(target_model, draft_model):
    return metrics.alpha(
      params,
      inputs_BE,
      tokens_BS.at[:, 0].set(0),
      length_B,
      make_sampling(2, temperature=1.0),
      target=target_model,
      draft=draft_model,
      warp=WARP,
    )

  cached = alpha(target.model, draft.model)
  oracle = alpha(target.oracle, draft.oracle)
  assert 0.05 < oracle.mean < 0.95
  np.testing.assert_allclose(cached.sum_B, oracle.sum_B, atol=1e-4)
  np.testing.assert_array_equal(cached.count_B, [5, 9])


def test_measured_counts_follow_the_theory_where_acceptances_are_independent():
  num_rows, num_draft = 4096, 3
  p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
  model = table_model(3, order=0)
  target, draft = (jnp.log(jnp.asarray(law, jnp.float32))[None] for law in (p, q))
  sampling = make_sampling(num_rows, temperature=1.0, max_new=12)
  state = loop.decode(
    Params(target, draft),
    jnp.ones((num_rows, 1), jnp.int32),
    rng.row_keys(0, jnp.arange(num_rows)),
    sampling,
    target=model,
    drafter=model_draft(model, WARP, num_draft),
    verifier=verify.token_verifier,
    warp=WARP,
    max_len=32,
    eos_id=-1,
  )
  summary = metrics.summarize(state, -1)
  alpha = theory.acceptance(p, q)
  judged = summary.num_accepted_tokens + summary.num_corrections
  sigma = np.sqrt(alpha * (1 - alpha) / judged)
  assert abs(summary.alpha_estimate - alpha) < 4 * sigma
  # The first round of every row has its full gamma: its tokens follow Eq. 1.
  first_B = np.asarray(state.trace.round_BS == 1).sum(axis=1)
  law = theory.token_law(alpha, num_draft)
  mean = theory.expected_tokens(alpha, num_draft)
  variance = (law * (np.arange(1, num_draft + 2) - mean) ** 2).sum()
  assert abs(first_B.mean() - mean) < 4 * np.sqrt(variance / num_rows)


def test_latency_of_rounds_of_10_ms():
  result = metrics.latency([10.0, 20.0, 30.0], [4, 1, 5])
  assert result.ttft == 10.0
  assert result.itl == (10.0, 10.0)
  assert result.mean_itl == 10.0
  assert result.tpot == pytest.approx(20 / 9)
  assert result.e2e == 30.0
  assert result.num_tokens == 10


def test_latency_counts_from_the_request():
  result = metrics.latency([15.0, 16.0], [1, 1], start=5.0)
  assert (result.ttft, result.tpot, result.e2e) == (10.0, 1.0, 11.0)


def test_latency_of_one_chunk():
  assert metrics.latency([2.0], [1]).tpot is None
  assert metrics.latency([2.0], [1]).mean_itl is None
  assert metrics.latency([2.0], [3]).tpot == 0.0


@pytest.mark.parametrize(
  ('times', 'sizes', 'message'),
  [
    ([], [], 'chunk_times: 0 times'),
    ([1.0], [1, 1], 'chunk_times: 1 times for 2 chunks'),
    ([1.0, 2.0], [1, 0], 'chunk_sizes: 0'),
    ([2.0, 1.0], [1, 1], 'chunk_times: .* must not decrease'),
  ],
)
def test_latency_refuses_nonsense(times, sizes, message):
  with pytest.raises(ValueError, match=message):
    metrics.latency(times, sizes)


def test_measured_latency_includes_the_encoder_and_excludes_compilation():
  table = chain(2, 3, 4, 5)
  state = decode(table, table, make_sampling(1), model_draft(TABLE, WARP, 7))
  now = [0.0]
  starts = []

  def stream():
    # The first start compiles for an hour; each start encodes for 7 ms.
    now[0] += 7.0 + (0.0 if starts else 3.6e6)
    starts.append(now[0])
    for length in (5, 6, 6, 11):  # the third round emits nothing for this row
      now[0] += 10.0
      yield state._replace(length_B=jnp.array([length], jnp.int32))

  result = metrics.measure_latency(stream, clock=lambda: now[0])
  assert len(starts) == 2
  assert result.ttft == 17.0
  assert result.itl == (10.0, 20.0)
  assert result.num_tokens == 10
  assert result.tpot == pytest.approx(30 / 9)


def test_measured_latency_of_the_loop_itself():
  table = chain(2, 3, 4, 5)

  def stream():
    return loop.stream(
      Params(table, table),
      jnp.full((1, 3), 2, jnp.int32),
      rng.row_keys(0, jnp.arange(1)),
      make_sampling(1, max_new=3),
      target=TABLE,
      drafter=model_draft(TABLE, WARP, 1),
      verifier=verify.token_verifier,
      warp=WARP,
      max_len=32,
      eos_id=EOS,
    )

  result = metrics.measure_latency(stream)
  assert result.num_tokens == 3
  assert len(result.itl) == 1  # 2 tokens, then 1
  assert result.e2e >= result.ttft > 0


def test_alpha_does_not_recompile():
  table = random_table(5)

  def measure(seed):
    sampling = make_sampling(4, temperature=0.5 + seed)
    state = decode(table, table, sampling, model_draft(TABLE, WARP, 3), seed=seed)
    return metrics.alpha(
      Params(table, table),
      jnp.full((4, 3), 2, jnp.int32),
      state.tokens_BS,
      state.length_B,
      sampling,
      target=TABLE,
      draft=TABLE,
      warp=WARP,
    )

  measure(0)
  before = metrics._overlap._cache_size()
  for seed in range(1, 4):
    measure(seed)
  assert metrics._overlap._cache_size() == before


def test_summary_is_host_data():
  table = chain(2, EOS)
  summary = metrics.summarize(
    decode(table, table, make_sampling(1), model_draft(TABLE, WARP, 7)), EOS
  )
  assert all(type(leaf) is int for leaf in jax.tree.leaves(summary))
