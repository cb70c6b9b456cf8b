"""Relative-position buckets against exact integer arithmetic; the bias's windows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.t5 import layers


def exact_bucket(distance, num_buckets, max_distance):
  """The logarithmic buckets by integer powers: no rounding at an edge."""
  exact = num_buckets // 2
  if distance < exact:
    return max(distance, 0)
  # k / n <= log(distance / exact) / log(max_distance / exact), n = exact buckets.
  bucket = exact
  while bucket < num_buckets - 1:
    k = bucket + 1 - exact
    if distance**exact * exact**k < max_distance**k * exact**exact:
      return bucket
    bucket += 1
  return bucket


@pytest.mark.parametrize(
  ('num_buckets', 'max_distance'), [(32, 128), (32, 64), (16, 128), (64, 256)]
)
def test_causal_buckets_are_exact(num_buckets, max_distance):
  distances = np.arange(-5, 3000)
  actual = layers.relative_position_bucket(
    distances,
    bidirectional=False,
    num_buckets=num_buckets,
    max_distance=max_distance,
  )
  expected = [exact_bucket(int(d), num_buckets, max_distance) for d in distances]
  np.testing.assert_array_equal(actual, expected)
  assert actual.dtype == np.int32


def test_bidirectional_buckets_are_exact():
  distances = np.arange(-600, 600)
  actual = layers.relative_position_bucket(
    distances, bidirectional=True, num_buckets=32, max_distance=128
  )
  expected = [
    (16 if d < 0 else 0) + exact_bucket(abs(int(d)), 16, 128) for d in distances
  ]
  np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize(
  ('starts', 'num_queries'), [((7,), 3), ((0,), 40), ((0, 9, 4), 3)]
)
def test_bias_is_that_of_absolute_slots(causal, starts, num_queries):
  """Entry (t, s) is the embedding of the bucket of start + t - s."""
  num_keys = 40
  module = layers.RelativeBias(2, 8, 16, causal)
  start_B = jnp.asarray(starts, jnp.int32)
  params = module.init(jax.random.key(0), start_B, num_queries, num_keys)
  bias_BHTS = np.asarray(module.apply(params, start_B, num_queries, num_keys))
  table_HR = np.asarray(params['params']['rel_embedding'])
  assert bias_BHTS.shape == (len(starts), 2, num_queries, num_keys)
  for row, start in enumerate(starts):
    distance_TS = start + np.arange(num_queries)[:, None] - np.arange(num_keys)[None]
    bucket_TS = layers.relative_position_bucket(
      distance_TS, bidirectional=not causal, num_buckets=8, max_distance=16
    )
    expected_HTS = table_HR[:, bucket_TS]
    if causal:
      expected_HTS = np.where(distance_TS < 0, np.float32(layers.MASKED), expected_HTS)
    np.testing.assert_array_equal(bias_BHTS[row], expected_HTS)
