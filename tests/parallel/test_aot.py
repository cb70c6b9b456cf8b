"""Compiling, saving and loading, on the devices that are here."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.command import programs
from specjax.core import loop, rng, types, verify
from specjax.core.warp import make_sampling
from specjax.drafters import model_draft
from specjax.parallel import aot
from specjax.parallel.mesh import everywhere, make_mesh
from specjax.testing.tiny_t5 import tiny_t5

ARGUMENTS = (
  {'w': jax.ShapeDtypeStruct((128, 256), jnp.float32)},
  jax.ShapeDtypeStruct((4, 128), jnp.float32),
  jax.ShapeDtypeStruct((4, 256), jnp.float32),
)


def step(params, x, cache):
  return jnp.sum(x), cache + x @ params['w']


@pytest.fixture(scope='module')
def program():
  whole = everywhere(make_mesh(1, 8))
  kept = aot.automatic(whole)
  placed = ({'w': kept}, whole, kept)
  return aot.compile_program(
    'step', step, ARGUMENTS, placed, out_shardings=(whole, kept), donate=(2,)
  )


def values(program):
  random = np.random.default_rng(0)
  arrays = jax.tree.map(lambda x: random.random(x.shape, np.float32), ARGUMENTS)
  return jax.tree.map(jax.device_put, arrays, program.formats)


def test_what_is_known_of_a_program(program):
  assert program.memory.arguments == 4 * (128 * 256 + 4 * 128 + 4 * 256)
  assert program.memory.aliased == 4 * 4 * 256
  assert program.module.aliases == ((1, 2),)
  assert program.memory.total >= program.memory.arguments
  assert program.flops > 2 * 4 * 128 * 256 - 1
  assert program.seconds > 0


def test_a_saved_program_runs_without_compiling(program, tmp_path):
  path = tmp_path / 'step.bin'
  aot.save(program, path, 'eight CPUs')
  loaded = aot.load(path)
  assert [leaf.sharding for leaf in jax.tree.leaves(loaded.input_formats[0])] == [
    leaf.sharding for leaf in jax.tree.leaves(program.formats)
  ]
  expected = program.compiled(*values(program))
  np.testing.assert_array_equal(loaded(*values(program))[1], expected[1])
  assert list(tmp_path.iterdir()) == [path]


def test_programs_of_other_versions_and_devices_are_refused(program, tmp_path):
  path = tmp_path / 'step.bin'
  aot.save(program, path, 'v4:2x2x1')
  record = pickle.loads(path.read_bytes())

  def refused(match, **fields):
    path.write_bytes(pickle.dumps({**record, **fields}))
    with pytest.raises(ValueError, match=match):
      aot.load(path)

  old = {**record['versions'], 'jax': '0.4.0'}
  refused(r"written with jax '0.4.0', here is .*compile anew", versions=old)
  refused("is for v4:2x2x1, 4 devices 'TPU v4'; here are 8", devices=('TPU v4', 4))
  refused('is none of ours', kind='something else')
  path.write_bytes(b'')
  with pytest.raises(ValueError, match='can not be read'):
    aot.load(path)
  with pytest.raises(ValueError, match='No such file'):
    aot.load(tmp_path / 'missing')


def test_a_program_without_room_says_by_how_many_bytes():
  # In the words of the TPU compiler.
  error = RuntimeError(
    'RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO '
    'temporaries (21.33G) exceeds available HBM (15.75G).'
  )
  found = str(aot.without_room('loop', error))
  assert 'it needs 21.33 GiB of each device, which leaves programs 15.75 GiB' in found
  assert f'about {round((21.33 - 15.75) * 2**30)} bytes too few; split' in found
  other = RuntimeError('INTERNAL: something else')
  assert aot.without_room('loop', other) is other


@pytest.mark.slow
def test_a_saved_loop_decodes_the_same_tokens(tmp_path):
  """From shapes to a file to tokens, on 8 devices: those of `loop.decode`."""
  target, draft = tiny_t5(0), tiny_t5(1, num_layers=1)
  setup = programs.Setup(
    target.config,
    draft.config,
    make_mesh(8, 1),
    num_draft=3,
    batch_size=8,
    max_source=4,
    max_new_tokens=16,
    matrix_unit=False,  # a flag for TPUs
  )
  aot.save(programs.compile_loop(setup), tmp_path / 'loop.bin', 'eight CPUs')
  compiled = aot.load(tmp_path / 'loop.bin')
  arguments = (
    types.Params(target.params, draft.params),
    jax.random.randint(jax.random.key(2), (8, 4), 1, 12, jnp.int32),
    rng.row_keys(3, jnp.arange(8)),
    make_sampling(8, temperature=1.0, max_new_tokens=12),
  )
  params = jax.device_put(arguments[0], compiled.input_formats[0][0])
  found = compiled(params, *arguments[1:])
  expected = loop.decode(
    *arguments,
    target=target.model,
    drafter=model_draft(draft.model, setup.warp, 3),
    verifier=verify.token_verifier,
    warp=setup.warp,
    max_len=17,
    eos_id=programs.EOS_ID,
  )
  np.testing.assert_array_equal(found.tokens_BS, expected.tokens_BS)
  np.testing.assert_array_equal(found.trace.rounds_B, expected.trace.rounds_B)
  assert found.length_B.tolist() == expected.length_B.tolist()
  assert max(expected.length_B) > 3
