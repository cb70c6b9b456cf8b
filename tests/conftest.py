"""The strict rig: 8 CPU devices, no silent promotion, warnings are errors.

Compiling takes most of the suite's time, so XLA's expensive passes are off, except
in tests/exactness and wherever `optimised` is asked for: there the programs are the
ones that users run. Workers do not share compiled programs: with JAX's persistent cache
on CPU one of them crashed now and then while it wrote.
"""

import os

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


def _optimise():
  jax.config.update('jax_disable_most_optimizations', False)
  yield
  jax.config.update('jax_disable_most_optimizations', True)


# They compile as users do; without it some CPUs round differently from T5X's.
optimised = pytest.fixture(_optimise, scope='module')
optimised_test = pytest.fixture(_optimise)
