"""The programs of a pair that are compiled ahead of time, from shapes alone.

The loops are those that decoding runs; the steps are their parts, compiled apart so
that each can be told from the others.
"""

import functools
import math
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specjax.checkpoints.leaves import expected_shapes
from specjax.core import autoregressive, loop, rng, types, verify
from specjax.core.warp import make_sampling, make_warp
from specjax.drafters import model_draft
from specjax.generation import max_length
from specjax.load import resize_vocab
from specjax.models.t5 import T5Config, cache_axes, t5_model
from specjax.parallel import aot
from specjax.parallel.mesh import everywhere
from specjax.parallel.model import shard_drafter, shard_model, shard_while_loop
from specjax.parallel.rules import (
  REPLICATED,
  TENSOR_PARALLEL,
  Rules,
  row_axes,
  shardings,
)
from specjax.shard import param_shardings

EOS_ID = 1
# Ids of the published vocabularies, less than the rows of their embeddings.
_NUM_IDS = {32128: 32100, 250112: 250100}
# Of one row XLA makes a multiplication and a sum on the vector unit. By its own
# estimate a plain step of T5-XXL on a v4 chip then takes three times as long.
_MATRIX_UNIT = {'xla_tpu_enable_dot_strength_reduction': False}


class Setup(NamedTuple):
  """A pair, its devices and the shapes of its work.

  Attributes:
    target: the target's shape.
    draft: the draft's.
    mesh: of `topology.make_mesh`.
    num_draft: gamma.
    batch_size: rows.
    max_source: length of sources.
    max_new_tokens: budget; buffers have the length of its bucket.
    shard_draft: split the draft too, rather than keep it whole on every device.
    matrix_unit: multiply single rows on the matrix unit, against XLA's default.
  """

  target: T5Config
  draft: T5Config
  mesh: Mesh
  num_draft: int = 7
  batch_size: int = 1
  max_source: int = 512
  max_new_tokens: int = 128
  shard_draft: bool = False
  matrix_unit: bool = True

  @property
  def options(self) -> dict[str, Any]:
    return _MATRIX_UNIT if self.matrix_unit else {}

  @property
  def draft_rules(self) -> Rules:
    return TENSOR_PARALLEL if self.shard_draft else REPLICATED

  @property
  def warp(self):
    width = self.target.vocab_size
    return make_warp(_NUM_IDS.get(width, width), EOS_ID)


class _Abstract(NamedTuple):
  """A model of the pair without values: functions, shapes, placements."""

  model: types.Model
  params: Any
  param_formats: Any
  cache: Any
  cache_formats: Any


class Tokens(NamedTuple):
  """What callers need of a `DecodeState`; the caches stay behind."""

  tokens_BS: Any
  length_B: Any
  trace: types.Trace


def compile_loop(setup: Setup, num_draft: int | None = None) -> aot.Program:
  """The whole of decoding: encoders and the loop.

  Args:
    setup: what for.
    num_draft: gamma instead of the setup's; 0 is plain decoding, without a draft.
  """
  num_draft = setup.num_draft if num_draft is None else num_draft
  target = _target(setup, num_draft)
  params, formats = types.Params(target.params), types.Params(target.param_formats)
  drafter = autoregressive.no_draft
  if num_draft:
    draft = _draft(setup)
    drafter = model_draft(draft.model, setup.warp, num_draft)
    params = types.Params(target.params, draft.params)
    formats = types.Params(target.param_formats, draft.param_formats)
  while_loop = jax.lax.while_loop
  if setup.mesh.size > 1:
    drafter = shard_drafter(drafter, setup.mesh, REPLICATED)
    while_loop = shard_while_loop(setup.mesh, REPLICATED)

  def decode(params, inputs_BE, row_key_B, sampling):
    state = loop.decode(
      params,
      inputs_BE,
      row_key_B,
      sampling,
      target=target.model,
      drafter=drafter,
      verifier=verify.token_verifier,
      warp=setup.warp,
      max_len=max_length(setup.max_new_tokens),
      eos_id=EOS_ID,
      while_loop=while_loop,
    )
    return Tokens(state.tokens_BS, state.length_B, state.trace)

  rows = (_inputs(setup), _keys(setup), _sampling(setup))
  name = f'speculative loop, gamma {num_draft}' if num_draft else 'plain loop'
  placements = (formats, *_rows(setup, rows))
  return aot.compile_program(
    name, decode, (params, *rows), placements, options=setup.options
  )


def compile_target_step(setup: Setup, width: int) -> aot.Program:
  """The target over `width` tokens, to their warped laws; its cache is donated."""
  target = _target(setup, max(setup.num_draft, width - 1))

  def step(params, cache, tokens_BT, start_B, sampling):
    output, cache = target.model.extend(params, cache, tokens_BT, start_B)
    slot_BT = start_B[:, None] + 1 + jnp.arange(width)[None]
    return setup.warp(output.logits_BTV, sampling, slot_BT), cache

  return _compile_step(setup, f'target step, {width} wide', step, target, width)


def compile_draft_step(setup: Setup) -> aot.Program:
  """One token of the draft: its law, warped, and a draw; its cache is donated."""
  draft = _draft(setup)

  def step(params, cache, tokens_B1, start_B, sampling, row_key_B):
    output, cache = draft.model.extend(params, cache, tokens_B1, start_B)
    logq_BV = setup.warp(output.logits_BTV, sampling, start_B[:, None] + 1)[:, 0]
    return (rng.categorical(row_key_B, logq_BV), logq_BV), cache

  return _compile_step(setup, 'draft step', step, draft, 1, _keys(setup))


def compile_encoder(setup: Setup, name: str) -> aot.Program:
  """An encoder and the projections of its output: once a text.

  Args:
    setup: what for.
    name: 'target' or 'draft'.
  """
  part = _target(setup, setup.num_draft) if name == 'target' else _draft(setup)

  def encode(params, inputs_BE):
    return part.model.init(params, inputs_BE, num_slots=_num_slots(setup)).sources

  inputs = _inputs(setup)
  placements = (part.param_formats, _rows(setup, inputs))
  return aot.compile_program(
    f'{name} encoder',
    encode,
    (part.params, inputs),
    placements,
    options=setup.options,
  )


def param_bytes(setup: Setup) -> int:
  """Bytes of both models' parameters that a device holds, padding excluded."""
  total = 0
  for config, rules in (
    (setup.target, TENSOR_PARALLEL), (setup.draft, setup.draft_rules)
  ):  # fmt: skip
    placed = param_shardings(config, setup.mesh, rules)
    for name, leaf in _param_shapes(config).items():
      block = placed[name].shard_shape(leaf.shape)
      total += math.prod(block) * leaf.dtype.itemsize
  return total


def _param_shapes(config: T5Config) -> dict[str, jax.ShapeDtypeStruct]:
  return {
    name: jax.ShapeDtypeStruct(shape, config.dtype)
    for name, shape in expected_shapes(config).items()
  }


def _num_slots(setup: Setup, num_draft: int | None = None) -> int:
  num_draft = setup.num_draft if num_draft is None else num_draft
  return max_length(setup.max_new_tokens) + num_draft + 1


def _target(setup: Setup, num_draft: int) -> _Abstract:
  model = t5_model(setup.target)
  return _abstract(setup, model, setup.target, TENSOR_PARALLEL, num_draft)


def _draft(setup: Setup) -> _Abstract:
  model = t5_model(setup.draft)
  if setup.draft.vocab_size != setup.target.vocab_size:
    model = resize_vocab(model, setup.target.vocab_size)
  return _abstract(setup, model, setup.draft, setup.draft_rules, setup.num_draft)


def _abstract(
  setup: Setup, model: types.Model, config: T5Config, rules: Rules, num_draft: int
) -> _Abstract:
  params, placed = (
    flax.traverse_util.unflatten_dict(flat, sep='/')
    for flat in (_param_shapes(config), param_shardings(config, setup.mesh, rules))
  )
  if setup.mesh.size > 1:
    model = shard_model(model, setup.mesh, rules, cache_axes)
  init = functools.partial(model.init, num_slots=_num_slots(setup, num_draft))
  cache = jax.eval_shape(init, params, _inputs(setup))
  cache_placed = shardings(cache, cache_axes(cache), setup.mesh, rules)
  return _Abstract(
    model, params, aot.automatic(placed), cache, aot.automatic(cache_placed)
  )


def _compile_step(
  setup: Setup, name: str, step, part: _Abstract, width: int, *keys
) -> aot.Program:
  tokens_BT = jax.ShapeDtypeStruct((setup.batch_size, width), jnp.int32)
  start_B = jax.ShapeDtypeStruct((setup.batch_size,), jnp.int32)
  rows = (tokens_BT, start_B, _sampling(setup), *keys)
  return aot.compile_program(
    name,
    step,
    (part.params, part.cache, *rows),
    (part.param_formats, part.cache_formats, *_rows(setup, rows)),
    out_shardings=(None, part.cache_formats),
    donate=(1,),
    options=setup.options,
  )


def _rows(setup: Setup, tree: Any) -> Any:
  if setup.mesh.size == 1:
    return jax.tree.map(lambda leaf: everywhere(setup.mesh), tree)
  return shardings(tree, row_axes(tree), setup.mesh, REPLICATED)


def _inputs(setup: Setup) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((setup.batch_size, setup.max_source), jnp.int32)


def _keys(setup: Setup) -> Any:
  return jax.eval_shape(lambda: rng.row_keys(0, jnp.arange(setup.batch_size)))


def _sampling(setup: Setup) -> types.Sampling:
  return jax.eval_shape(lambda: make_sampling(setup.batch_size))
