"""Which gamma pays: chosen while decoding, from what past rounds have shown.

Plain functions of counts and costs; `specjax.auto` runs them. A round of gamma
drafted tokens costs cost(gamma) plain steps and emits tokens(gamma) tokens:

  tokens(gamma) = 1 + S_1 + .. + S_gamma,   S_i = h_1 h_2 .. h_i
  speedup(gamma) = pace tokens(gamma) / cost(gamma)

h_i is the chance that draft i is accepted where the i - 1 before it were: a ratio of
two counts, so that drafters that propose nothing now and then (prompt lookup), blocks
that EOS or the budget cuts, and acceptances that are not independent are all counted
as they are. alpha in Eq. 1 of Leviathan et al. 2023 is the case of equal h_i.

pace is what a batch makes of that. Plain decoding takes as many rounds as the longest
text has tokens; with drafts the rows differ in luck, and a batch waits for the
unluckiest. Finished batches show it: the tokens of their longest text over those that
as many rounds emit in the mean. For batches of one text it is nearly 1.

Why the output's law stays the target's, whatever is chosen. Let F_t be all that has
happened before round t: tokens, verdicts and times of finished rounds, of every row.
gamma_t is a function of F_t, and the coins of round t are independent of F_t, since
each round has a key of its own (`core.rng`). Given F_t, round t is then an ordinary
round of a fixed gamma, which continues each row by the target's law (Leviathan et al.
2023, appendix A.1; `testing.enumerate_law`). By induction over rounds so does the whole
output. What would break it is a gamma that looks at the round it is used in: at drafted
tokens, at their acceptance, or at rounds that had the same coins, as an earlier call
with the same seed has. Hence counts of sampled texts are forgotten between calls; those
of greedy texts are kept, which have no coins, and times, which are of rounds with other
coins (`specjax.auto`).
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

PRIOR = 0.7  # of h_1; the prior of h_i is h_{i-1}
PRIOR_COUNT = 2.0
WINDOW = 512.0  # row rounds after which evidence has faded to 1/e
MIN_ROUNDS = 16  # row rounds with drafts before plain decoding may be chosen
PROBE = 4  # rounds of a look
REVIEW = 64  # rounds after which a choice is looked at again within a long text
SPARE = 0.01  # of plain decoding's time that may be lost to looking again
PRIOR_STEPS = 8.0  # of a pace of 1
RELUCTANCE = 0.02  # gain that drafting, or a gamma not measured yet, must promise


class Costs(NamedTuple):
  """Times of whole rounds over that of a plain step.

  Attributes:
    measured: (gamma, cost) by gamma; (0, 1.0) is the first of at least two.
  """

  measured: tuple[tuple[int, float], ...]

  @property
  def v(self) -> float:
    """What a round costs before its first drafted token."""
    return self._fit()[0]

  @property
  def c(self) -> float:
    """What each drafted token adds, verifying it included."""
    return self._fit()[1]

  def cost(self, gamma: int) -> float:
    """As measured; v + c gamma where it is not."""
    measured = dict(self.measured)
    return measured.get(gamma) or self.v + self.c * gamma

  def is_measured(self, gamma: int) -> bool:
    return gamma in dict(self.measured)

  def joined(self, measured: Iterable[tuple[int, float]]) -> 'Costs':
    """With more gammas measured."""
    return Costs(tuple(sorted({**dict(self.measured), **dict(measured)}.items())))

  def _fit(self) -> tuple[float, float]:
    # Two tokens may cost far more than one (a matrix product is no matrix-vector
    # product), so a plain step is no point of the line if there are others.
    points = self.measured[1:] if len(self.measured) > 2 else self.measured
    gammas, costs = zip(*points, strict=True)
    slope = max(statistics.linear_regression(gammas, costs).slope, 0.0)
    return statistics.fmean(costs) - slope * statistics.fmean(gammas), slope


class State(NamedTuple):
  """What past rounds have shown; floats, since evidence fades.

  Attributes:
    reached_G: row rounds that may have proposed draft i, all before it accepted.
    accepted_G: of these, those that accepted it.
    num_judged: row rounds with gamma > 0; does not fade.
    credit: plain steps that may be lost to looking at drafts again.
    emitted: tokens of a row's mean in this batch's rounds, were none to end; None
      after a plain round, which says nothing of the pace of drafts.
    emitted_sum: of finished batches.
    longest_sum: tokens of their longest texts.
  """

  reached_G: tuple[float, ...]
  accepted_G: tuple[float, ...]
  num_judged: float
  credit: float
  emitted: float | None = 0.0
  emitted_sum: float = 0.0
  longest_sum: float = 0.0


class Choice(NamedTuple):
  """What to do next, and why.

  Attributes:
    gamma: drafted tokens a round; 0 is plain decoding.
    num_rounds: rounds to run before choosing again; None: to the end of the batch.
    rival: the best gamma > 0, which is `gamma` unless that is 0.
    alpha: accepted / judged drafts so far, PRIOR before the first.
    tokens: by which a round of `rival` is expected to bring a batch forward.
    costs: of rounds.
  """

  gamma: int
  num_rounds: int | None
  rival: int
  alpha: float
  tokens: float
  costs: Costs

  @property
  def speedup(self) -> float:
    """Predicted for `gamma`, encoders left out."""
    return self.tokens / self.costs.cost(self.rival) if self.gamma else 1.0

  def describe(self) -> str:
    """One line for people."""
    costs = self.costs
    measured = f'alpha {self.alpha:.2f}, v {costs.v:.2f}, c {costs.c:.2f}'
    if self.gamma:
      return (
        f'auto: {measured}: gamma {self.gamma}, predicted {self.speedup:.2f} times as '
        'fast as plain decoding (encoders left out)'
      )
    return (
      f'auto: {measured}: gamma 0, plain decoding is no slower here, because a '
      f'round of gamma {self.rival} costs {costs.cost(self.rival):.2f} plain steps and '
      f'brings the batch forward by {self.tokens:.2f} tokens'
    )

  def to_dict(self) -> dict[str, Any]:
    """JSON types."""
    return {
      'gamma': self.gamma,
      'alpha': self.alpha,
      'v': self.costs.v,
      'c': self.costs.c,
      'costs': [list(each) for each in self.costs.measured],
      'rival': self.rival,
      'tokens_per_round': self.tokens,
      'predicted_speedup': self.speedup,
    }


def ladder(max_gamma: int) -> tuple[int, ...]:
  """The gammas to choose from: 0, powers of two, and the maximum.

  Few, since each is a program to compile, and enough, since near its optimum the
  speedup is flat.

  Example:
    >>> ladder(6), ladder(0)
    ((0, 1, 2, 4, 6), (0,))
  """
  powers = [2**i for i in range(max_gamma.bit_length())]
  return tuple(sorted({0, *powers, max_gamma} if max_gamma else {0}))


def first_measured(max_gamma: int) -> tuple[int, ...]:
  """The gammas > 0 whose costs are measured before the first choice."""
  return tuple(sorted({min(2, max_gamma), max_gamma}))


def initial(max_gamma: int) -> State:
  """Nothing has been seen."""
  nothing_G = (0.0,) * max_gamma
  return State(nothing_G, nothing_G, 0.0, 0.0)


def observe(
  state: State,
  gamma: int,
  num_rounds: int,
  row_rounds: int,
  accepted_G: Sequence[int],
) -> State:
  """The state after `num_rounds` finished rounds of one gamma.

  Args:
    state: before them.
    gamma: of these rounds.
    num_rounds: rounds of the batch.
    row_rounds: the same summed over the rows that were live.
    accepted_G: drafts accepted at each position, summed over rows.
  """
  kept = math.exp(-row_rounds / WINDOW)
  reached_G = [kept * each for each in state.reached_G]
  sum_G = [kept * each for each in state.accepted_G]
  for i in range(gamma):
    reached_G[i] += float(accepted_G[i - 1] if i else row_rounds)
    sum_G[i] += float(accepted_G[i])
  credit = 0.0 if gamma else state.credit + SPARE * num_rounds
  emitted = state.emitted if gamma else None
  if emitted is not None and row_rounds:
    emitted += num_rounds * (1 + sum(accepted_G) / row_rounds)
  return state._replace(
    reached_G=tuple(reached_G),
    accepted_G=tuple(sum_G),
    num_judged=state.num_judged + (row_rounds if gamma else 0),
    credit=credit,
    emitted=emitted,
  )


def finish(state: State, longest: int) -> State:
  """The state after a batch.

  Args:
    state: after its last round.
    longest: tokens of its longest text.
  """
  if not state.emitted:
    return state._replace(emitted=0.0)
  kept = math.exp(-longest / WINDOW)
  return state._replace(
    emitted=0.0,
    emitted_sum=kept * state.emitted_sum + state.emitted,
    longest_sum=kept * state.longest_sum + longest,
  )


def pace(state: State) -> float:
  """By how much a batch advances where a row's mean advances by 1."""
  return (state.longest_sum + PRIOR_STEPS) / (state.emitted_sum + PRIOR_STEPS)


def alpha(state: State) -> float:
  """Accepted among those judged, all positions together."""
  judged = sum(state.reached_G)
  return sum(state.accepted_G) / judged if judged else PRIOR


def tokens_per_round(state: State, gamma: int) -> float:
  """Expected tokens of a row's round: 1 + S_1 + .. + S_gamma."""
  total, survival, chance = 1.0, 1.0, PRIOR
  counts = list(zip(state.reached_G, state.accepted_G, strict=True))
  for reached, accepted in counts[:gamma]:
    chance = (accepted + PRIOR_COUNT * chance) / (reached + PRIOR_COUNT)
    survival *= chance
    total += survival
  return total


def choose(state: State, costs: Costs, *, is_start: bool = True) -> Choice:
  """The gamma of the next rounds: a function of the past alone.

  The best predicted speedup wins, over plain decoding and as a gamma not measured yet
  only by RELUCTANCE.
  Drafting is looked at for MIN_ROUNDS row rounds first. Where plain decoding wins, a
  later batch starts with PROBE drafting rounds as soon as a share SPARE of the plain
  steps since the last look pays for what they are predicted to lose.

  Args:
    state: what finished rounds have shown.
    costs: of rounds; at least one gamma > 0 is measured.
    is_start: of a batch; drafts are not looked at again in the middle of one.
  """
  drafting = [gamma for gamma in ladder(len(state.reached_G)) if gamma]

  def tokens_of(gamma: int) -> float:
    return pace(state) * tokens_per_round(state, gamma)

  def speedup(gamma: int) -> float:
    return tokens_of(gamma) / costs.cost(gamma)

  rival = max(filter(costs.is_measured, drafting), key=speedup)
  best = max(drafting, key=speedup)
  is_new = state.num_judged < MIN_ROUNDS
  if not is_new and speedup(best) > max(speedup(rival), 1.0) * (1 + RELUCTANCE):
    rival = best
  tokens = tokens_of(rival)
  # The call itself is counted as one more step.
  loss = 1.0 + PROBE * max(costs.cost(rival) - tokens, 0.0)
  gamma = rival
  num_rounds: int | None = PROBE if is_new else REVIEW
  if not is_new and speedup(rival) <= 1.0 + RELUCTANCE:
    looks = is_start and state.credit >= loss
    gamma, num_rounds = (rival, PROBE) if looks else (0, None)
  return Choice(gamma, num_rounds, rival, alpha(state), tokens, costs)
