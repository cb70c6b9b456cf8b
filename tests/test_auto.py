"""Gamma 'auto' as a pair runs it: what it keeps between batches and calls."""

import itertools

import pytest

from specjax.auto import AutoDecoder
from specjax.config import SamplingConfig, SpeculationConfig
from specjax.generation import make_batches
from specjax.load import load_pair
from specjax.testing import tiny_pair

TEXTS = ['hello hello hello', 'ab ab', 'a text', 'ab', 'b', 'a longer text']
GREEDY = SamplingConfig(max_new_tokens=16)
SAMPLED = SamplingConfig(max_new_tokens=16, temperature=1.0, seed=3)
AUTO = SpeculationConfig('ngram', 'auto', max_speculative_tokens=4)
FREE = {1: 1.0, 2: 1.0, 4: 1.0}
DEAR = {1: 9.0, 2: 10.0, 4: 12.0}


class PricedDecoder(AutoDecoder):
  """Rounds cost what `prices` says."""

  prices: dict[int, float]

  def _measure(self, batch, gammas):
    return [(gamma, self.prices[gamma]) for gamma in gammas]


@pytest.fixture(scope='module')
def loaded(tmp_path_factory):
  return load_pair(tiny_pair.write_tiny_pair(tmp_path_factory.mktemp('pair')))


@pytest.fixture
def pair(loaded):
  """With nothing measured or seen; its programs are kept."""
  for known in loaded.memory:
    known.clear()
  return loaded


def run(pair, rows, prices):
  """(ids, choices) of a call with a batch for each text."""
  gammas = []
  decoder = PricedDecoder(
    pair, AUTO, max_new_tokens=16, on_choice=lambda choice: gammas.append(choice.gamma)
  )
  decoder.prices = prices
  batches = make_batches(
    pair.encode(TEXTS),
    rows,
    [4] * len(TEXTS),
    batch_size=1,
    buckets=pair.source_buckets,
  )
  results = [result for batch in batches for result in decoder.read(batch)]
  return [each.ids for each in sorted(results, key=lambda each: each.index)], gammas


@pytest.mark.parametrize(('prices', 'last'), [(FREE, 4), (DEAR, 0)])
def test_the_next_call_goes_on_where_greedy_decoding_ended(pair, prices, last):
  rows = [GREEDY] * len(TEXTS)
  plain = [each.ids for each in pair.generate(TEXTS, sampling=GREEDY, method='none')]
  ids, gammas = run(pair, rows, prices)
  assert gammas[0] > 0  # drafts are looked at first, whatever they cost
  assert gammas[-1] == last
  again, next_gammas = run(pair, rows, prices)
  assert next_gammas[0] == last
  assert ids == again == plain


def test_sampled_texts_are_forgotten(pair):
  rows = [SAMPLED] * len(TEXTS)
  ids, gammas = run(pair, rows, DEAR)
  assert (gammas[0], gammas[-1]) == (4, 0)
  assert not pair.memory.seen
  assert run(pair, rows, DEAR) == (ids, gammas)  # from the same start


def test_what_a_call_saw_is_kept_up_to_its_first_sampled_text(pair):
  run(pair, [GREEDY, *[SAMPLED] * (len(TEXTS) - 1)], DEAR)
  (kept,) = pair.memory.seen.values()
  pair.memory.seen.clear()
  run(pair, [GREEDY] * len(TEXTS), DEAR)
  (seen,) = pair.memory.seen.values()
  assert 0 < kept.num_judged < seen.num_judged


def test_costs_are_times_of_rounds_over_plain_ones_measured_once(pair):
  ticks = itertools.count()
  (batch, *_) = make_batches(
    pair.encode(TEXTS[:1]),
    [GREEDY],
    [4],
    batch_size=1,
    buckets=pair.source_buckets,
  )
  read_after = []
  for _ in range(2):
    decoder = AutoDecoder(pair, AUTO, max_new_tokens=16, clock=lambda: next(ticks))
    decoder.read(batch)
    (costs,) = pair.memory.costs.values()
    assert costs.measured == ((0, 1.0), (2, 1.0), (4, 1.0))  # every time is one tick
    read_after.append(next(ticks))
  first, second = read_after
  assert second == first + 1  # the clock was not read again
