"""Chi-square, G and e-value of the compiled loop in 24 configurations.

Two temperatures, no filter, top-k and top-p, gamma 1 and 4, both rules; the joint
law of gamma + 2 tokens or more, 2^18 outputs each, level 1e-6 per test: the chance
that any of them fails on a right loop is below 1e-4.
"""

import numpy as np
import pytest

from specjax.testing import suite, toy

NUM_ROWS = 2**18


@pytest.fixture(scope='module')
def samples():
  return {sample.name: sample for sample in suite.sweep(NUM_ROWS, seed=1)}


def test_there_are_24(samples):
  assert len(samples) == 24
  assert {sample.num_samples for sample in samples.values()} == {NUM_ROWS}


@pytest.mark.parametrize('rule', suite.RULES)
@pytest.mark.parametrize('num_draft', [1, 4])
@pytest.mark.parametrize('temperature', [0.7, 1.0])
@pytest.mark.parametrize('filter_name', suite.FILTERS)
def test_joint_law(samples, filter_name, temperature, num_draft, rule):
  sample = samples[f'{rule}, gamma {num_draft}, T {temperature}, {filter_name}']
  assert sample.p_value > suite.LEVEL
  assert sample.g_p_value > suite.LEVEL
  assert sample.log_e < -np.log(suite.LEVEL)
  assert sample.tv_bound < 0.08
  assert sample.passed


def test_another_configuration_s_law_is_rejected(samples):
  """The samples differ from each other as far as the tests can see."""
  plain = samples['token, gamma 1, T 1.0, none']
  cooler = toy.target_law(4, temperature=0.7)
  law_K = np.append(list(cooler.values()), 0.0)
  assert not suite.judge('cooler', plain.counts_K, law_K).passed
