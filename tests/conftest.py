"""The strict rig: 8 CPU devices, no silent promotion, warnings are errors.

Compiling takes most of the suite's time, so XLA's expensive passes are off, except
in tests/exactness and wherever `optimised` is asked for: there the programs are the
ones that users run. Workers share what they have compiled, in a folder that goes with
the run unless JAX_COMPILATION_CACHE_DIR names one to keep.
"""

import os
import shutil
import tempfile

import jax
import pytest

# Read when the first backend starts, which no import does.
os.environ['XLA_FLAGS'] = (
  os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=8'
)
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_default_matmul_precision', 'highest')
jax.config.update('jax_legacy_prng_key', 'error')
jax.config.update('jax_disable_most_optimizations', True)

_CACHE = None
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  # Workers and programs that tests start inherit the environment.
  _CACHE = os.environ['JAX_COMPILATION_CACHE_DIR'] = tempfile.mkdtemp()
jax.config.update('jax_compilation_cache_dir', os.environ['JAX_COMPILATION_CACHE_DIR'])
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)


@pytest.fixture(scope='module')
def optimised():
  """Compiles as users do."""
  jax.config.update('jax_disable_most_optimizations', False)
  yield
  jax.config.update('jax_disable_most_optimizations', True)


def pytest_unconfigure():
  if _CACHE is not None:  # the process that made it; its workers have gone
    shutil.rmtree(_CACHE, ignore_errors=True)
