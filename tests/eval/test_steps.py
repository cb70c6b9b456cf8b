"""Timing: structure and counts with clocks that tick when told; no real times."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import autoregressive, loop, rng, verify
from specjax.core.types import Params, Sampling
from specjax.core.warp import make_warp
from specjax.drafters import model_draft, ngram_draft
from specjax.eval import interleave, steps, theory
from specjax.models.table import table_model

NUM_IDS, MAX_LEN, NUM_DRAFT, NUM_ROWS = 5, 13, 3, 2
TABLE = table_model(NUM_IDS)
WARP = make_warp()
DRAFTER = model_draft(TABLE, WARP, NUM_DRAFT)
INPUTS = jnp.full((NUM_ROWS, 4), 2, jnp.int32)
# Always 2 after any token: the uniform drafts of the timed verify step, id 1, are
# never accepted, and those of a copy always.
CONSTANT = jnp.zeros((NUM_IDS + 1, NUM_IDS)).at[:, 2].set(50.0)
SAMPLING = Sampling(
  temperature_B=jnp.zeros(NUM_ROWS),
  top_k_B=jnp.zeros(NUM_ROWS, jnp.int32),
  top_p_B=jnp.ones(NUM_ROWS),
  min_new_tokens_B=jnp.zeros(NUM_ROWS, jnp.int32),
  max_new_tokens_B=jnp.full(NUM_ROWS, 2, jnp.int32),
  num_draft_B=jnp.full(NUM_ROWS, 1, jnp.int32),
)
ARGUMENTS = {
  'target': TABLE,
  'verifier': verify.token_verifier,
  'warp': WARP,
  'max_len': MAX_LEN,
}


class Ticks:
  """A clock that advances by 1 at each reading, so that every run takes 1."""

  def __init__(self):
    self.now = 0

  def __call__(self):
    self.now += 1
    return float(self.now)


def test_steps_are_times_of_runs_over_iterations():
  times = steps.measure_steps(
    Params(CONSTANT, CONSTANT),
    INPUTS,
    SAMPLING,
    drafter=DRAFTER,
    repeats=3,
    clock=Ticks(),
    **ARGUMENTS,
  )
  num_new = MAX_LEN - 1  # whatever the rows' own budgets of 2 say
  assert times.target_step == interleave.Samples((1 / num_new,) * 3)
  assert times.verify_step == interleave.Samples((1 / num_new,) * 3)  # none accepted
  assert times.proposal == interleave.Samples((1 / num_new,) * 3)
  assert times.round == interleave.Samples((1 / (num_new / (NUM_DRAFT + 1)),) * 3)
  assert times.target_encode == times.draft_encode == interleave.Samples((1.0,) * 3)
  assert times.c == pytest.approx(1 / NUM_DRAFT)
  assert times.v == pytest.approx(1.0)
  assert times.excess == pytest.approx((NUM_DRAFT + 1) / 2)
  assert times.predict(0.8) == pytest.approx(theory.speedup(0.8, 3, 1 / 3))
  as_dict = times.as_dict()
  assert as_dict['target_step_ms'] == pytest.approx(1e3 / num_new)
  assert as_dict['num_draft'] == NUM_DRAFT
  assert set(as_dict) >= {'c', 'v', 'excess', 'round_ms', 'draft_encode_ms'}


def test_overhead_is_rounds_over_parts_alone():
  overhead = steps.loop_overhead(
    Params(CONSTANT, CONSTANT),
    INPUTS,
    SAMPLING,
    drafter=DRAFTER,
    repeats=2,
    clock=Ticks(),
    **ARGUMENTS,
  )
  # 12 proposals, verifications and bare rounds, but 3 rounds, in a tick each.
  assert overhead.total.values == pytest.approx((2.0, 2.0))
  assert overhead.loop.values == pytest.approx((4.0, 4.0))
  assert overhead.memory.values == pytest.approx((0.5, 0.5))


def test_a_real_clock_gives_positive_times_and_compiles_once():
  def measure(temperature):
    return steps.measure_steps(
      Params(CONSTANT, None),
      INPUTS,
      SAMPLING._replace(temperature_B=jnp.full(NUM_ROWS, temperature)),
      drafter=ngram_draft(NUM_DRAFT, NUM_IDS),
      repeats=2,
      **ARGUMENTS,
    )

  times = measure(0.0)
  samples = [each for each in times if isinstance(each, interleave.Samples)]
  assert len(samples) == 6
  assert all(value > 0 for each in samples for value in each.values)
  compiled = steps._run_rounds._cache_size(), steps._run_proposals._cache_size()
  measure(0.5)
  assert (
    steps._run_rounds._cache_size(),
    steps._run_proposals._cache_size(),
  ) == compiled


def test_the_timed_rounds_are_those_of_decode():
  table = np.random.default_rng(0).normal(size=(NUM_IDS + 1, NUM_IDS)) * 2
  params = Params(jnp.asarray(table, jnp.float32), CONSTANT)
  key_B = rng.row_keys(3, jnp.arange(NUM_ROWS))
  sampling = SAMPLING._replace(
    temperature_B=jnp.ones(NUM_ROWS),
    max_new_tokens_B=jnp.full(NUM_ROWS, MAX_LEN - 1, jnp.int32),
    num_draft_B=jnp.full(NUM_ROWS, NUM_DRAFT, jnp.int32),
  )
  maker = steps._bench(params, INPUTS, sampling, NUM_DRAFT, key_B, **ARGUMENTS)
  run, num_rounds = maker.rounds(DRAFTER, params.draft)
  expected = loop.decode(
    params, INPUTS, key_B, sampling, drafter=DRAFTER, eos_id=-1, **ARGUMENTS
  )
  np.testing.assert_array_equal(run().tokens_BS, expected.tokens_BS)
  assert num_rounds == int(expected.step)


def test_the_timed_proposals_follow_each_other():
  # A table that counts up: each proposal must go on where the last one ended.
  count_up = jnp.roll(jnp.eye(NUM_IDS + 1), 1, axis=1)[:, :NUM_IDS] * 50.0
  maker = steps._bench(
    Params(CONSTANT, count_up), INPUTS, SAMPLING, NUM_DRAFT, None, **ARGUMENTS
  )
  run, count = maker.proposals(DRAFTER)
  _, tokens_BS, draft = run()
  assert count == MAX_LEN - 1
  text = np.asarray(tokens_BS)[0, 1:MAX_LEN].tolist()
  assert text == [i % NUM_IDS for i in range(MAX_LEN - 1)]
  assert draft.logq_BGV.shape == (NUM_ROWS, NUM_DRAFT, NUM_IDS)


def test_the_bare_rounds_draft_and_judge():
  maker = steps._bench(
    Params(CONSTANT, CONSTANT), INPUTS, SAMPLING, NUM_DRAFT, None, **ARGUMENTS
  )
  full = SAMPLING._replace(num_draft_B=jnp.full(NUM_ROWS, NUM_DRAFT, jnp.int32))
  maker = maker._replace(sampling=full)
  for drafter, draft_params, num_accepted in (
    (DRAFTER, CONSTANT, NUM_DRAFT),
    (steps._replay(NUM_DRAFT), maker.given_draft(NUM_DRAFT), 0),
  ):
    run, count = maker.bare(drafter, draft_params)
    *_, verdict = run()
    assert count == MAX_LEN - 1
    np.testing.assert_array_equal(verdict.num_accepted_B, num_accepted)
    np.testing.assert_array_equal(verdict.next_token_B, 2)


def test_verify_costs_are_measured_and_interpolated():
  costs = steps.measure_verify_costs(
    Params(CONSTANT, None),
    INPUTS,
    SAMPLING,
    gammas=(1, 4),
    repeats=2,
    clock=Ticks(),
    **ARGUMENTS,
  )
  assert costs == pytest.approx((1.0,) * 5)
  with pytest.raises(ValueError, match=r'gammas: \[\]'):
    steps.measure_verify_costs(
      Params(CONSTANT, None), INPUTS, SAMPLING, gammas=(), **ARGUMENTS
    )


def test_a_drafter_without_drafts_is_refused():
  with pytest.raises(ValueError, match='num_draft: 0'):
    steps.measure_steps(
      Params(CONSTANT),
      INPUTS,
      SAMPLING,
      drafter=autoregressive.no_draft,
      **ARGUMENTS,
    )


def test_runs_take_turns_after_one_call_each():
  order = []
  runs = {name: lambda name=name: order.append(name) for name in 'abc'}
  times, first = interleave.interleave(runs, repeats=2, clock=Ticks())
  assert ''.join(order) == 'abc' * 3
  assert times['b'] == interleave.Samples((1.0, 1.0))
  assert first == {'a': 1.0, 'b': 1.0, 'c': 1.0}
  with pytest.raises(ValueError, match='repeats: 0'):
    interleave.interleave(runs, repeats=0)


def test_speedup_takes_ratios_within_turns_and_compilation_apart():
  now = [0.0]
  calls = {'speculative': 0, 'baseline': 0}

  def run(name, compile_time, step):
    def call():
      turn = calls[name]
      calls[name] += 1
      slow = 10.0 if turn == 3 else 1.0  # the machine slows down in turn 3
      now[0] += step * slow + (compile_time if turn == 0 else 0.0)
      return jnp.zeros(1)

    return call

  found = interleave.measure_speedup(
    run('speculative', 100.0, 2.0),
    run('baseline', 50.0, 5.0),
    repeats=3,
    clock=lambda: now[0],
  )
  assert found.speculative.values == pytest.approx((2.0, 2.0, 20.0))
  assert found.baseline.values == pytest.approx((5.0, 5.0, 50.0))
  assert found.ratios.values == pytest.approx((2.5, 2.5, 2.5))
  assert found.speculative_compile == pytest.approx(100.0)
  assert found.baseline_compile == pytest.approx(50.0)


def test_runs_are_waited_for():
  waited = []

  class Result:
    def block_until_ready(self):
      waited.append(True)
      return self

  interleave.interleave({'run': Result}, repeats=2, clock=Ticks())
  assert len(waited) == 3


def test_quartiles():
  samples = interleave.Samples((1.0, 2.0, 3.0, 4.0, 100.0))
  assert (samples.low, samples.median, samples.high) == (2.0, 3.0, 4.0)
