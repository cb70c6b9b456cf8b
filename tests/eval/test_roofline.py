"""Bounds by hand, and the paper's speedups from them."""

import pytest

from specjax.eval import roofline, theory
from specjax.parallel.hlo_facts import Collective
from specjax.parallel.topology import V4, V5E


def test_the_slower_of_compute_and_memory():
  memory = roofline.bound(roofline.Work(1e9, 1.2e9), V4)
  assert (memory.limit, memory.seconds) == ('memory', pytest.approx(1e-3))
  compute = roofline.bound(roofline.Work(275e9, 1.0), V4)
  assert (compute.limit, compute.seconds) == ('compute', pytest.approx(1e-3))


def test_collectives_add_to_it():
  once = Collective('all-reduce', 9_000_000, 2, 3, '')
  # Two passes of half the bytes over a link each way, and a hop each.
  each = 2e-6 + 9e6 / 9e10
  assert roofline.collective_seconds(once, V4) == pytest.approx(each)
  found = roofline.bound(roofline.Work(0.0, 1.2e9, (once,)), V4)
  assert found.seconds == pytest.approx(1e-3 + 3 * each)
  gather = once._replace(kind='all-gather')
  assert roofline.collective_seconds(gather, V4) == pytest.approx(each / 2)
  sent = once._replace(kind='collective-permute')
  assert roofline.collective_seconds(sent, V4) == pytest.approx(1e-6 + 9e6 / 4.5e10)
  assert roofline.collective_seconds(once._replace(group=1), V5E) == 0.0


def test_predictions_are_the_papers():
  rows = roofline.predict(0.75, 0.010, 0.0002, {5: 0.010, 7: 0.010, 9: 0.020})
  for row in rows:
    v = 2.0 if row.gamma == 9 else 1.0
    assert row.speedup == pytest.approx(theory.speedup(0.75, row.gamma, 0.02, v))
    assert row.ms_per_token == pytest.approx(10 / row.speedup)
  assert round(rows[1].speedup, 1) == 3.2  # Table 4: English to German, T5-small
  assert roofline.best(rows).gamma == 7


def test_ties_go_to_the_smaller_gamma():
  rows = roofline.predict(0.0, 1.0, 0.0, {3: 1.0, 2: 1.0})
  assert roofline.best(rows).gamma == 2


@pytest.mark.parametrize('plain', [0.0, -1.0])
def test_no_time(plain):
  with pytest.raises(ValueError, match='plain: '):
    roofline.predict(0.5, plain, 0.1, {1: 1.0})
