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
from specjax import SamplingConfig, SpeculationConfig
from specjax.checkpoints.leaves import expected_shapes
from specjax.core import loop, rng, types, verify, warp
from specjax.drafters import model_draft
from specjax.generation import make_batches
from specjax.models.t5 import T5Config, cache_axes, t5_model
from specjax.models.table import TableCache, table_model
from specjax.parallel import mesh as mesh_lib
from specjax.parallel.model import shard_drafter, shard_model, shard_while_loop
from specjax.parallel.rules import REPLICATED, TENSOR_PARALLEL, row_axes, shardings
from specjax.shard import param_shardings
from specjax.testing import tables
from specjax.testing.tiny_pair import write_tiny_pair
from specjax.testing.tiny_t5 import TinyT5

FACTORISATIONS = [
  (data, devices // data)
  for devices in (1, 2, 4, 8)
  for data in (1, 2, 4, 8)
  if devices % data == 0
]
RULES = ('token', 'block')
VERIFIERS = {'token': verify.token_verifier, 'block': verify.block_verifier}


def cases(by_default=()):
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


@pytest.mark.slow
@pytest.mark.parametrize(('data', 'model', 'rule'), cases())
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


CONFIG = T5Config(
  vocab_size=384,
  emb_dim=16,
  num_heads=8,
  head_dim=2,
  mlp_dim=32,
  num_encoder_layers=1,
  num_decoder_layers=1,
)
SHAPES = expected_shapes(CONFIG)


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
  """A random target, and a draft that is near enough to be accepted at times."""
  generator = np.random.default_rng(0)

  def random(name, shape):
    if name.endswith('scale'):
      return np.ones(shape)
    fan_in = 1 if 'embedding' in name else shape[0]
    gain = 4 if 'logits' in name else 1
    return gain * generator.standard_normal(shape) / np.sqrt(fan_in)

  def tiny(leaves):
    params = flax.traverse_util.unflatten_dict(leaves, sep='/')
    return TinyT5(CONFIG, params, t5_model(CONFIG), t5_model(CONFIG))

  target = {name: random(name, shape) for name, shape in SHAPES.items()}
  draft = {name: x + 0.15 * random(name, x.shape) for name, x in target.items()}
  folder = write_tiny_pair(
    tmp_path_factory.mktemp('pair'),
    target=tiny(target),
    draft=tiny(draft),
    max_source=16,
  )
  return specjax.load_pair(folder)


def generate(pair, rule='token', method='draft_model'):
  return pair.generate(
    TEXTS,
    sampling=SAMPLING,
    num_draft=2,
    rejection_sample_method=rule,
    method=method,
    batch_size=8,
  )


def assert_same(ours, theirs):
  """Everything but log-probabilities exactly; returns how many were accepted."""
  for one, other in zip(ours, theirs, strict=True):
    assert dataclasses.replace(one, logprobs=other.logprobs) == other
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
  return sum(one.num_accepted for one in ours)


@pytest.fixture(scope='module')
def generations():
  return {}  # of one device, by rule


T5_BY_DEFAULT = [(2, 4, 'block')]


@pytest.mark.parametrize(('data', 'model', 'rule'), cases(T5_BY_DEFAULT))
def test_a_pair_decodes_alike(data, model, rule, pair, generations):
  if rule not in generations:
    generations[rule] = generate(pair, rule)
  sharded = specjax.shard_pair(pair, specjax.make_mesh(data, model))
  heads = sharded.params.target['decoder']['relpos_bias']['rel_embedding']
  assert heads.sharding.shard_shape(heads.shape)[0] == 8 // model
  assert assert_same(generate(sharded, rule), generations[rule]) > 5


@pytest.mark.slow
@pytest.mark.parametrize('method', ['draft_model', 'ngram', 'table', 'none'])
def test_other_drafts_decode_alike(method, pair, tmp_path):
  """A draft that is split too, drafts without a model, and none."""
  text = tmp_path / 'table.txt'
  text.write_text('abc abc\nhello\n')
  pair = dataclasses.replace(pair, table_text=str(text))
  mesh = specjax.make_mesh(2, 4)
  sharded = specjax.shard_pair(pair, mesh, shard_draft=True)
  assert_same(generate(sharded, method=method), generate(pair, method=method))


@pytest.mark.slow
def test_a_stream_equals_the_batch(pair, generations):
  """One row: its cache has no batch axis, and all groups of 'data' hold it."""
  if 'token' not in generations:
    generations['token'] = generate(pair)
  sharded = specjax.shard_pair(pair, specjax.make_mesh(2, 4))
  stream = sharded.stream(TEXTS[2], sampling=SAMPLING[2], num_draft=2, index=2)
  *_, last = stream
  assert_same([last.generation], [generations['token'][2]])


def test_a_mesh_from_the_start_and_a_split_draft(pair):
  """Both models' tables are loaded into shards; a mesh is for good."""
  mesh = specjax.make_mesh(4, 2)
  loaded = specjax.load_pair(pair.name, mesh=mesh, shard_draft=True)
  for params in loaded.params:
    table = params['token_embedder']['embedding']
    assert table.sharding.shard_shape(table.shape) == (192, 16)
  with pytest.raises(ValueError, match='pair: it lies on a mesh of 8 devices already'):
    specjax.shard_pair(loaded, mesh)


def test_a_draft_that_can_not_be_split_is_named(pair):
  odd = dataclasses.replace(pair, draft_config=dataclasses.replace(CONFIG, num_heads=6))
  mesh = specjax.make_mesh(1, 4)
  with pytest.raises(ValueError, match=r'shard_draft: mesh: the axis heads .* size 6'):
    specjax.shard_pair(odd, mesh, shard_draft=True)


ARRAY = re.compile(r'\w+\[[\d,]*\]')
COLLECTIVE = re.compile(
  r'= (.+?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)'
  r'(?:-start)?\(.*op_name="([^"]*)"'
)


@pytest.mark.parametrize(
  ('num_rows', 'tied'), [(4, False), pytest.param(1, True, marks=pytest.mark.slow)]
)
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
  assert {kind for _, kind, _ in found} == {'all-reduce'}
  blocks = ['_embedder', *['self_', 'cross_', 'mlp/'] * num_layers]
  assert len(found) == len(blocks)
  for (*_, name), block in zip(found, blocks, strict=True):
    assert block in name


@pytest.mark.slow
def test_a_whole_draft_waits_for_nothing_but_common_branches(pair):
  """Verification is split along the vocabulary; drafting must not be for its sake."""
  sharded = specjax.shard_pair(pair, specjax.make_mesh(2, 4))
  params, static = sharded.decoder(
    SpeculationConfig(num_speculative_tokens=2), max_new_tokens=8
  )
  (batch,) = make_batches(
    sharded.encode(TEXTS),
    SAMPLING,
    [2] * 5,
    batch_size=8,
    buckets=(16,),
    mesh=sharded.mesh,
  )
  while_loop = shard_while_loop(sharded.mesh, REPLICATED)
  program = loop.decode.lower(params, *batch[1:], **static, while_loop=while_loop)
  found = COLLECTIVE.findall(program.compile().as_text())
  assert {kind for _, kind, _ in found} == {'all-reduce'}
  drafting = [shape for shape, _, name in found if '/draft/' in name]
  assert len(drafting) > 2
  # XLA may join several in one.
  assert {each for shape in drafting for each in ARRAY.findall(shape)} == {'pred[]'}
  verifying = [shape for shape, _, name in found if '/verify/' in name]
  assert len(verifying) > 5
