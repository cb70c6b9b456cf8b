"""The strict rig: 8 CPU devices, no silent promotion, warnings are errors.

Compiling takes most of the suite's time, so XLA's expensive passes are off, except
wherever `optimised` is asked for: where tests/exactness samples outputs, the programs
are the ones that users run. Workers share what they have compiled, in a folder that
goes with the run unless JAX_COMPILATION_CACHE_DIR names one to keep.
"""

import gc
import os
import pathlib
import shutil
import tempfile

import jax
import pytest
from jax._src import compiler

# Read when the first backend starts, which no import does.
os.environ['XLA_FLAGS'] = (
  os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=8'
)
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_default_matmul_precision', 'highest')
jax.config.update('jax_legacy_prng_key', 'error')


class _Compiler:
  """How programs are compiled, until told otherwise: quickly, or as users do."""

  options = staticmethod(compiler.get_compile_options)
  is_quick = True

  @classmethod
  def quick(cls, is_quick: bool) -> None:
    cls.is_quick = is_quick
    jax.config.update('jax_disable_most_optimizations', is_quick)

  @classmethod
  def get_compile_options(cls, *args, backend=None, **kwargs):
    # XLA's older code generator for fused loops takes half the time. It is chosen by
    # program, and jax has no option that gives it to all of them.
    if cls.is_quick and backend is not None and backend.platform == 'cpu':
      overrides = kwargs.get('env_options_overrides') or {}
      quick = {'xla_cpu_use_fusion_emitters': False}
      kwargs['env_options_overrides'] = {**quick, **overrides}
    return cls.options(*args, backend=backend, **kwargs)


_Compiler.quick(True)
compiler.get_compile_options = _Compiler.get_compile_options

_CACHE = None
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  # Workers and programs that tests start inherit the environment.
  _CACHE = os.environ['JAX_COMPILATION_CACHE_DIR'] = tempfile.mkdtemp()
jax.config.update('jax_compilation_cache_dir', os.environ['JAX_COMPILATION_CACHE_DIR'])
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)

_MAPS = pathlib.Path('/proc/self/maps')
_MAX_MAPS = 20_000


@pytest.fixture(scope='module', autouse=True)
def few_programs():
  """Lets go of compiled programs: Linux allows a process 65,530 memory mappings, each
  program takes some, and XLA's compiler crashes when there are no more."""
  yield
  if _MAPS.exists() and _MAPS.read_bytes().count(b'\n') > _MAX_MAPS:
    jax.clear_caches()
    gc.collect()


def _optimise():
  _Compiler.quick(False)
  yield
  _Compiler.quick(True)


# They compile as users do; without it some CPUs round differently from T5X's.
optimised = pytest.fixture(_optimise, scope='module')
optimised_test = pytest.fixture(_optimise)


def pytest_unconfigure():
  if _CACHE is not None:  # the process that made it; its workers have gone
    shutil.rmtree(_CACHE, ignore_errors=True)
