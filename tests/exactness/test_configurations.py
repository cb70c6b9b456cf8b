"""Chi-square, G and e-value of the compiled loop in 24 configurations.

Two temperatures, no filter, top-k and top-p, gamma 1 and 4, both rules; the joint
law of gamma + 2 tokens or more, 200,000 outputs each, level 1e-6 per test: the chance
that any of them fails on a right loop is below 1e-4.
"""

import functools

import numpy as np
import pytest

from specjax.testing import suite, toy

pytestmark = pytest.mark.usefixtures('optimised')  # what users run is sampled

NUM_ROWS = 200_000


@functools.cache
def samples(temperature):
  found = suite.sweep(NUM_ROWS, seed=1, temperatures=[temperature])
  return {sample.name: sample for sample in found}


TEMPERATURES = [
  pytest.param(value, marks=[] if value == 1.0 else pytest.mark.slow)
  for value in suite.TEMPERATURES
]


@pytest.mark.parametrize('temperature', TEMPERATURES)
def test_there_are_12_at_each_temperature(temperature):
  assert len(samples(temperature)) == 12
  assert {each.num_samples for each in samples(temperature).values()} == {NUM_ROWS}


@pytest.mark.parametrize('rule', suite.RULES)
@pytest.mark.parametrize('num_draft', [1, 4])
@pytest.mark.parametrize('temperature', TEMPERATURES)
@pytest.mark.parametrize('filter_name', suite.FILTERS)
def test_joint_law(filter_name, temperature, num_draft, rule):
  name = f'{rule}, gamma {num_draft}, T {temperature}, {filter_name}'
  sample = samples(temperature)[name]
  assert sample.p_value > suite.LEVEL
  assert sample.g_p_value > suite.LEVEL
  assert sample.log_e < -np.log(suite.LEVEL)
  assert sample.tv_bound < 0.08
  assert sample.passed


def test_another_configuration_s_law_is_rejected():
  """The samples differ from each other as far as the tests can see."""
  plain = samples(1.0)['token, gamma 1, T 1.0, none']
  cooler = toy.target_law(4, temperature=0.7)
  law_K = np.append(list(cooler.values()), 0.0)
  assert not suite.judge('cooler', plain.counts_K, law_K).passed
