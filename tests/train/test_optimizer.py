"""Adafactor is T5X's, written out in NumPy; AdamW is decoupled."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.train.config import FitConfig
from specjax.train.optimizer import make_optimizer

RATE = 0.3


def _adafactor(param, gradients):
  """`t5x/adafactor.py` as T5 uses it: no momentum, no decay, no offset.

  Shazeer and Stern 2018, algorithms 4 and 5, with beta2 = 1 - t^-0.8, d = 1,
  epsilon1 = 1e-30, epsilon2 = 1e-3; factored if both sizes are at least 128.
  """
  moment = rows = columns = 0.0
  for t, gradient in enumerate(gradients, 1):
    beta2 = 1 - t**-0.8
    square = gradient**2 + 1e-30
    if param.ndim == 2 and min(param.shape) >= 128:
      rows = beta2 * rows + (1 - beta2) * square.mean(1, keepdims=True)
      columns = beta2 * columns + (1 - beta2) * square.mean(0, keepdims=True)
      moment = rows * columns / rows.mean()
    else:
      moment = beta2 * moment + (1 - beta2) * square
    update = gradient / np.sqrt(moment)
    update = update / max(1, np.sqrt(np.mean(update**2)))
    scale = max(np.sqrt(np.mean(param**2)), 1e-3)
    param = param - RATE * scale * update
  return param


@pytest.mark.parametrize(
  ('shape', 'size'), [((130, 160), 0.5), ((128, 127), 2.0), ((7,), 1.0), ((9,), 0.0)]
)
def test_adafactor_is_t5xs(shape, size):
  rng = np.random.default_rng(len(shape))
  param = size * rng.normal(size=shape)
  # Of different sizes, or clipping would do nothing after the first step.
  gradients = [rng.normal(size=shape) * 10.0**power for power in (-3, 0, -1)]
  config = FitConfig(
    total_steps=3, learning_rate=RATE, warmup_steps=0, decay_fraction=0.0
  )
  optimizer = make_optimizer(config)
  found = jnp.asarray(param, jnp.float32)
  state = optimizer.init(found)
  update = jax.jit(optimizer.update)
  for gradient in gradients:
    updates, state = update(jnp.asarray(gradient, jnp.float32), state, found)
    found = optax.apply_updates(found, updates)
  np.testing.assert_allclose(found, _adafactor(param, gradients), rtol=1e-4, atol=1e-6)


def test_adamw_decays_weights_apart_from_the_gradient():
  """A gradient of zero: the rate times the decay is all that shrinks the weight."""
  config = FitConfig(
    total_steps=9, learning_rate=RATE, warmup_steps=0, decay_fraction=0.0,
    optimizer='adamw', weight_decay=0.1,
  )  # fmt: skip
  optimizer = make_optimizer(config)
  param = jnp.float32(2.0)
  updates, _ = optimizer.update(jnp.float32(0), optimizer.init(param), param)
  assert float(param + updates) == pytest.approx(2 * (1 - 0.1 * RATE))


def test_a_gradient_beyond_the_norm_is_scaled_down():
  config = FitConfig(
    total_steps=9, learning_rate=1.0, warmup_steps=0, decay_fraction=0.0,
    optimizer='adamw', clip_norm=1.0,
  )  # fmt: skip
  optimizer = make_optimizer(config)
  param = jnp.zeros(2)
  _, state = optimizer.update(jnp.array([3.0, 4.0]), optimizer.init(param), param)
  # AdamW's first moment is a tenth of the gradient that it was given.
  np.testing.assert_allclose(optax.tree.get(state, 'mu'), [0.06, 0.08], rtol=1e-6)
