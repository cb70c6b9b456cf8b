"""What the report runs: enumerations, samples of the compiled loop, mutants.

Everything works on the tables of `toy`, so that the law of whole outputs is known.
Samples hold one output per row, rows are independent, and the level is 1e-6 per
test.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from specjax.core import rng
from specjax.testing import enumerate_law, evidence, mutants, rational, tables, toy
from specjax.testing.chi_square import chi_square, count_outputs, g_test
from specjax.testing.toy import EOS, NUM_DRAFT, NUM_TOKENS, ORDER, RULES, VOCAB_SIZE

LEVEL = 1e-6
TOLERANCE = 1e-12
CHUNK = 2**18  # rows of one call of the compiled loop
GAMMAS = ((1, 4), (4, 6))  # of the configurations, with numbers of tokens
TEMPERATURES = (0.7, 1.0)
FILTERS: dict[str, dict[str, Any]] = {
  'none': {},
  'top-k 3': {'top_k': 3},
  'top-p 0.8': {'top_p': 0.8},
}


class Enumeration(NamedTuple):
  """The laws of a rule, compared without sampling.

  Attributes:
    rational_equal: the rational law of the loop is the target's, exactly.
    max_difference: largest |float64 law - rational law|.
    num_outputs: outputs of nonzero probability.
  """

  rule: str
  num_draft: int
  num_tokens: int
  rational_equal: bool
  max_difference: float
  num_outputs: int

  @property
  def passed(self) -> bool:
    return self.rational_equal and self.max_difference <= TOLERANCE


class Sample(NamedTuple):
  """A sample of the compiled loop against the enumerated law.

  Attributes:
    log10_p: of Pearson's test; -inf if an impossible output was observed.
    p_value: of Pearson's test.
    g_p_value: of the likelihood-ratio test.
    rate_p_value: of a test of the number of tokens of the first round, or None.
    log_e: log of the e-value against the law, the largest of all looks at it.
    tv: total variation distance between frequencies and law.
    tv_bound: what it certifies about the sampled law, with error 1e-6.
    counts_K: observations; law_K: the law.
  """

  name: str
  num_samples: int
  num_cells: int
  log10_p: float
  p_value: float
  g_p_value: float
  rate_p_value: float | None
  log_e: float
  tv: float
  tv_bound: float
  counts_K: np.ndarray
  law_K: np.ndarray

  @property
  def passed(self) -> bool:
    p_values = [self.p_value, self.g_p_value]
    if self.rate_p_value is not None:
      p_values.append(self.rate_p_value)
    return min(p_values) > LEVEL and self.log_e < -math.log(LEVEL)


class MutantResult(NamedTuple):
  """Whether and by what a fault was detected.

  Attributes:
    killed_by: 'law' or 'rate' of a sample, 'enumeration', or '' for a survivor.
    log10_p: of the test that should detect it, on the sample.
    why: for mutants that the sample does not detect.
  """

  name: str
  seen_in: str
  killed_by: str
  log10_p: float
  why: str = ''


def log10_p(result) -> float:
  """log10 of a p-value that may be far below the smallest float."""
  if not np.isfinite(result.statistic):
    return -math.inf
  log_p = float(stats.chi2.logsf(result.statistic, result.df))
  if not math.isfinite(log_p):  # Gamma(a, x) ~ x^(a-1) exp(-x) x / (x - a + 1)
    a, x = result.df / 2, result.statistic / 2
    log_p = a * math.log(x) - x - math.log(x - a + 1) - math.lgamma(a)
  return log_p / math.log(10)


def judge(name: str, counts_K, law_K, rate_p_value: float | None = None) -> Sample:
  """All evidence that one vector of counts gives."""
  law_K = law_K / law_K.sum()
  pearson = chi_square(counts_K, law_K)
  return Sample(
    name,
    pearson.num_samples,
    int((law_K > 0).sum()),
    log10_p(pearson),
    pearson.p_value,
    g_test(counts_K, law_K).p_value,
    rate_p_value,
    evidence.log_e_value(counts_K, law_K),
    pearson.tv,
    evidence.certified_tv(counts_K, law_K, LEVEL),
    counts_K,
    law_K,
  )


def enumerations(num_drafts=(1, 2, 3, 4)) -> Iterator[Enumeration]:
  """Both rules, zeros in p and q, horizons of two full blocks."""
  p = rational.random_conditional('p', 3, zeros=1)
  q = rational.random_conditional('q', 3, zeros=1)
  for rule, (in_rationals, shipped) in RULES.items():
    for num_draft in num_drafts:
      num_tokens = 2 * (num_draft + 1)
      fields = {'num_draft': num_draft, 'num_tokens': num_tokens, 'order': 1}
      exact = rational.loop_law(in_rationals, p, q, **fields)
      with jax.enable_x64(True):
        law = enumerate_law.loop_law(
          shipped, rational.as_float(p), rational.as_float(q), vocab_size=3, **fields
        )
      yield Enumeration(
        rule,
        num_draft,
        num_tokens,
        exact == rational.target_law(p, num_tokens),
        rational.max_difference(law, exact),
        len(exact),
      )


def main_sample(
  rule: str, num_samples: int, seed: int, drawn: Callable = lambda rows: None
) -> Sample:
  """The joint law of gamma + 2 tokens, and the number accepted, in chunks.

  Args:
    rule: of `toy.RULES`.
    num_samples: at least so many outputs; the last chunk is filled.
    seed: of the outputs.
    drawn: is told after each chunk how many outputs it had.

  Raises:
    ValueError: no samples.
  """
  if num_samples < 1:
    raise ValueError(f'num_samples: {num_samples}; without samples nothing is tested')
  law, peak = toy.target_law(), -math.inf
  counts_K, first_K = np.zeros(len(law) + 1), np.zeros(NUM_DRAFT + 1)
  run, index = toy.rules_of(NUM_DRAFT), list(RULES).index(rule)
  for chunk in _chunks(num_samples):
    state = run(index, rng.row_keys(seed, jnp.asarray(chunk)), toy.options())
    more_K, law_K = count_outputs(state.tokens_BS, state.length_B, law)
    counts_K = counts_K + more_K
    first_K = first_K + toy.first_round_counts(state)
    peak = max(peak, evidence.log_e_value(counts_K, law_K / law_K.sum()))
    drawn(len(chunk))
  rate = chi_square(first_K, toy.first_round_law(rule)).p_value
  sample = judge(f'{rule}, gamma {NUM_DRAFT}', counts_K, law_K, rate)
  return sample._replace(log_e=peak)


def _chunks(num_samples: int) -> list[np.ndarray]:
  """Example ids; chunks of one size, since another would be compiled anew."""
  rows = min(CHUNK, num_samples)
  return list(np.arange(math.ceil(num_samples / rows) * rows).reshape(-1, rows))


def sweep(
  num_rows: int, seed: int, temperatures: Sequence[float] = TEMPERATURES
) -> Iterator[Sample]:
  """24 configurations: two temperatures, three filters, gamma 1 and 4, both rules."""
  key_B = toy.keys(num_rows, seed)
  for num_draft, num_tokens in GAMMAS:
    run = toy.rules_of(num_draft)
    for temperature in temperatures:
      for filter_name, options in FILTERS.items():
        law = toy.target_law(num_tokens, temperature=temperature, **options)
        sampling = toy.options(temperature=temperature, **options)
        for index, rule in enumerate(RULES):
          state = run(index, key_B, sampling, num_tokens=num_tokens)
          counts_K, law_K = count_outputs(state.tokens_BS, state.length_B, law)
          name = f'{rule}, gamma {num_draft}, T {temperature}, {filter_name}'
          yield judge(name, counts_K, law_K)


def only_verifier(mutant: mutants.Mutant) -> bool:
  """Whether a mutant can share a compilation with others."""
  setup = mutant.mutate(toy.clean())
  return not mutant.patches and setup == toy.clean()._replace(verifier=setup.verifier)


def sampled_mutants(num_rows: int, seed: int) -> Iterator[MutantResult]:
  """Every mutant in the compiled loop, the control last."""
  key_B = toy.keys(num_rows, seed)
  listed = (*mutants.MUTANTS, *mutants.SLOW_MUTANTS, mutants.control)
  shared = [mutant for mutant in listed if only_verifier(mutant)]
  run = toy.switched(tuple(mutant.mutate(toy.clean()).verifier for mutant in shared))
  for mutant in listed:
    if mutant in shared:
      state = run(shared.index(mutant), key_B, toy.options())
    else:
      with mutant.applied(toy.clean()) as faulty:
        state = toy.decode(faulty, key_B, eos_id=EOS if mutant.needs_eos else -1)
    yield _verdict(mutant, state)


def _verdict(mutant, state, why='') -> MutantResult:
  law = toy.target_law(eos_id=EOS if mutant.needs_eos else None)
  result = chi_square(
    *_normalised(*count_outputs(state.tokens_BS, state.length_B, law))
  )
  killed_by = 'law' if result.p_value < LEVEL else ''
  if mutant.shown_by == 'rate':
    result = chi_square(toy.first_round_counts(state), toy.first_round_law('token'))
    killed_by = killed_by or ('rate' if result.p_value < LEVEL else '')
  return MutantResult(mutant.name, mutant.seen_in, killed_by, log10_p(result), why)


def _normalised(counts_K, law_K):
  return counts_K, law_K / law_K.sum()


def slight_mutants(num_rows: int, seed: int) -> Iterator[MutantResult]:
  """Mutants that only enumeration shows: both their samples and their laws."""
  key_B = toy.keys(num_rows, seed)
  p, q = (tables.conditional(table, ORDER) for table in toy.pair())
  fields = {'num_draft': NUM_DRAFT, 'num_tokens': NUM_TOKENS, 'order': ORDER}
  expected = toy.target_law()
  for slight in mutants.SLIGHT_MUTANTS:
    with slight.mutant.applied(toy.clean()) as faulty:
      result = _verdict(slight.mutant, toy.decode(faulty, key_B))
    with jax.enable_x64(True):
      law = slight.loop_law(p, q, vocab_size=VOCAB_SIZE, **fields)
    difference = enumerate_law.max_difference(law, expected)
    if not result.killed_by:
      why = (
        f'a sample shows it from {slight.num_samples:.0e} on;'
        f' the enumerated law is off by {difference:.0e}'
      )
      killed_by = 'enumeration' if difference > TOLERANCE else ''
      result = result._replace(killed_by=killed_by, why=why)
    yield result


class Report(NamedTuple):
  """Everything that a run found."""

  enumerations: list[Enumeration]
  main: list[Sample]
  sweep: list[Sample]
  control: MutantResult
  mutants: list[MutantResult]
  seconds: float

  @property
  def samples(self) -> list[Sample]:
    return [*self.main, *self.sweep]

  @property
  def survivors(self) -> list[MutantResult]:
    return [mutant for mutant in self.mutants if not mutant.killed_by]

  @property
  def passed(self) -> bool:
    right = [part.passed for part in self.enumerations]
    right += [sample.passed for sample in self.samples]
    return all(right) and not self.control.killed_by and not self.survivors


def num_outputs(num_samples: int, sweep_rows: int, mutant_rows: int) -> int:
  """How many outputs `run` draws; arguments are those of that."""
  num_mutants = len(mutants.MUTANTS) + len(mutants.SLOW_MUTANTS) + 1
  num_mutants += len(mutants.SLIGHT_MUTANTS)
  num_configurations = len(GAMMAS) * 2 * len(FILTERS) * len(RULES)
  main = sum(map(len, _chunks(num_samples))) * len(RULES)
  return main + num_configurations * sweep_rows + num_mutants * mutant_rows


def run(
  num_samples: int,
  sweep_rows: int,
  mutant_rows: int,
  seed: int,
  say: Callable[[str], None] = lambda text: None,
  drawn: Callable[[int], None] = lambda rows: None,
) -> Report:
  """Runs everything.

  Args:
    num_samples: outputs of the main test, for each rule.
    sweep_rows: outputs for each of the other configurations.
    mutant_rows: outputs for each mutant.
    seed: of all samples.
    say: is told what comes next.
    drawn: is told of outputs drawn, `num_outputs` in all.
  """

  def heard(results: Iterable[Any], rows: int) -> list[Any]:
    found = []
    for result in results:
      found.append(result)
      drawn(rows)
    return found

  begin = time.perf_counter()
  say('enumerating laws, in rationals and in float64')
  enumerated = list(enumerations())
  say(f'sampling the compiled loop, {num_samples} outputs for each rule')
  main = [main_sample(rule, num_samples, seed, drawn) for rule in RULES]
  say(f'sampling 24 configurations, {sweep_rows} outputs each')
  swept = heard(sweep(sweep_rows, seed), sweep_rows)
  say(f'running mutants, {mutant_rows} outputs each')
  *found, control = heard(sampled_mutants(mutant_rows, seed), mutant_rows)
  found += heard(slight_mutants(mutant_rows, seed), mutant_rows)
  return Report(enumerated, main, swept, control, found, time.perf_counter() - begin)
