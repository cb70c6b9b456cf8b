"""Teacher forcing and T5X's loss (`t5x/losses.py`), written for integer targets."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.data import text
from specjax.models import t5
from specjax.train.config import LossConfig


def shift_right(targets_BT: jax.Array) -> jax.Array:
  """Decoder inputs: the start token 0, then all targets but the last."""
  return jnp.pad(targets_BT, ((0, 0), (1, 0)))[:, :-1]


def teacher_forcing(model: t5.T5Config) -> Callable[..., jax.Array]:
  """`(params, sources_BE, targets_BT) -> logits_BTV`, the law of each target."""
  network = t5.Transformer(model)

  def logits(params: Any, sources_BE: Any, targets_BT: Any) -> Any:
    return network.apply({'params': params}, sources_BE, shift_right(targets_BT))

  return logits


def token_losses(
  logits_BTV: jax.Array,
  targets_BT: jax.Array,
  *,
  z_loss: float = 1e-4,
  label_smoothing: float = 0.0,
) -> jax.Array:
  """float32 [B, T], the loss of each token.

  With confidence c = 1 - label_smoothing and e = label_smoothing / (V - 1), the law
  to be learnt is c at the target and e elsewhere; its entropy is subtracted, so that
  the least loss is 0:

    - c log p(target) - e sum_other log p(other) - entropy + z_loss * log(Z)^2

  Args:
    logits_BTV: float32.
    targets_BT: ids in [0, V).
    z_loss: weight of log(Z)^2.
    label_smoothing: in [0, 1).
  """
  log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
  chosen_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], -1)[..., 0]
  losses_BT = log_z_BT - chosen_BT + z_loss * jnp.square(log_z_BT)
  if not label_smoothing:
    return losses_BT
  num_ids = logits_BTV.shape[-1]
  confidence, low = 1 - label_smoothing, label_smoothing / (num_ids - 1)
  entropy = -confidence * math.log(confidence) - label_smoothing * math.log(low)
  # c + (V - 1) e = 1: log Z counts once, whatever the smoothing.
  others_BT = jnp.sum(logits_BTV, axis=-1) - chosen_BT
  return losses_BT + label_smoothing * chosen_BT - low * others_BT - entropy


def normalizing_factor(
  normalizer: str | float, targets_BT: jax.Array
) -> jax.Array | float:
  """What the sum of a batch's losses is divided by; of `LossConfig.normalizer`."""
  real_BT = targets_BT != text.PAD_ID
  if normalizer == 'NUM_REAL_TARGET_TOKENS':
    return jnp.sum(real_BT)
  if normalizer == 'NUM_TOTAL_TARGET_TOKENS':
    return float(targets_BT.size)
  if normalizer == 'AVERAGE_PER_SEQUENCE':
    return jnp.sum(jnp.any(real_BT, axis=-1))
  return float(normalizer)


def cross_entropy(
  model: t5.T5Config,
  z_loss: float = 1e-4,
  label_smoothing: float = 0.0,
  normalizer: str | float = 'NUM_REAL_TARGET_TOKENS',
) -> Callable[[Any, Any], jax.Array]:
  """The mean of `token_losses` over all tokens that are not padding.

  Args:
    model: the network's shape.
    z_loss: weight of log(Z)^2.
    label_smoothing: in [0, 1).
    normalizer: what the sum is divided by, see `LossConfig`.

  Returns:
    `(params, batch) -> loss`.
  """
  logits = teacher_forcing(model)

  def loss(params: Any, batch: Any) -> jax.Array:
    targets_BT = jnp.asarray(batch.targets_BT)
    logits_BTV = logits(params, batch.sources_BE, targets_BT)
    losses_BT = token_losses(
      logits_BTV, targets_BT, z_loss=z_loss, label_smoothing=label_smoothing
    )
    real_BT = targets_BT != text.PAD_ID
    if normalizer == 'AVERAGE_PER_SEQUENCE':
      num_real_B = jnp.sum(real_BT, axis=-1, keepdims=True)
      losses_BT = losses_BT / jnp.maximum(num_real_B, 1)
    factor = normalizing_factor(normalizer, targets_BT)
    # A part of a batch may be all padding.
    return jnp.sum(losses_BT, where=real_BT) / jnp.maximum(factor, 1e-9)

  return loss


def from_config(
  model: t5.T5Config, config: LossConfig
) -> tuple[Callable[[Any, Any], jax.Array], Callable[[Any], Any]]:
  """The loss and its `batch -> factor`, which `fit` weighs parts of a batch by."""
  loss = cross_entropy(model, config.z_loss, config.label_smoothing, config.normalizer)
  return loss, lambda batch: normalizing_factor(
    config.normalizer, jnp.asarray(batch[1])
  )
