"""Compiling, saving and loading, on the devices that are here."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.parallel import aot
from specjax.parallel.mesh import everywhere, make_mesh

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
  rng = np.random.default_rng(0)
  arrays = jax.tree.map(lambda x: rng.random(x.shape, np.float32), ARGUMENTS)
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
