"""Streams: independent of packing, of each other, and unbiased at the edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import rng


def _data(keys):
  return np.asarray(jax.random.key_data(keys))


def test_row_keys_depend_on_seed_and_example_alone():
  keys = rng.row_keys(7, jnp.array([3, 5, 9]))
  alone = rng.row_keys(jnp.array([7]), jnp.array([5]))
  np.testing.assert_array_equal(_data(keys)[1], _data(alone)[0])
  other_seed = rng.row_keys(jnp.array([7, 8, 7]), jnp.array([3, 5, 9]))
  same = (_data(keys) == _data(other_seed)).all(axis=1)
  assert same.tolist() == [True, False, True]


def test_seed_zero_is_a_real_seed():
  assert (
    _data(rng.row_keys(0, jnp.arange(4))) != _data(rng.row_keys(1, jnp.arange(4)))
  ).any()


def test_streams_of_a_block_and_of_two_blocks_differ():
  keys = rng.row_keys(0, jnp.arange(2))
  first = rng.block_keys(keys, jnp.array([4, 4]))
  second = rng.block_keys(keys, jnp.array([5, 4]))
  streams = np.concatenate([_data(x) for x in first])
  assert len(np.unique(streams, axis=0)) == 6
  for a, b in zip(first, second, strict=True):
    same = (_data(a) == _data(b)).all(axis=1)
    assert same.tolist() == [False, True]


@pytest.mark.parametrize(
  ('keys', 'message'),
  [
    (np.zeros((2, 2), np.uint32), 'typed keys are needed'),
    (
      jax.random.split(jax.random.key(0, impl='rbg'), 2),
      'threefry2x32 keys are needed',
    ),
  ],
)
def test_other_keys_are_refused(keys, message):
  with pytest.raises(TypeError, match=message):
    rng.check_keys(keys)


def test_categorical_law_and_point_masses():
  num_rows = 1 << 16
  keys = rng.row_keys(0, jnp.arange(num_rows))
  law = np.array([0.5, 0.0, 0.3, 0.2])
  logp = jnp.tile(jnp.log(jnp.asarray(law, jnp.float32))[None], (num_rows, 1))
  count = np.bincount(np.asarray(rng.categorical(keys, logp + 3.0)), minlength=4)
  assert count[1] == 0
  expected = law[law > 0] * num_rows
  chi2 = ((count[law > 0] - expected) ** 2 / expected).sum()
  assert chi2 < 30  # 2 degrees of freedom: p < 1e-6 beyond 27.6
  point = jnp.where(jnp.arange(4)[None] == jnp.arange(8)[:, None] % 4, 0.0, -jnp.inf)
  token = rng.categorical(keys[:8], point)
  assert token.tolist() == [0, 1, 2, 3] * 2


def test_shortcut_agrees_with_the_draw():
  """One soft row turns the shortcut off and must not change the other rows."""
  keys = rng.row_keys(1, jnp.arange(3))
  point = jnp.full((3, 5), -jnp.inf).at[jnp.arange(3), jnp.array([4, 0, 2])].set(0.0)
  soft = point.at[1].set(jnp.log(jnp.full(5, 0.2)))
  assert rng.categorical(keys, point)[jnp.array([0, 2])].tolist() == [4, 2]
  assert rng.categorical(keys, soft)[jnp.array([0, 2])].tolist() == [4, 2]


def test_draws_are_those_of_jax():
  keys = rng.row_keys(2, jnp.arange(64))
  logp = jnp.asarray(np.random.default_rng(0).normal(size=(64, 9)), jnp.float32)
  want = jax.vmap(lambda key, x: jax.random.categorical(key, x, mode='high'))(
    keys, logp
  )
  np.testing.assert_array_equal(rng.categorical(keys, logp), want)


def test_argmax_breaks_ties_by_the_lowest_id():
  x = jnp.array([[1.0, 3.0, 3.0], [-jnp.inf, -jnp.inf, 0.0], [2.0, 2.0, 2.0]])
  assert rng.argmax(x).tolist() == [1, 2, 0]
  assert rng.argmax(x).dtype == jnp.int32
