"""Step sizes and optimisers, and how the optimiser's state lies on a mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from specjax.models import t5
from specjax.parallel.mesh import everywhere
from specjax.parallel.rules import TENSOR_PARALLEL, Rules, shardings
from specjax.train.config import FitConfig


def make_schedule(config: FitConfig) -> optax.Schedule:
  """A linear rise, a constant part and a linear fall to 0; or T5's inverse root."""
  if config.schedule == 'rsqrt':
    warmup = max(1, config.warmup_steps)
    return lambda step: config.learning_rate / jnp.sqrt(1.0 * jnp.maximum(step, warmup))
  decay_steps = max(1, round(config.total_steps * config.decay_fraction))
  constant, warmup = config.learning_rate, max(1, config.warmup_steps)
  return optax.join_schedules(
    [
      optax.linear_schedule(0.0 if config.warmup_steps else constant, constant, warmup),
      optax.linear_schedule(
        constant, 0.0 if config.decay_fraction else constant, decay_steps
      ),
    ],
    [max(config.warmup_steps, config.total_steps - decay_steps)],
  )


def make_optimizer(config: FitConfig) -> optax.GradientTransformation:
  """Adafactor with updates relative to each parameter's scale, or AdamW.

  The former as T5 was trained (Shazeer and Stern 2018, without momentum).
  """
  if config.optimizer == 'adamw':
    optimizer = optax.adamw(make_schedule(config), weight_decay=config.weight_decay)
  else:
    optimizer = optax.adafactor(
      make_schedule(config),
      multiply_by_parameter_scale=True,
      clipping_threshold=1.0,
      weight_decay_rate=None,
    )
  if config.clip_norm is None:
    return optimizer
  return optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)


def param_shardings(params: Any, mesh: Mesh, rules: Rules = TENSOR_PARALLEL) -> Any:
  """A sharding for each of a T5's parameters.

  Raises:
    ValueError: the mesh does not divide heads, mlp or vocabulary.
  """
  return shardings(params, t5.logical_axes(params), mesh, rules)


def state_shardings(
  optimizer: optax.GradientTransformation, params: Any, placed: Any, mesh: Mesh
) -> Any:
  """A sharding for each leaf of the optimiser's state.

  What has a parameter's shape (AdamW's moments) lies as the parameter does; the rest
  (Adafactor's row and column means, counters) is small and whole everywhere.

  Args:
    optimizer: any.
    params: parameters, or their shapes.
    placed: their shardings.
    mesh: of the shardings.
  """
  state = jax.eval_shape(optimizer.init, params)
  names = jax.tree_util.keystr
  by_name = {
    names(path): (leaf.shape, sharding)
    for (path, leaf), sharding in zip(
      jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(placed), strict=True
    )
  }

  def place(path: Any, leaf: Any) -> Any:
    # The end of a path within the state is the parameter's.
    ends = (by_name.get(names(path[start:])) for start in range(len(path)))
    shape, sharding = next((end for end in ends if end), (None, None))
    return sharding if shape == leaf.shape else everywhere(mesh)

  return jax.tree_util.tree_map_with_path(place, state)
