"""The strict rig: 8 CPU devices, no silent promotion, warnings are errors."""

import os

os.environ['XLA_FLAGS'] = (
  os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=8'
)

import jax

jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_default_matmul_precision', 'highest')
jax.config.update('jax_legacy_prng_key', 'error')
