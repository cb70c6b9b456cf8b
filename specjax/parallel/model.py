"""Models and the loop's carry on a mesh, by wrapping what the loop is given.

Neither the loop nor a model knows a mesh. Parameters arrive in their shards; these
wrappers fix the caches, the logits and the carry, and XLA fills in the rest.
"""

import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from specjax.core.types import DecodeState, Drafter, Model, Output, PyTree
from specjax.parallel.rules import Rules, constrain, row_axes


@functools.cache
def shard_model(
  model: Model, mesh: Mesh, rules: Rules, cache_axes: Callable[[PyTree], PyTree]
) -> Model:
  """The model with its cache and its logits fixed on a mesh.

  Args:
    model: any `Model`; its parameters are placed by the caller.
    mesh: of `make_mesh`.
    rules: logical axis -> mesh axis, as for the parameters.
    cache_axes: `cache -> axes`, the logical axes of each of the cache's leaves.

  Returns:
    A `Model`; equal arguments give the same one, so that it does not recompile.
  """

  def fix_cache(cache: PyTree) -> PyTree:
    return constrain(cache, cache_axes(cache), mesh, rules)

  def init(params, inputs_BE, *, num_slots):
    inputs_BE = constrain(inputs_BE, ('batch', 'length'), mesh, rules)
    return fix_cache(model.init(params, inputs_BE, num_slots=num_slots))

  def extend(params, cache, tokens_BT, start_B):
    output, cache = model.extend(params, cache, tokens_BT, start_B)
    logits_axes = ('batch', 'length', 'vocab')
    logits_BTV = constrain(output.logits_BTV, logits_axes, mesh, rules)
    hidden = constrain(output.hidden_BTD, row_axes(output.hidden_BTD), mesh, rules)
    return Output(logits_BTV, hidden), fix_cache(cache)

  return Model(init, extend)


@functools.cache
def shard_while_loop(mesh: Mesh, rules: Rules) -> Callable:
  """`lax.while_loop` over a `DecodeState` whose rows are fixed on a mesh.

  What the models and drafters carry is fixed by `shard_model`.
  """

  def fix(state: DecodeState) -> DecodeState:
    rows = (state.tokens_BS, state.length_B, state.done_B, state.trace)
    tokens_BS, length_B, done_B, trace = constrain(rows, row_axes(rows), mesh, rules)
    return DecodeState(
      tokens_BS=tokens_BS,
      length_B=length_B,
      done_B=done_B,
      cache=state.cache,
      draft_state=state.draft_state,
      trace=trace,
      step=state.step,
    )

  def while_loop(cond, body, state):
    return jax.lax.while_loop(cond, lambda state: fix(body(state)), fix(state))

  return while_loop


@functools.cache
def shard_drafter(drafter: Drafter, mesh: Mesh, rules: Rules) -> Drafter:
  """The drafter with its proposals whole on every device but for the rows.

  Verification is split along the vocabulary. Without this XLA would split the
  draft's laws too, and each draft step would wait for several all-reduces.
  """

  def propose(params, state, key_B, history):
    draft, state = drafter.propose(params, state, key_B, history)
    return constrain(draft, row_axes(draft), mesh, rules), state

  return drafter._replace(propose=propose)
