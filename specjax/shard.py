"""A pair on a mesh: what a T5 declares, and the rules, put together."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.traverse_util
import jax
from jax.sharding import Mesh, NamedSharding

from specjax.checkpoints.leaves import expected_shapes
from specjax.core.types import Model, Params
from specjax.models.t5 import T5Config, cache_axes, logical_axes
from specjax.pair import Pair
from specjax.parallel import mesh as mesh_lib
from specjax.parallel.model import shard_model
from specjax.parallel.rules import REPLICATED, TENSOR_PARALLEL, Rules, shardings


def param_shardings(
  config: T5Config, mesh: Mesh, rules: Rules = TENSOR_PARALLEL
) -> dict[str, NamedSharding]:
  """How a T5's parameters lie on a mesh, by name; computes nothing.

  Args:
    config: the network's shape.
    mesh: of `parallel.mesh.make_mesh`.
    rules: of `parallel.rules`.

  Returns:
    What `checkpoints.leaves.restore` takes: a sharding for each of T5X's names.

  Raises:
    ValueError: the mesh does not divide heads, mlp or vocabulary.
  """
  leaves = {
    name: jax.ShapeDtypeStruct(shape, 'float32')
    for name, shape in expected_shapes(config).items()
  }
  tree = flax.traverse_util.unflatten_dict(leaves, sep='/')
  placed = shardings(tree, logical_axes(tree), mesh, rules)
  return flax.traverse_util.flatten_dict(placed, sep='/')


def shard_pair(pair: Pair, mesh: Mesh, *, shard_draft: bool = False) -> Pair:
  """The pair with its target split over 'model' and its rows over 'data'.

  Args:
    pair: its parameters may still be NumPy arrays, or lie as they shall.
    mesh: of `parallel.mesh.make_mesh`.
    shard_draft: split the draft too, rather than keep it whole on every device.

  Returns:
    A pair that decodes the same tokens; see docs/scale.md for what that means in
    floating point.

  Raises:
    ValueError: the mesh does not divide a model's heads, mlp or vocabulary, or the
      pair lies on a mesh already.

  Example:
    >>> from specjax import load_pair, shard_pair
    >>> from specjax.parallel.mesh import make_mesh
    >>> pair = shard_pair(load_pair(), make_mesh(data=1, model=1))
  """
  if pair.mesh is not None:
    raise ValueError(
      f'pair: it lies on a mesh of {pair.mesh.size} devices already; load it again '
      'with load_pair(..., mesh=...)'
    )
  draft_rules = TENSOR_PARALLEL if shard_draft else REPLICATED
  target, target_params = _shard(
    pair.target, pair.target_config, pair.params.target, mesh, TENSOR_PARALLEL
  )
  draft, draft_params = pair.draft, pair.params.draft
  if pair.draft is not None and pair.draft_config is not None:
    try:
      draft, draft_params = _shard(
        pair.draft, pair.draft_config, pair.params.draft, mesh, draft_rules
      )
    except ValueError as error:
      raise ValueError(f'shard_draft: {error}, or leave the draft whole') from error
  return dataclasses.replace(
    pair,
    target=target,
    draft=draft,
    params=Params(target_params, draft_params),
    mesh=mesh,
  )


def _shard(
  model: Model, config: T5Config, params: Mapping[str, Any], mesh: Mesh, rules: Rules
) -> tuple[Model, dict[str, Any]]:
  placed = mesh_lib.place(
    flax.traverse_util.flatten_dict(dict(params), sep='/'),
    param_shardings(config, mesh, rules),
  )
  tree = flax.traverse_util.unflatten_dict(placed, sep='/')
  return shard_model(model, mesh, rules, cache_axes), tree
