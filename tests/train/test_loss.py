"""T5X's loss, against its definition written out with one-hot laws in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.train import loss
from specjax.train.config import NORMALIZERS

V = 7


def _t5x_losses(logits_BTV, targets_BT, z_loss, label_smoothing):
  """`cross_entropy_with_logits` of soft targets, less their entropy."""
  log_z_BT = np.log(np.exp(logits_BTV).sum(-1))
  low = label_smoothing / (V - 1)
  soft_BTV = np.where(np.eye(V, dtype=bool)[targets_BT], 1 - label_smoothing, low)
  logp_BTV = logits_BTV - log_z_BT[..., None]
  entropy = -(
    (1 - label_smoothing) * np.log(1 - label_smoothing)
    + (V - 1) * low * np.log(low + 1e-20)
  )
  return -(soft_BTV * logp_BTV).sum(-1) - entropy + z_loss * log_z_BT**2


@pytest.mark.parametrize('z_loss', [0.0, 0.1])
@pytest.mark.parametrize('label_smoothing', [0.0, 0.3])
def test_token_losses_are_t5xs(z_loss, label_smoothing):
  rng = np.random.default_rng(0)
  logits_BTV = rng.normal(size=(2, 3, V)).astype(np.float32) * 3
  targets_BT = rng.integers(0, V, (2, 3))
  found = loss.token_losses(
    jnp.asarray(logits_BTV),
    jnp.asarray(targets_BT, jnp.int32),
    z_loss=z_loss,
    label_smoothing=label_smoothing,
  )
  expected = _t5x_losses(
    logits_BTV.astype(np.float64), targets_BT, z_loss, label_smoothing
  )
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('normalizer', [*NORMALIZERS, 12.5])
def test_normalizers(monkeypatch, normalizer):
  """A fixed table of logits for a network: only the sum over tokens is tested."""
  rng = np.random.default_rng(1)
  logits_BTV = rng.normal(size=(3, 4, V)).astype(np.float32)
  targets_BT = np.array([[3, 1, 0, 0], [2, 4, 5, 1], [0, 0, 0, 0]], np.int32)
  monkeypatch.setattr(
    loss, 'teacher_forcing', lambda model: lambda params, sources, targets: logits_BTV
  )

  class Batch:
    sources_BE = np.ones((3, 2), np.int32)

  Batch.targets_BT = targets_BT
  found = loss.cross_entropy(None, 0.1, 0.2, normalizer)(None, Batch)
  losses_BT = _t5x_losses(logits_BTV, targets_BT, 0.1, 0.2) * (targets_BT > 0)
  expected = {
    'NUM_REAL_TARGET_TOKENS': losses_BT.sum() / 6,
    'NUM_TOTAL_TARGET_TOKENS': losses_BT.sum() / 12,
    'AVERAGE_PER_SEQUENCE': (losses_BT[0].sum() / 2 + losses_BT[1].sum() / 4) / 2,
    12.5: losses_BT.sum() / 12.5,
  }[normalizer]
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_smoothing_has_its_least_loss_at_the_smoothed_law():
  law = np.where(np.arange(V) == 2, 0.7, 0.3 / (V - 1))
  logits_BTV = jnp.log(jnp.asarray(law, jnp.float32))[None, None]
  target = jnp.array([[2]])

  def of(logits_BTV):
    return loss.token_losses(logits_BTV, target, z_loss=0.0, label_smoothing=0.3).sum()

  value, gradient = jax.value_and_grad(of)(logits_BTV)
  np.testing.assert_allclose(value, 0, atol=1e-6)
  np.testing.assert_allclose(gradient, 0, atol=1e-6)
