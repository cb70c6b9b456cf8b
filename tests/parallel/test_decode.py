"""The same seed gives the same tokens on every mesh.

Sums that a mesh splits differ in their last bits, so tokens are compared exactly and
log-probabilities to 1e-5. The fixtures are random networks, whose coins and nearest
rivals lie far further apart than that.
"""

import dataclasses
import functools
import re

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import SamplingConfig
from specjax.checkpoints.leaves import expected_shapes
from specjax.core import loop, rng, types, verify, warp
from specjax.drafters import model_draft
from specjax.models.t5 import T5Config, cache_axes, t5_model
from specjax.models.table import TableCache, table_model
from specjax.parallel import mesh as mesh_lib
from specjax.parallel.model import shard_drafter, shard_model, shard_while_loop
from specjax.parallel.rules import REPLICATED, TENSOR_PARALLEL, row_axes, shardings
from specjax.shard import param_shardings
from specjax.testing import tables
from specjax.testing.tiny_pair import write_tiny_pair
from specjax.testing.tiny_t5 import tiny_t5

FACTORISATIONS = [
  (data, devices // data)
  for devices in (1, 2, 4, 8)
  for data in (1, 2, 4, 8)
  if devices % data == 0
]
RULES = ('token', 'block')
VERIFIERS = {'token': verify.token_verifier, 'block': verify.block_verifier}


def cases(by_default):
  """Every factorisation with both rules; those not named run under `slow`."""
  return [
    pytest.param(
      *shape, rule, marks=() if (*shape, rule) in by_default else pytest.mark.slow
    )
    for shape in FACTORISATIONS
    for rule in RULES
  ]


# Tables: a vocabulary of 16, of which each device holds a part, and every option.

VOCAB_SIZE, EOS, NUM_ROWS = 16, 3, 16
WARP = warp.make_warp(eos_id=EOS)
TABLE = table_model(VOCAB_SIZE, 1)
TABLES = types.Params(
  *(jnp.asarray(law) for law in tables.random_pair(0, VOCAB_SIZE, 1))
)


def decode_tables(rule, mesh=None):
  rows = np.arange(NUM_ROWS)
  arguments = (
    jnp.zeros((NUM_ROWS, 1), jnp.int32),
    rng.row_keys(5, jnp.asarray(rows)),
    warp.make_sampling(
      NUM_ROWS,
      temperature=np.where(rows % 4 == 0, 0.0, 0.5 + rows / 16),
      top_k=np.where(rows % 3 == 0, 7, 0),
      top_p=np.where(rows % 5 == 0, 0.8, 1.0),
      max_new_tokens=4 + rows % 9,
    ),
  )
  target, draft, params, while_loop = TABLE, TABLE, TABLES, jax.lax.while_loop
  if mesh is not None:
    target = shard_model(TABLE, mesh, TENSOR_PARALLEL, table_axes)
    draft = shard_model(TABLE, mesh, REPLICATED, table_axes)
    split = jax.sharding.PartitionSpec(None, 'model')
    params = types.Params(
      mesh_lib.place(TABLES.target, jax.sharding.NamedSharding(mesh, split)),
      mesh_lib.place(TABLES.draft, mesh_lib.everywhere(mesh)),
    )
    arguments = mesh_lib.place_rows(arguments, mesh)
    while_loop = shard_while_loop(mesh, REPLICATED)
  drafter = model_draft(draft, WARP, 3)
  if mesh is not None:
    drafter = shard_drafter(drafter, mesh, REPLICATED)
  return loop.decode(
    params,
    *arguments,
    target=target,
    drafter=drafter,
    verifier=VERIFIERS[rule],
    warp=WARP,
    max_len=14,
    eos_id=EOS,
    while_loop=while_loop,
  )


def table_axes(cache):
  del cache
  return TableCache(('batch', 'length'), ('batch',))


# Once for each rule.
on_one_device = functools.cache(decode_tables)

TABLES_BY_DEFAULT = [(1, 8, 'block')]


@pytest.mark.parametrize(('data', 'model', 'rule'), cases(TABLES_BY_DEFAULT))
def test_tables_decode_alike(data, model, rule):
  mesh = mesh_lib.make_mesh(data, model)
  state, expected = decode_tables(rule, mesh), on_one_device(rule)
  assert state.tokens_BS.sharding.shard_shape((NUM_ROWS, 1))[0] == NUM_ROWS // data
  assert state.cache.tokens_BS.sharding.shard_shape((16, 1))[0] == NUM_ROWS // data
  assert len(state.done_B.sharding.device_set) == data * model
  np.testing.assert_array_equal(state.tokens_BS, expected.tokens_BS)
  np.testing.assert_array_equal(state.length_B, expected.length_B)
  for ours, theirs in zip(state.trace[:-1], expected.trace[:-1], strict=True):
    np.testing.assert_array_equal(ours, theirs)
  np.testing.assert_allclose(state.trace.logp_BS, expected.trace.logp_BS, atol=1e-5)
  assert int(expected.trace.accepted_BG.sum()) > 20


# A T5 whose heads, width and vocabulary divide by 8, through the public API.

TEXTS = ['abc', 'hello', 'a longer one', 'four', 'five']
SAMPLING = [
  SamplingConfig(temperature, top_p=top_p, max_new_tokens=8, seed=3)
  for temperature, top_p in ((0, 1), (1, 1), (1, 0.9), (0.5, 1), (0, 1))
]


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
  shape = {'vocab_size': 384, 'num_heads': 8, 'head_dim': 2, 'mlp_dim': 32}
  target = tiny_t5(0, 1, gain=4.0, **shape)
  leaves, structure = jax.tree.flatten(target.params)
  noise = np.random.default_rng(0)
  near = [x + 0.15 * np.std(x) * noise.standard_normal(x.shape) for x in leaves]
  draft = target._replace(params=jax.tree.unflatten(structure, near))
  folder = write_tiny_pair(
    tmp_path_factory.mktemp('pair'), target=target, draft=draft, max_source=16
  )
  return specjax.load_pair(folder)


def generate(pair, rule):
  return pair.generate(
    TEXTS, sampling=SAMPLING, num_draft=2, rejection_sample_method=rule, batch_size=8
  )


@pytest.fixture(scope='module')
def generations(pair):
  return {}


T5_BY_DEFAULT = [(2, 4, 'token')]


@pytest.mark.parametrize(('data', 'model', 'rule'), cases(T5_BY_DEFAULT))
def test_a_pair_decodes_alike(data, model, rule, pair, generations):
  if rule not in generations:
    generations[rule] = generate(pair, rule)
  sharded = specjax.shard_pair(pair, specjax.make_mesh(data, model))
  heads = sharded.params.target['decoder']['relpos_bias']['rel_embedding']
  assert heads.sharding.shard_shape(heads.shape)[0] == 8 // model
  accepted = 0
  for ours, theirs in zip(generate(sharded, rule), generations[rule], strict=True):
    same = {'logprobs': ours.logprobs, 'text': ours.text}
    assert dataclasses.replace(theirs, **same) == ours
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
    accepted += ours.num_accepted
  assert accepted > 5


def test_a_mesh_from_the_start_and_a_split_draft(pair):
  """Parameters go into shards without lying whole on one device before."""
  mesh = specjax.make_mesh(4, 2)
  loaded = specjax.load_pair(pair.name, mesh=mesh, shard_draft=True)
  for params in loaded.params:
    table = params['token_embedder']['embedding']
    assert table.sharding.shard_shape(table.shape) == (192, 16)
  with pytest.raises(ValueError, match='pair: it lies on a mesh of 8 devices already'):
    specjax.shard_pair(loaded, mesh)


COLLECTIVE = re.compile(
  r'\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)'
  r'(?:-start)?\(.*op_name="([^"]*)"'
)


@pytest.mark.parametrize(('num_rows', 'tied'), [(4, False), (1, True)])
def test_collectives_of_a_step(num_rows, tied):
  """A sum for the embedding and for each block of a layer; nothing is gathered."""
  num_layers, num_slots, width = 2, 16, 4
  config = T5Config(
    vocab_size=128,
    emb_dim=16,
    num_heads=8,
    head_dim=2,
    mlp_dim=32,
    num_encoder_layers=1,
    num_decoder_layers=num_layers,
    logits_via_embedding=tied,
  )
  mesh = mesh_lib.make_mesh(2, 4)
  model = shard_model(t5_model(config), mesh, TENSOR_PARALLEL, cache_axes)
  placed = param_shardings(config, mesh)
  params = flax.traverse_util.unflatten_dict(
    {
      name: jax.ShapeDtypeStruct(shape, 'float32', sharding=placed[name])
      for name, shape in expected_shapes(config).items()
    },
    sep='/',
  )

  def rows(*shape):
    leaf = jax.ShapeDtypeStruct(shape, 'int32')
    return leaf.update(sharding=shardings(leaf, row_axes(leaf), mesh, REPLICATED))

  init = functools.partial(t5_model(config).init, num_slots=num_slots)
  cache = jax.eval_shape(init, params, rows(num_rows, 6))
  cache = jax.tree.map(
    lambda leaf, sharding: leaf.update(sharding=sharding),
    cache,
    shardings(cache, cache_axes(cache), mesh, TENSOR_PARALLEL),
  )
  step = jax.jit(model.extend).lower(
    params, cache, rows(num_rows, width), rows(num_rows)
  )
  found = COLLECTIVE.findall(step.compile().as_text())
  assert {kind for kind, _ in found} == {'all-reduce'}
  blocks = ['_embedder', *['self_', 'cross_', 'mlp/'] * num_layers]
  assert len(found) == len(blocks)
  for (_, name), block in zip(found, blocks, strict=True):
    assert block in name
