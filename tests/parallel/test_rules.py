"""Logical axes onto mesh axes, and what is said when they do not fit."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from specjax.core.rng import row_keys
from specjax.core.types import DecodeState, Trace
from specjax.models.t5 import T5Config
from specjax.parallel import mesh as mesh_lib
from specjax.parallel.model import shard_while_loop
from specjax.parallel.rules import (
  REPLICATED,
  TENSOR_PARALLEL,
  row_axes,
  shardings,
)
from specjax.shard import param_shardings

CONFIG = T5Config(
  vocab_size=16,
  emb_dim=4,
  num_heads=8,
  head_dim=2,
  mlp_dim=32,
  num_encoder_layers=1,
  num_decoder_layers=1,
)
# What a tensor-parallel T5 is, parameter by parameter.
SPLIT = {
  'token_embedder/embedding': ('model', None),
  'decoder/logits_dense/kernel': (None, 'model'),
  'decoder/relpos_bias/rel_embedding': ('model', None),
  'decoder/layers_0/self_attention/query/kernel': (None, 'model'),
  'decoder/layers_0/encoder_decoder_attention/key/kernel': (None, 'model'),
  'encoder/layers_0/attention/value/kernel': (None, 'model'),
  'encoder/layers_0/attention/out/kernel': ('model', None),
  'encoder/layers_0/mlp/wi_0/kernel': (None, 'model'),
  'encoder/layers_0/mlp/wo/kernel': ('model', None),
  'encoder/encoder_norm/scale': (None,),
}


@pytest.fixture(scope='module')
def mesh():
  return mesh_lib.make_mesh(2, 4)


def test_a_target_is_split_and_a_draft_is_not(mesh):
  split = param_shardings(CONFIG, mesh)
  for name, spec in SPLIT.items():
    assert split[name].spec == PartitionSpec(*spec), name
  whole = param_shardings(CONFIG, mesh, REPLICATED)
  assert whole.keys() == split.keys()
  assert all(sharding.is_fully_replicated for sharding in whole.values())


def test_the_compiler_propagates(mesh):
  assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
  assert dict(mesh.shape) == {'data': 2, 'model': 4}


@pytest.mark.parametrize(
  ('fields', 'model', 'words'),
  [
    (
      {'num_heads': 6},
      4,
      ['heads', 'rel_embedding', 'size 6', 'model=4', '--mesh_model 1 or 2,'],
    ),
    ({'mlp_dim': 28}, 8, ['mlp', 'size 28', 'model=8', '--mesh_model 1 or 2 or 4,']),
    (
      {'vocab_size': 18},
      4,
      ['vocab', 'size 18', 'model=4', 'pad the vocabulary to a multiple of 4'],
    ),
  ],
)
def test_what_does_not_divide_is_named(fields, model, words):
  config = T5Config.from_dict({**CONFIG.to_dict(), **fields})
  with pytest.raises(ValueError, match='mesh: the axis') as caught:
    param_shardings(config, mesh_lib.make_mesh(1, model))
  for word in words:
    assert word in f'{caught.value},'
  assert '\n' not in str(caught.value)
  assert param_shardings(config, mesh_lib.make_mesh(1, model), REPLICATED)


def test_published_vocabularies_divide_by_128():
  for name in ('t5_1_0_small', 't5_1_1_xxl', 'byt5_xxl', 'mt5_xxl'):
    assert T5Config.from_size(name).vocab_size % 128 == 0


def test_one_row_is_whole_and_others_must_divide(mesh):
  def place(num_rows):
    rows = jax.ShapeDtypeStruct((num_rows, 3), 'int32')
    return shardings(rows, row_axes(rows), mesh, TENSOR_PARALLEL)

  assert place(4).spec == PartitionSpec('data', None)
  assert place(1).is_fully_replicated
  with pytest.raises(ValueError, match=r'batch: 3 rows .* give a multiple of 2'):
    place(3)


def test_an_axis_without_a_rule_is_refused(mesh):
  leaf = jax.ShapeDtypeStruct((4,), 'int32')
  with pytest.raises(ValueError, match=r"'time', which no rule names; add \('time', N"):
    shardings({'a': leaf}, {'a': ('time',)}, mesh, TENSOR_PARALLEL)


@pytest.mark.parametrize(
  ('data', 'model', 'words'),
  [
    (4, 4, r'takes 16 devices and there are 8; .*device_count=16'),
    (0, 1, 'mesh_data: 0; give 1 or more'),
    (1, -2, 'mesh_model: -2; give 1 or more'),
  ],
)
def test_meshes_that_can_not_be(data, model, words):
  with pytest.raises(ValueError, match=words):
    mesh_lib.make_mesh(data, model)


def test_rows_go_to_their_devices(mesh):
  keys = row_keys(3, jnp.arange(4))
  rows = {'tokens': jnp.arange(8).reshape(4, 2), 'keys': keys}
  placed = mesh_lib.place_rows(rows, mesh)
  assert placed['tokens'].sharding.shard_shape((4, 2)) == (2, 2)
  assert (placed['tokens'] == rows['tokens']).all()
  assert (jax.random.key_data(placed['keys']) == jax.random.key_data(keys)).all()
  assert len(placed['keys'].sharding.device_set) == 8


def test_rows_are_padded_to_the_data_axis(mesh):
  assert [mesh_lib.padded_rows(count, mesh) for count in (1, 2, 3, 8)] == [1, 2, 4, 8]
  assert mesh_lib.padded_rows(3, None) == 3


def test_what_lies_right_is_not_moved(mesh):
  whole = mesh_lib.everywhere(mesh)
  first = mesh_lib.place({'a': jnp.ones(4)}, {'a': whole})
  assert mesh_lib.place(first, {'a': whole})['a'] is first['a']
  assert len(first['a'].sharding.device_set) == 8


def test_the_loops_carry_is_fixed(mesh):
  """Even where nothing else says how rows lie."""
  rows_B, rows_BS = jnp.zeros(4, jnp.int32), jnp.zeros((4, 3), jnp.int32)
  trace = Trace(rows_B, rows_BS, rows_BS, rows_BS, rows_BS, rows_BS)
  state = DecodeState(rows_BS, rows_B, rows_B > 0, (), (), trace, jnp.int32(0))
  state = mesh_lib.place(state, mesh_lib.everywhere(mesh))

  @jax.jit
  def count(state):
    while_loop = shard_while_loop(mesh, REPLICATED)
    return while_loop(
      lambda state: state.step < 2,
      lambda state: state._replace(step=state.step + 1),
      state,
    )

  last = count(state)
  assert int(last.step) == 2
  for leaf in jax.tree.leaves((last.tokens_BS, last.length_B, last.done_B, last.trace)):
    assert leaf.sharding.shard_shape(leaf.shape)[0] == 2
