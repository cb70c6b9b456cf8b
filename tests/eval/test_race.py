"""Systems in turns: tokens compared, ties told from faults, ratios within turns."""

import dataclasses

import flax.traverse_util
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints import leaves
from specjax.core.types import Params
from specjax.eval import cases, race, systems
from specjax.eval.interleave import Samples
from specjax.eval.systems import Absent, System
from specjax.models.t5 import T5Config
from specjax.testing.tiny_pair import blank_t5


def fake_case(max_new_tokens=4, eos_id=1, num_batches=1):
  """Of a target that is not asked as long as all tokens are equal."""
  weights = blank_t5(8)
  weights = leaves.Weights(weights.config, {}, {})
  batches = (np.ones((2, 3), np.int32),) * num_batches
  return cases.Case(
    weights, None, Params({}), batches, max_new_tokens, 4, eos_id, ('Made.',)
  )


def fake(tokens, calls=None):
  """Decodes any sources to these tokens."""
  count = None if calls is None else lambda _: calls
  return lambda case: System(lambda inputs: (), lambda _: np.array(tokens), count)


def random_case(max_new_tokens=4):
  config = T5Config(
    vocab_size=32,
    emb_dim=16,
    num_heads=1,
    head_dim=8,
    mlp_dim=16,
    num_encoder_layers=1,
    num_decoder_layers=1,
  )
  weights = cases.random_weights(config, 0)
  params = Params(leaves.restore(weights))
  batches = (np.array([[5, 6, 1], [7, 8, 9]], np.int32),)
  return cases.Case(weights, None, params, batches, max_new_tokens, 2, -1, ())


def test_the_first_difference_of_each_row():
  expected = np.array([[5, 6, 7, 8], [2, 3, 5, 4], [2, 2, 2, 2]])
  found = np.array([[5, 6, 7, 8], [2, 3, 9, 9], [3, 2, 2, 3]])
  assert race.find_differences(expected, expected) == ()
  second, third = race.find_differences(expected, found)
  assert second[:4] == (1, 2, 5, 9)
  assert third[:4] == (2, 0, 2, 3)


def test_a_tie_is_told_from_a_fault():
  case = random_case()
  plain_NL = systems.ours(case)
  plain_NL = plain_NL.tokens(plain_NL.decode(case.batches[0]))
  expected = int(plain_NL[1, 2])
  other = (expected + 1) % 32
  found_NL = plain_NL.copy()
  found_NL[1, 2] = other
  differences = race.find_differences(plain_NL, found_NL)

  (fault,) = race.explained(case, plain_NL, differences)
  assert fault[:4] == (1, 2, expected, other)
  assert fault.gap > 0.01
  assert not fault.is_tie
  assert 'NOT a tie' in str(fault)

  # With (nearly) the same column in the head, the two ids have the same logits.
  head = case.params.target['decoder']['logits_dense']
  kernel = head['kernel']
  for noise, is_tie in ((1e-7, True), (1e-2, False)):
    column = kernel[:, expected] * (1 + noise)
    twins = {**head, 'kernel': kernel.at[:, other].set(column)}
    decoder = {**case.params.target['decoder'], 'logits_dense': twins}
    params = Params({**case.params.target, 'decoder': decoder})
    (tie,) = race.explained(case._replace(params=params), plain_NL, differences)
    assert tie.is_tie == is_tie, tie
  # What bfloat16 can not tell apart.
  (coarse,) = race.explained(
    _in_bfloat16(case)._replace(params=params), plain_NL, differences
  )
  assert coarse.is_tie
  assert coarse.gap == pytest.approx(tie.gap, rel=0.1)


def _in_bfloat16(case):
  config = dataclasses.replace(case.target.config, dtype='bfloat16')
  return case._replace(target=case.target._replace(config=config))


def test_a_shorter_output_is_different(monkeypatch):
  monkeypatch.setattr(race, 'explained', lambda case, expected, found: found)
  makers = {'a': fake([[5, 6, 7], [2, 3, 5]]), 'b': fake([[5, 6], [2, 3]])}
  first, second = race.race(fake_case(3), makers, turns=1).rows
  assert first.differences == ()
  assert [each[:4] for each in second.differences] == [(0, 2, 7, 0), (1, 2, 5, 0)]
  assert second.is_fault


def test_what_follows_eos_counts_for_nothing(monkeypatch):
  monkeypatch.setattr(race, 'explained', lambda case, expected, found: found)
  makers = {
    'a': fake([[5, 1, 0, 0], [2, 3, 5, 4]]),
    'b': fake([[5, 1, 9, 1], [2, 3, 5, 4]]),
  }
  result = race.race(fake_case(), makers, turns=1)
  assert [row.differences for row in result.rows] == [(), ()]
  assert [row.num_tokens for row in result.rows] == [6, 6]
  endless = race.race(fake_case(eos_id=-1), makers, turns=1)
  assert [each[:4] for each in endless.rows[1].differences] == [(0, 2, 0, 9)]
  assert [row.num_tokens for row in endless.rows] == [8, 8]


def test_batches_one_after_the_other():
  seen, runs = [], []

  def maker(case):
    def decode(inputs):
      seen.append(inputs)
      return len(seen)

    return System(decode, lambda _: np.full((2, 4), 7), lambda _: 3)

  case = fake_case(num_batches=3)
  result = race.race(case, {'a': maker}, 2, lambda *each: runs.append(each))
  assert runs == [('a', 3)] * 3
  assert len(seen) == 9
  (row,) = result.rows
  assert row.num_tokens == 24
  assert row.tokens_per_call == 24 / 9
  assert len(row.seconds.values) == 2


def test_no_system_is_an_error():
  with pytest.raises(ValueError, match=r'none can run \(x: needs y\)'):
    race.race(fake_case(), {'x': lambda case: Absent('needs y')}, turns=1)


def row(name, seconds, calls=None, num_tokens=100):
  return race.Row(name, Samples(seconds), 1.0, num_tokens, calls)


def test_comparisons_are_within_turns():
  rows = (
    row(systems.PLAIN, (2.0, 4.0, 2.0), 1.0),
    row('draft_model token', (1.0, 1.0, 1.0), 4.0),
    row(systems.T5X, (1.0, 2.0, 1.0)),
    row(systems.HF_ASSISTED, (3.0, 3.0, 3.0), 2.0),
  )
  slower, faster = race.Result(rows, {}).comparisons()
  assert slower == race.Comparison(
    systems.PLAIN, systems.T5X, Samples((0.5, 0.5, 0.5)), None
  )
  # 3 times as fast, of which a factor of 2 are better drafts.
  assert faster.speedup.median == 3
  assert faster.per_call == 1.5


def test_speeds_are_of_tokens():
  ours, theirs = row('a', (1.0,), num_tokens=60), row('b', (1.0,), num_tokens=30)
  assert race.speedup(ours, theirs).values == (2.0,)


def test_gaps_are_of_this_source():
  """Without its encoder the target's logits, and the gap between two, are others."""
  case = random_case()
  tokens_NL = np.full((2, 4), 3)
  other_NL = tokens_NL.copy()
  other_NL[0, 3] = 4
  differences = race.find_differences(tokens_NL, other_NL)
  (whole,) = race.explained(case, tokens_NL, differences)
  flat = flax.traverse_util.flatten_dict(case.params.target, sep='/')
  flat = {
    name: jnp.zeros_like(leaf) if name.startswith('encoder') else leaf
    for name, leaf in flat.items()
  }
  params = Params(flax.traverse_util.unflatten_dict(flat, sep='/'))
  (blank,) = race.explained(case._replace(params=params), tokens_NL, differences)
  assert blank.gap != pytest.approx(whole.gap, rel=1e-3)
