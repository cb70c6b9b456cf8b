"""Arithmetic of the experiments, on clocks and costs that are known."""

import importlib
import types

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.warp import make_sampling
from specjax.generation import Batch


def module(name):
  return importlib.import_module(f'experiments.{name}')


class Machine:
  """A pair whose rounds take a known time: 7 s to start, 2 s a round of 3 tokens."""

  def __init__(self):
    self.now = 0.0

  def clock(self):
    return self.now

  def decode(self, params, batch, static):
    del params, static
    num_rounds = -(-int(batch.sampling.max_new_tokens_B[0]) // 3)
    assert (batch.sampling.min_new_tokens_B == batch.sampling.max_new_tokens_B).all()
    self.now += 7.0 + 2.0 * num_rounds
    return types.SimpleNamespace(step=num_rounds)


def test_rounds_and_starts_are_told_apart(monkeypatch):
  rounds, common = module('rounds'), module('common')
  machine = Machine()
  monkeypatch.setitem(rounds.CLOCKS, 'wall', machine.clock)
  monkeypatch.setattr(rounds, 'interleave', _interleave)
  batch = Batch((0,), jnp.ones((1, 4), jnp.int32), None, make_sampling(1))
  run = common.Run(lambda: [], [batch], None, {})
  costs, times = rounds.measure(
    machine, {'draft': run}, 2, budgets=(6, 30), others={'draft': lambda: None}
  )
  assert costs['draft'].start.values == (7.0, 7.0)
  assert costs['draft'].round.values == (2.0, 2.0)
  assert costs['draft'].predict(2, 10).values == (34.0, 34.0)
  assert times['draft'].values == (0.0, 0.0)


def _interleave(runs, repeats, clock):
  values = {name: [] for name in runs}
  for _ in range(repeats):
    for name, run in runs.items():
      before = clock()
      run()
      values[name].append(clock() - before)
  samples = module('rounds').Samples
  return {name: samples(tuple(each)) for name, each in values.items()}, {}


def cost(start, *round_):
  rounds = module('rounds')
  starts = rounds.Samples((start,) * len(round_))
  return rounds.Cost(starts, rounds.Samples(round_))


def test_c_and_v_are_ratios_within_a_turn():
  rounds = module('rounds')
  plain, verify = cost(0.0, 1.0, 2.0), cost(0.0, 1.5, 3.0)
  draft = cost(0.0, 2.3, 4.6)
  assert rounds.v_of(plain, verify) == 1.5
  assert rounds.c_of(plain, verify, draft, 4) == pytest.approx(0.2)
  assert rounds.c_of(plain, verify, verify, 4) == 0


def test_predictions_are_per_token():
  rounds = module('rounds')
  output = types.SimpleNamespace(ids=range(10))
  plain_work = rounds.Work([output], 1, 10, 1.0)
  work = rounds.Work([output, output], 2, 8, 1.0)
  # Plain: 5 + 10 s for 10 tokens; ours: 12 + 16 s for 20.
  predicted = rounds.predict(cost(5.0, 1.0), cost(6.0, 2.0), plain_work, work)
  assert predicted.values == (pytest.approx(15 / 10 / (28 / 20)),)
  times = rounds.Samples((3.0,)), rounds.Samples((4.0,))
  assert rounds.speedup(*times, plain_work, work).values == (1.5,)


def test_rows_that_are_done_wait(monkeypatch):
  rounds, common = module('rounds'), module('common')
  calls = {0: 6, 1: 2, 2: 3}
  rows = {
    index: types.SimpleNamespace(index=index, ids=range(9), num_target_calls=number)
    for index, number in calls.items()
  }
  monkeypatch.setattr(
    rounds.generation,
    'read_rows',
    lambda state, indices, vocabulary: [rows[index] for index in indices],
  )
  # The second batch has one text and a row of padding.
  batches = [
    types.SimpleNamespace(indices=indices, inputs_BE=np.zeros((2, 4)))
    for indices in ((1, 0), (2,))
  ]
  states = [types.SimpleNamespace(step=6), types.SimpleNamespace(step=3)]
  run = common.Run(lambda: states, batches, None, {})
  work = rounds.work_of(types.SimpleNamespace(vocabulary=None), run)
  assert [each.index for each in work.outputs] == [0, 1, 2]
  assert (work.num_batches, work.num_rounds, work.num_tokens) == (2, 9, 27)
  assert work.live == 11 / 18


@pytest.mark.parametrize(
  ('a', 'b'), [(3.0, 0.5), (0.0, 2.0), (4.0, 0.0)], ids=['both', 'b', 'a']
)
def test_lines_are_found(a, b):
  sizes = [1, 2, 8, 64]
  fit = module('concurrency.__main__').fit_line
  assert fit(sizes, [a + b * size for size in sizes]) == pytest.approx((a, b))


def test_lines_have_no_negative_part():
  a, b = module('concurrency.__main__').fit_line([1, 2, 4], [1.0, 2.1, 4.5])
  assert a == 0
  assert b == pytest.approx(1.07, abs=0.03)


def test_speculation_stops_paying_where_the_lines_say():
  """a = 9, b = 1, G = 4: v(B) = (9 + 5 B) / (9 + B); no draft costs anything.

  3 tokens a call pay while v < 3, that is while B < 9.
  """
  sizes = (1, 4, 16)
  fields = {'method': 'ngram', 'gamma': 4, 'c': 0.0, 'v': 2.0, 'live': 1.0}
  fields |= {'predicted': 1.0, 'measured': 1.0}
  records = [{**fields, 'batch_size': n, 'plain_ms': 9.0 + n} for n in sizes]
  last = module('concurrency.__main__').model(records, {'ngram': 3.0})
  assert last == {'ngram': 8}
  assert [each['v_model'] for each in records] == [1.4, 2.23, 3.56]
  assert [each['S_model'] for each in records] == [2.14, 1.34, 0.84]
  assert {each['S'] for each in records} == {1.5}


def test_mixed_texts_take_turns():
  workloads_of = module('workloads.__main__').workloads_of
  sources = {'one': [[1], [2], [3]], 'two': [[4]]}
  subject = module('common').Subject(None, None, sources)
  assert workloads_of(subject)['mixed'] == [[1], [4], [2], [3]]
  alone = subject._replace(sources={'one': [[1]]})
  assert list(workloads_of(alone)) == ['one']


def test_residuals_are_split_into_what_tasks_share_and_the_rest():
  split = importlib.import_module('experiments.table2_4.__main__').split
  records = [{'residual': 0.8 * rest - 1} for rest in (1.25, 0.8)]
  split(records)
  assert [each['shared'] for each in records] == [-0.2, -0.2]
  assert [each['rest'] for each in records] == [0.25, -0.2]
