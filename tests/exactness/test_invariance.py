"""A row's output depends on its source, its key and its options, on nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import loop, rng, types, verify, warp
from specjax.drafters import model_draft
from specjax.models.table import table_model
from specjax.testing import tables
from specjax.testing.loops import python_while_loop

VOCAB_SIZE = 4
EOS = 3
MAX_LEN = 10
NUM_ROWS = 16
WARP = warp.make_warp(eos_id=EOS)
MODEL = table_model(VOCAB_SIZE, 2)
DRAFTER = model_draft(MODEL, WARP, 3)
PARAMS = types.Params(
  *(
    jnp.asarray(np.stack(kinds))
    for kinds in zip(
      *(tables.random_pair(seed, VOCAB_SIZE, 2) for seed in (0, 1, 2)), strict=True
    )
  )
)
STATIC = {
  'target': MODEL,
  'drafter': DRAFTER,
  'verifier': verify.block_verifier,
  'warp': WARP,
  'max_len': MAX_LEN,
  'eos_id': EOS,
}


def arguments(rows, seed=0):
  """Sources, keys and options of the rows with these example ids."""
  rows = np.asarray(rows)
  sampling = warp.make_sampling(
    len(rows),
    temperature=np.where(rows % 3 == 0, 0.0, 0.5 + rows / 8),
    top_k=rows % 4,
    top_p=np.where(rows % 5 == 0, 0.8, 1.0),
    max_new_tokens=3 + rows % 7,
    min_new_tokens=rows % 3,
    num_draft=1 + rows % 3,
  )
  source_B1 = jnp.asarray(rows % 3, jnp.int32)[:, None]
  return PARAMS, source_B1, rng.row_keys(seed, jnp.asarray(rows)), sampling


def decode(rows, seed=0):
  return loop.decode(*arguments(rows, seed), **STATIC)


def assert_same_rows(state, rows, expected):
  """Rows of the state equal those of the whole batch, traces included."""
  rows = np.asarray(rows)
  np.testing.assert_array_equal(state.tokens_BS, expected.tokens_BS[rows])
  np.testing.assert_array_equal(state.length_B, expected.length_B[rows])
  for ours, theirs in zip(state.trace[:-1], expected.trace[:-1], strict=True):
    np.testing.assert_array_equal(ours, theirs[rows])
  np.testing.assert_allclose(
    state.trace.logp_BS, expected.trace.logp_BS[rows], atol=1e-6
  )


@pytest.fixture(scope='module')
def whole():
  return decode(range(NUM_ROWS))


@pytest.mark.parametrize('rows', [[5], [11, 3, 8, 1, 6]])
def test_a_row_does_not_depend_on_the_batch(rows, whole):
  assert_same_rows(decode(rows), rows, whole)


def test_a_row_does_not_depend_on_its_place(whole):
  rows = np.random.default_rng(0).permutation(NUM_ROWS)
  assert_same_rows(decode(rows), rows, whole)


@pytest.mark.parametrize('num_devices', [2, 4, 8])
def test_a_row_does_not_depend_on_the_number_of_devices(num_devices, whole):
  """Rows spread over devices: the draws are partitionable, the reductions local."""
  devices = np.array(jax.devices()[:num_devices])
  assert len(devices) == num_devices
  mesh = jax.sharding.Mesh(devices, ('data',))
  spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  params, *by_row = arguments(range(NUM_ROWS))
  state = loop.decode(
    jax.device_put(params, everywhere), *jax.device_put(by_row, spread), **STATIC
  )
  assert len(state.tokens_BS.sharding.device_set) == num_devices
  assert_same_rows(state, range(NUM_ROWS), whole)


@pytest.mark.slow
def test_the_loop_without_jit_gives_the_same(whole):
  rows = [8]  # no filters, whose bisection is slow step by step
  with jax.disable_jit():
    state = loop.decode(*arguments(rows), while_loop=python_while_loop, **STATIC)
  assert_same_rows(state, rows, whole)


def test_the_same_seed_gives_the_same(whole):
  assert_same_rows(decode(range(NUM_ROWS)), range(NUM_ROWS), whole)


def test_seeds_matter_exactly_where_sampling_does():
  by_seed = [np.asarray(decode(range(NUM_ROWS), seed).tokens_BS) for seed in range(50)]
  distinct_B = np.array(
    [
      len(np.unique([tokens_BS[row] for tokens_BS in by_seed], axis=0))
      for row in range(NUM_ROWS)
    ]
  )
  greedy_B = np.arange(NUM_ROWS) % 3 == 0
  # top_k = 1 is greedy too.
  greedy_B |= np.arange(NUM_ROWS) % 4 == 1
  assert (distinct_B[greedy_B] == 1).all()
  assert (distinct_B[~greedy_B] >= 2).all()


def test_equal_sources_are_sampled_independently():
  source_B1 = jnp.zeros((NUM_ROWS, 1), jnp.int32)
  sampling = warp.make_sampling(NUM_ROWS, temperature=1.0)
  key_B = rng.row_keys(0, jnp.arange(NUM_ROWS))
  state = loop.decode(PARAMS, source_B1, key_B, sampling, **STATIC)
  assert len(np.unique(state.tokens_BS, axis=0)) > NUM_ROWS // 2
