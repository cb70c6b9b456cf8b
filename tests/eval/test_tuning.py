"""The policy by itself: on counts, on theory, and on simulated workloads."""

import numpy as np
import pytest

from specjax.eval import theory, tuning

CPU = tuning.Costs(((0, 1.0), (2, 2.9), (8, 4.4)))  # v 2.4, c .25
CHEAP = tuning.Costs(((0, 1.0), (2, 1.1), (8, 1.4)))  # v 1, c .05


def seen(alpha, max_gamma=8, rounds=10_000):
  """The state after many independent acceptances of one probability."""
  accepted_G = [rounds * alpha ** (i + 1) for i in range(max_gamma)]
  return tuning.observe(
    tuning.initial(max_gamma), max_gamma, rounds, rounds, accepted_G
  )


@pytest.mark.parametrize(
  ('max_gamma', 'gammas'),
  [
    (0, (0,)),
    (1, (0, 1)),
    (3, (0, 1, 2, 3)),
    (6, (0, 1, 2, 4, 6)),
    (8, (0, 1, 2, 4, 8)),
  ],
)
def test_ladder(max_gamma, gammas):
  assert tuning.ladder(max_gamma) == gammas
  if max_gamma:
    assert set(tuning.first_measured(max_gamma)) <= set(gammas[1:])
    assert max_gamma in tuning.first_measured(max_gamma)


def test_costs_are_measured_or_on_a_line():
  assert (CPU.v, CPU.c) == pytest.approx((2.4, 0.25))
  assert [CPU.cost(gamma) for gamma in (0, 1, 2, 4, 8)] == pytest.approx(
    [1, 2.65, 2.9, 3.4, 4.4]
  )
  more = CPU.joined([(4, 3.0)])
  assert more.cost(4) == 3.0
  assert not CPU.is_measured(4)
  # One gamma alone: from the plain step to it.
  alone = tuning.Costs(((0, 1.0), (2, 1.6)))
  assert (alone.v, alone.c, alone.cost(1)) == pytest.approx((1.0, 0.3, 1.3))
  # Noise may not make longer drafts cheaper.
  assert tuning.Costs(((0, 1.0), (2, 2.0), (4, 1.8))).c == 0


def test_counts_are_by_position_and_fade():
  state = tuning.observe(tuning.initial(3), 2, 5, 10, [6, 3, 0])
  assert state.reached_G == (10, 6, 0)
  assert state.accepted_G == (6, 3, 0)
  assert tuning.alpha(state) == 9 / 16
  half = round(tuning.WINDOW * np.log(2))
  state = tuning.observe(state, 0, half, half, [0, 0, 0])
  assert state.reached_G == pytest.approx((5, 3, 0), rel=1e-2)
  assert state.num_judged == 10
  assert state.credit == pytest.approx(tuning.SPARE * half)
  assert tuning.observe(state, 1, 1, 1, [0, 0, 0]).credit == 0


def test_a_batch_waits_for_its_unluckiest_row():
  # 4 rounds of 2 rows with gamma 4 emit 16 tokens a row, were none to end.
  state = tuning.observe(tuning.initial(4), 4, 4, 8, [8, 6, 5, 5])
  assert state.emitted == 4 * (1 + 24 / 8)
  assert tuning.pace(state) == 1  # not before the batch is finished
  state = tuning.finish(state, 12)
  expected = (12 + tuning.PRIOR_STEPS) / (16 + tuning.PRIOR_STEPS)
  assert tuning.pace(state) == pytest.approx(expected)
  assert state.emitted == 0
  # A batch that was finished plainly says nothing about drafts.
  mixed = tuning.observe(tuning.observe(state, 4, 1, 2, [1, 1, 1, 1]), 0, 9, 9, [0] * 4)
  assert tuning.pace(tuning.finish(mixed, 10)) == pytest.approx(expected)
  assert tuning.finish(mixed, 10).emitted == 0
  # Where rounds pay for the mean row alone, plain decoding is chosen.
  seen_ = seen(0.9)._replace(emitted_sum=400.0, longest_sum=250.0)
  assert tuning.choose(seen(0.9), CPU).gamma == 8
  assert tuning.choose(seen_, CPU).gamma == 0


@pytest.mark.parametrize('alpha', [0.0, 0.3, 0.7, 0.95, 1.0])
@pytest.mark.parametrize('gamma', [0, 1, 4, 8])
def test_tokens_per_round_is_equation_1_where_acceptances_are_independent(alpha, gamma):
  state = seen(alpha)._replace(num_judged=0)
  assert tuning.tokens_per_round(state, gamma) == pytest.approx(
    theory.expected_tokens(alpha, gamma), rel=0.02
  )


def test_tokens_per_round_follows_the_positions():
  # Prompt lookup: mostly nothing is found, but what is found is right.
  state = tuning.observe(tuning.initial(4), 4, 1000, 1000, [200, 190, 180, 170])
  expected = 1 + 0.2 + 0.19 + 0.18 + 0.17
  assert tuning.tokens_per_round(state, 4) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize('v', [1.0, 1.3, 1.8, 2.4])
@pytest.mark.parametrize('c', [0.01, 0.05, 0.1, 0.25])
def test_the_choice_is_near_the_best_of_all_gammas(v, c):
  costs = tuning.Costs(tuple((g, v + c * g if g else 1.0) for g in (0, 1, 2, 4, 8)))
  for alpha in np.linspace(0, 1, 21):
    choice = tuning.choose(seen(alpha), costs)
    speedups = [theory.speedup(alpha, g, c, v) for g in range(9)]
    assert speedups[choice.gamma] > max(speedups) / 1.05
    assert choice.speedup == pytest.approx(max(speedups[choice.gamma], 1), rel=0.02)


def test_drafts_are_looked_at_first_and_with_programs_that_exist():
  state = tuning.initial(8)
  choice = tuning.choose(state, CPU)
  assert choice.gamma in (2, 8)
  assert choice.num_rounds == tuning.PROBE
  state = tuning.observe(state, 2, 15, tuning.MIN_ROUNDS - 1, [0] * 8)
  assert tuning.choose(state, CPU, is_start=False).gamma > 0
  state = tuning.observe(state, 2, 1, 1, [0] * 8)
  choice = tuning.choose(state, CPU, is_start=False)
  assert (choice.gamma, choice.num_rounds, choice.speedup) == (0, None, 1.0)
  assert 'gamma 0, plain decoding is no slower here, because' in choice.describe()
  assert 'alpha 0.00, v 2.40, c 0.25' in choice.describe()


def test_a_gamma_not_measured_must_promise_more():
  costs = tuning.Costs(((0, 1.0), (2, 1.5), (8, 2.1)))
  gammas = {tuning.choose(seen(alpha), costs).gamma for alpha in (0.6, 0.7, 0.8, 0.9)}
  assert 4 in gammas  # worth its compilation at some alpha
  choice = tuning.choose(seen(0.85), costs)
  assert choice.gamma == 8  # 4 would be hardly better


def test_drafts_are_looked_at_again_when_plain_steps_have_paid_for_it():
  state = seen(0.3)
  assert tuning.choose(state, CPU).gamma == 0
  waited = 0
  while tuning.choose(state, CPU).gamma == 0:
    state = tuning.observe(state, 0, 10, 10, [0] * 8)
    waited += 10
  choice = tuning.choose(state, CPU)
  assert choice.num_rounds == tuning.PROBE
  loss = tuning.PROBE * (CPU.cost(choice.gamma) - choice.tokens)
  assert 0 < loss <= tuning.SPARE * waited
  assert tuning.choose(state, CPU, is_start=False).gamma == 0


def lengths(rows, num_texts, spread, seed):
  """Tokens of texts, [num_texts, rows]; `spread` 0: all have 30."""
  rng = np.random.default_rng(seed)
  return np.rint(30 * np.exp(spread * rng.standard_normal((num_texts, rows)))).astype(
    int
  )


def play(rng, left_B, alpha, gamma):
  """A round as the loop counts it: what a text's end cuts is not accepted."""
  accepted_BG = np.cumprod(rng.random((len(left_B), gamma)) < alpha, axis=1)
  accepted_BG *= np.arange(gamma) < left_B[:, None]
  return accepted_BG, np.maximum(left_B - accepted_BG.sum(axis=1) - 1, 0)


def simulate(alphas, costs, lengths_NB, *, max_gamma=8, seed=0):
  """Plain steps that batches take, one alpha for each, as `specjax.auto` runs them."""
  rng = np.random.default_rng(seed)
  state, steps, gammas = tuning.initial(max_gamma), 0.0, []
  for alpha, left_B in zip(alphas, lengths_NB, strict=True):
    choice, left = None, 0
    longest = left_B.max()
    while (left_B > 0).any():
      if left <= 0:
        choice = tuning.choose(state, costs, is_start=choice is None)
        left = choice.num_rounds or 10**9
        costs = costs.joined([(choice.gamma, costs.cost(choice.gamma))])
      gamma, num_live = choice.gamma, int((left_B > 0).sum())
      accepted_BG, left_B = play(rng, left_B, alpha, gamma)
      steps += costs.cost(gamma)
      accepted_G = [*accepted_BG.sum(axis=0).tolist(), *[0] * (max_gamma - gamma)]
      state = tuning.observe(state, gamma, 1, num_live, accepted_G)
      left -= 1
      gammas.append(gamma)
    state = tuning.finish(state, int(longest))
  return steps, gammas


def fixed(alphas, costs, gamma, lengths_NB, *, seed=1):
  """The same with one gamma."""
  rng = np.random.default_rng(seed)
  steps = 0.0
  for alpha, left_B in zip(alphas, lengths_NB, strict=True):
    while (left_B > 0).any():
      _, left_B = play(rng, left_B, alpha, gamma)
      steps += costs.cost(gamma)
  return steps


@pytest.mark.parametrize('costs', [CPU, CHEAP], ids=['cpu', 'cheap'])
@pytest.mark.parametrize('alpha', [0.1, 0.5, 0.7, 0.9, 0.97])
@pytest.mark.parametrize(('rows', 'spread'), [(1, 0.5), (8, 0.0), (8, 0.5)])
def test_simulated_texts_take_hardly_longer_than_with_the_best_gamma(
  alpha, costs, rows, spread
):
  alphas = [alpha] * 80
  lengths_NB = lengths(rows, 80, spread, seed=0)
  taken, _ = simulate(alphas, costs, lengths_NB)
  fixed_steps = [fixed(alphas, costs, gamma, lengths_NB) for gamma in (0, 1, 2, 4, 8)]
  assert taken < 1.03 * fixed_steps[0]
  assert taken < 1.05 * min(fixed_steps)


def test_a_workload_that_turns_is_followed():
  lengths_NB = lengths(1, 120, 0.0, seed=0)
  _, gammas = simulate([0.2] * 60 + [0.97] * 60, CPU, lengths_NB)
  assert np.mean(np.array(gammas[-100:]) > 0) > 0.9
  _, gammas = simulate([0.97] * 60 + [0.2] * 60, CPU, lengths_NB)
  assert np.mean(np.array(gammas[-100:]) == 0) > 0.9
