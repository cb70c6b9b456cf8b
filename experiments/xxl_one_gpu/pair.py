"""A pair of random weights on the device, and how its loops are run and timed."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp

from specjax.checkpoints.leaves import expected_shapes
from specjax.core import loop, rng, warp
from specjax.core.types import Drafter, Model, Params
from specjax.eval import interleave
from specjax.models.t5 import T5Config, t5_model
from specjax.testing.controlled import controlled_verifier


@dataclasses.dataclass(frozen=True)
class Size:
  """How large the experiment is.

  Attributes:
    target: its shape, in the dtype of the experiment.
    draft: likewise.
    identity: of the float32 comparison; its dtype is float32.
    source: E, source positions, all of them real.
    tokens: new tokens of each output.
    gamma: drafted tokens of the whole loop.
    gammas: drafted tokens that verification is timed for, the loop's own first.
    repeats: timed runs of each program, after one that compiles.
    buffers: sizes in bytes of the arrays that are copied.
    samples: outputs for each rule of the exactness check.
  """

  target: T5Config
  draft: T5Config
  identity: T5Config
  source: int = 512
  tokens: int = 128
  gamma: int = 7
  gammas: tuple[int, ...] = (7, 1, 3, 15)
  repeats: int = 5
  buffers: tuple[int, ...] = (2**28, 2**30, 2**31)
  samples: int = 2**18

  @property
  def num_slots(self) -> int:
    """Of every cache, so that all loops read the same number of bytes."""
    return self.tokens + max(*self.gammas, self.gamma) + 2


def sizes(target: str, draft: str, gamma: int = 7) -> Size:
  """A `Size` by the names of `T5Config.from_size`, or 'tiny' for both.

  Raises:
    ValueError: an unknown name, or vocabularies that differ.
  """
  if target == draft == 'tiny':
    fields = {'vocab_size': 32, 'emb_dim': 16, 'num_heads': 2, 'head_dim': 8}
    fields |= {'mlp_dim': 32, 'num_encoder_layers': 1, 'num_decoder_layers': 1}
    config = T5Config(**fields, dtype='bfloat16')
    identity = dataclasses.replace(config, dtype='float32')
    tiny = {'source': 8, 'tokens': 12, 'repeats': 2, 'buffers': (2**16,)}
    few = {'gamma': gamma, 'gammas': (gamma,), 'samples': 2**12}
    return Size(config, config, identity, **tiny, **few)
  configs = [T5Config.from_size(name, dtype='bfloat16') for name in (target, draft)]
  if configs[0].vocab_size != configs[1].vocab_size:
    raise ValueError(
      f'draft: {draft} has {configs[1].vocab_size} ids, {target} has '
      f'{configs[0].vocab_size}; choose two of one family'
    )
  gammas = (gamma, *(other for other in (1, 3, 7, 15) if other != gamma))
  identity = T5Config.from_size('t5_1_1_small')
  return Size(*configs, identity, gamma=gamma, gammas=gammas)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _random_leaf(key, shape, dtype, deviation):
  if deviation is None:
    return jnp.ones(shape, dtype)
  return deviation * jax.random.normal(key, shape, dtype)


def random_params(config: T5Config, seed: int) -> dict[str, Any]:
  """A T5 of random weights in `config.dtype`, drawn leaf by leaf on the device."""
  key, leaves = jax.random.key(seed), {}
  for index, (name, shape) in enumerate(expected_shapes(config).items()):
    deviation: float | None = 1.0
    if name.endswith('scale'):
      deviation = None
    elif name.endswith('kernel'):
      deviation = shape[0] ** -0.5
    if name.endswith('query/kernel'):
      deviation = (shape[0] * config.head_dim) ** -0.5
    leaf_key = jax.random.fold_in(key, index)
    leaves[name] = _random_leaf(leaf_key, shape, config.dtype, deviation)
  return flax.traverse_util.unflatten_dict(leaves, sep='/')


def num_bytes(tree: Any) -> int:
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_per_token(config: T5Config, params: Any, cache: Any) -> int:
  """What one step of the decoder has to read: its weights and its caches.

  Cross-attention's key and value kernels belong to the encoder's work. Of an
  embedding that is not the head, a row is read.
  """
  leaves = flax.traverse_util.flatten_dict(params['decoder'], sep='/')
  once = ('encoder_decoder_attention/key/', 'encoder_decoder_attention/value/')
  weights = [leaf for name, leaf in leaves.items() if not any(o in name for o in once)]
  if config.logits_via_embedding:
    weights.append(params['token_embedder']['embedding'])
  return num_bytes((weights, cache))


def peak_bytes() -> int | None:
  """The most memory that was in use so far; None where a device does not say."""
  stats = jax.devices()[0].memory_stats() or {}
  return stats.get('peak_bytes_in_use')


def _given(params, inputs_BE, *, num_slots):
  """An `init` whose parameters are the cache."""
  del inputs_BE, num_slots
  return params


@functools.partial(jax.jit, static_argnames=('target', 'drafter', 'warp', 'max_len'))
def _run_rounds(
  params, state, row_key_B, sampling, alpha, *, target, drafter, warp, max_len
):
  """`loop.decode` less the encoders, at acceptance rate alpha. TIMING ONLY."""

  def body(state):
    return loop.step(
      params,
      state,
      row_key_B,
      sampling,
      target=target,
      drafter=drafter,
      verifier=controlled_verifier(alpha),
      warp=warp,
      max_len=max_len,
      eos_id=-1,
    )

  return jax.lax.while_loop(lambda state: ~jnp.all(state.done_B), body, state)


class Bench:
  """The pair and what its sections share; `build` puts the pair on the device."""

  def __init__(self, size: Size, temperature: float = 0.0):
    self.size = size
    self.warp = warp.make_warp()
    self.target, self.draft = t5_model(size.target), t5_model(size.draft)
    self.row_key_B = rng.row_keys(0, jnp.arange(1))
    self.inputs_BE = jnp.ones((1, size.source), jnp.int32)
    self.sampling = warp.make_sampling(
      1, temperature=temperature, max_new_tokens=size.tokens
    )
    self.params = Params(None)
    self._caches: dict[Model, Any] = {}

  def build(self) -> None:
    size = self.size
    self.params = Params(random_params(size.target, 0), random_params(size.draft, 1))
    jax.block_until_ready(self.params)

  def cache(self, model: Model, params: Any) -> Any:
    """An empty cache: what it holds does not change a step's cost."""
    if model not in self._caches:
      init = functools.partial(model.init, num_slots=self.size.num_slots)
      shapes = jax.eval_shape(init, params, self.inputs_BE)
      zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
      self._caches[model] = zeros
    return self._caches[model]

  def rounds(self, drafter: Drafter, draft_cache: Any = None) -> Callable:
    """(alpha, row_key_B) -> final state: all rounds of an output."""
    max_len = self.size.num_slots - drafter.num_draft - 1
    target_cache = self.cache(self.target, self.params.target)
    state = loop.start(
      Params(target_cache, draft_cache),
      self.inputs_BE,
      self.sampling,
      target=self.target._replace(init=_given),
      drafter=drafter._replace(init=_given),
      max_len=max_len,
    )

    def run(alpha, row_key_B=self.row_key_B):
      return _run_rounds(
        self.params,
        state,
        row_key_B,
        self.sampling,
        jnp.float32(alpha),
        target=self.target,
        drafter=drafter,
        warp=self.warp,
        max_len=max_len,
      )

    return run


def timed(run: Callable[[], Any], count: int, repeats: int) -> dict[str, float]:
  """Milliseconds for each of `count` iterations: median and quartiles of warm runs."""
  warm, first = interleave.interleave({'run': run}, repeats)
  samples = warm['run']
  return {
    'ms': 1e3 * samples.median / count,
    'ms_low': 1e3 * samples.low / count,
    'ms_high': 1e3 * samples.high / count,
    'compile_seconds': max(first['run'] - samples.median, 0.0),
  }
