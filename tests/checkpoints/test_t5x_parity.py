"""T5X itself: it reads what is written here, what it writes is read here.

Run as a script, with t5x importable, it writes the golden layouts anew.
"""

import functools
import json
import pathlib

import flax
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints import layouts, leaves, t5x

checkpoints = pytest.importorskip(
  't5x.checkpoints', reason="needs T5X's sources and their dependencies"
)

from t5x import partitioning, train_state  # noqa: E402
from t5x.examples.scalable_t5 import network as scanned  # noqa: E402
from t5x.examples.t5 import network as unrolled  # noqa: E402

pytestmark = [pytest.mark.t5x, pytest.mark.filterwarnings('ignore')]

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
LAYOUTS = GOLDEN / 't5x' / 'layouts.json'
NETWORKS = {'unrolled': unrolled, 'scanned': scanned}
VERSIONS = {'v1_0': ('relu',), 'v1_1': ('gelu', 'linear')}
# All on one device.
REPLICATED = [
  (name, None)
  for name in ('vocab', 'embed', 'mlp', 'heads', 'joined_kv', 'relpos_buckets')
]
TOKENS = jnp.ones((1, 4), jnp.int32)


def t5x_network(layout, version, *, tied, vocab=96, depth=(2, 2)):
  config = NETWORKS[layout].T5Config(
    vocab_size=vocab,
    dtype=jnp.float32,
    emb_dim=16,
    num_heads=2,
    head_dim=8,
    mlp_dim=32,
    num_encoder_layers=depth[0],
    num_decoder_layers=depth[1],
    mlp_activations=VERSIONS[version],
    dropout_rate=0.0,
    logits_via_embedding=tied,
  )
  return NETWORKS[layout].Transformer(config)


def abstract_variables(network):
  init = functools.partial(network.init, enable_dropout=False)
  with jax.numpy_rank_promotion('allow'):
    return jax.eval_shape(init, jax.random.key(0), TOKENS, TOKENS, TOKENS)


def trees():
  """Shapes by name, of each layout that T5X has."""
  result = {}
  for version in VERSIONS:
    for layout in NETWORKS:
      for tied in (False, True):
        # Depths differ, so that one stack can not pass for the other.
        network = t5x_network(layout, version, tied=tied, vocab=40, depth=(2, 3))
        params = abstract_variables(network)['params']
        flat = flax.traverse_util.flatten_dict(flax.core.unfreeze(params), sep='/')
        name = f'{version}_{layout}_{"tied" if tied else "untied"}'
        result[name] = {key: list(flat[key].shape) for key in sorted(flat)}
  return result


def random_params(version):
  with np.load(GOLDEN / 't5' / f'random_{version}_params.npz') as file:
    return dict(file)


def nested(flat):
  return flax.traverse_util.unflatten_dict(flat, sep='/')


def partitioner():
  return partitioning.PjitPartitioner(num_partitions=1, logical_axis_rules=REPLICATED)


def empty_state(version):
  variables = abstract_variables(
    t5x_network('unrolled', version, tied=version == 'v1_0')
  )
  state = train_state.InferenceState.create(flax.core.freeze(variables))
  return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)


def test_golden_layouts_are_those_of_t5x():
  assert trees() == json.loads(LAYOUTS.read_text())


@pytest.mark.parametrize('version', VERSIONS)
def test_t5x_reads_what_was_written(tmp_path, version):
  flat = random_params(version)
  config = layouts.infer_config({name: leaf.shape for name, leaf in flat.items()})
  arrays = {name: leaves.array_leaf(leaf) for name, leaf in flat.items()}
  t5x.write(tmp_path / 'checkpoint_7', leaves.Weights(config, arrays, {}), step=7)
  loaded = checkpoints.load_t5x_checkpoint(str(tmp_path / 'checkpoint_7'))
  assert loaded['state']['step'] == 7
  jax.tree.map(np.testing.assert_array_equal, loaded['target'], nested(flat))
  checkpointer = checkpoints.Checkpointer(
    empty_state(version), partitioner(), str(tmp_path)
  )
  restored = checkpointer.restore()
  assert restored.step == 7
  params = flax.core.unfreeze(restored.params)
  jax.tree.map(np.testing.assert_array_equal, params, nested(flat))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_what_t5x_wrote_is_read(tmp_path, dtype):
  flat = random_params('v1_1')
  state = empty_state('v1_1').replace(
    params=flax.core.freeze(nested(flat)), step=np.int32(9)
  )
  checkpoints.Checkpointer(
    state,
    partitioner(),
    str(tmp_path),
    save_dtype=jnp.dtype(dtype),
  ).save(state)
  weights = t5x.open_weights(tmp_path)
  assert weights.notes['step'] == 9
  assert weights.leaves.keys() == flat.keys()
  for name, leaf in weights.leaves.items():
    values = leaves.read_whole(leaf)
    assert values.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(values, flat[name].astype(jnp.dtype(dtype)))


@pytest.mark.parametrize('version', VERSIONS)
def test_stacked_layers_are_those_of_t5x(stack, version):
  """The stacking of the other tests means in T5X what they take it to mean."""
  with np.load(GOLDEN / 't5' / f'random_{version}.npz') as file:
    golden = dict(file)
  network = t5x_network('scanned', version, tied=version == 'v1_0')
  tokens = golden['decoder_input_tokens']
  with jax.numpy_rank_promotion('allow'):
    logits_BTV = network.apply(
      {'params': nested(stack(random_params(version)))},
      golden['encoder_input_tokens'],
      tokens,
      jnp.ones_like(tokens),
      enable_dropout=False,
    )
  np.testing.assert_allclose(
    logits_BTV[..., golden['columns']],
    golden['logits_columns'],
    rtol=1e-5,
    atol=1e-5,
  )


if __name__ == '__main__':
  blocks = []
  for block_name, block in trees().items():
    lines = [
      f'  {json.dumps(key)}: {json.dumps(shape)}' for key, shape in block.items()
    ]
    blocks.append(f' "{block_name}": {{\n' + ',\n'.join(lines) + '\n }')
  LAYOUTS.write_text('{\n' + ',\n'.join(blocks) + '\n}\n')
