"""Whose texts a draft learns on, and the target's law at each of their prefixes.

Everything that depends on the draft's present parameters goes through the project's
own compiled loop, with parameters for arguments: new parameters compile nothing.
"""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core import autoregressive, loop, rng, types, verify
from specjax.core import warp as warps
from specjax.data import corpus, text
from specjax.drafters import model_draft
from specjax.train import divergences, online
from specjax.train.answers import Answer
from specjax.train.recipe import Recipe
from specjax.train.train import shift_right

Prepare = Callable[[Any, int, corpus.Batch], 'LawBatch']


class LawBatch(NamedTuple):
  """Texts and the target's law at each of their prefixes.

  Attributes:
    sources_BE: int32; 0 pads.
    targets_BT: int32; 0 pads: positions that nothing is learnt from.
    logp_BTV: float32; the target's log-law of each target given those before it;
      -inf for padding ids.
    tvd_weight: float32 scalar, see `divergences.kl_then_tvd`.
  """

  sources_BE: jax.Array
  targets_BT: jax.Array
  logp_BTV: jax.Array
  tvd_weight: jax.Array


def log_law(logits_BTV: jax.Array, size: int, temperature: float) -> jax.Array:
  """log softmax(logits / temperature) over the ids below `size`, -inf from there."""
  is_real_11V = np.arange(logits_BTV.shape[-1])[None, None] < size
  return jax.nn.log_softmax(
    jnp.where(is_real_11V, logits_BTV / temperature, -jnp.inf), axis=-1
  )


def objective(
  recipe: Recipe, logits: Callable[..., jax.Array], size: int
) -> Callable[[Any, LawBatch], jax.Array]:
  """The mean divergence of the draft's laws from the target's over real positions.

  Args:
    recipe: which divergence.
    logits: the draft's, `(params, sources_BE, targets_BT) -> logits_BTV`, as of
      `train.teacher_forcing`.
    size: of the vocabulary; ids from there on are padding.

  Returns:
    `(params, batch) -> loss`.
  """

  def loss(params: Any, batch: LawBatch) -> jax.Array:
    divergence = {
      'cross_entropy': divergences.forward_kl,  # p is then a point mass
      'forward_kl': divergences.forward_kl,
      'reverse_kl': divergences.reverse_kl,
      'jsd': divergences.jsd(recipe.beta),
      'tvd': divergences.tvd,
      'kl_then_tvd': divergences.kl_then_tvd(batch.tvd_weight),
    }[recipe.divergence]
    logits_BTV = logits(params, batch.sources_BE, jnp.asarray(batch.targets_BT))
    logq_BTV = log_law(logits_BTV, size, recipe.temperature)
    real_BT = batch.targets_BT != text.PAD_ID
    return divergences.masked_mean(divergence(batch.logp_BTV, logq_BTV), real_BT)

  return loss


@functools.partial(jax.jit, static_argnames=('model', 'size', 'temperature'))
def score(params, sources_BE, targets_BT, *, model, size, temperature):
  """float32 [B, T, V]; a model's log-laws at a text's prefixes, in one wide pass."""
  num_rows, length = targets_BT.shape
  cache = model.init(params, sources_BE, num_slots=length)
  fed_BT = shift_right(targets_BT)
  output, _ = model.extend(params, cache, fed_BT, jnp.zeros(num_rows, jnp.int32))
  return log_law(output.logits_BTV, size, temperature)


@functools.partial(jax.jit, static_argnames=('num_ids',))
def point_masses(targets_BT, *, num_ids):
  """float32 [B, T, V]; the log-law that is certain of each target."""
  hit_BTV = jnp.arange(num_ids)[None, None] == targets_BT[..., None]
  return jnp.where(hit_BTV, jnp.float32(0), jnp.float32(-jnp.inf))


class Sampler(NamedTuple):
  """Texts of the draft's own, and what online decoding emits.

  Attributes:
    draw: `(draft params, sources_BE, key seed, T) -> targets_BT`, from the draft.
    serve: `(draft params, sources_BE, key seed, T) -> (targets_BT, logits_BTV)`:
      speculative decoding of the target, with its laws.
  """

  draw: Callable[..., jax.Array]
  serve: Callable[..., tuple[jax.Array, jax.Array]]


def make_sampler(
  recipe: Recipe,
  target: types.Model,
  target_params: Any,
  draft: types.Model,
  num_ids: int,
  vocabulary: text.Vocabulary,
) -> Sampler:
  """A `Sampler` over the compiled loop; see `Recipe` for temperature and gamma."""
  # A pad inside a text would be taken for the end of it.
  warp = warps.make_warp(vocabulary.size, vocabulary.eos_id, (text.PAD_ID,))
  drafter = online.recording(model_draft(draft, warp, recipe.num_draft), num_ids)

  def rows(sources_BE, seed, length):
    # Rows of padding, which fill up a batch, stop at once and are left out.
    is_real_B = np.asarray(np.asarray(sources_BE).any(axis=1))
    num_rows = len(is_real_B)
    sampling = warps.make_sampling(
      num_rows,
      temperature=recipe.temperature,
      max_new_tokens=np.where(is_real_B, length, 1),
    )
    keys = rng.row_keys(seed, np.arange(num_rows))
    return jnp.asarray(is_real_B)[:, None], (jnp.asarray(sources_BE), keys, sampling)

  static: dict[str, Any] = {'warp': warp, 'eos_id': vocabulary.eos_id}

  def draw(params, sources_BE, seed, length):
    is_real_B1, args = rows(sources_BE, seed, length)
    state = autoregressive.decode(
      types.Params(params), *args, target=draft, max_len=length + 1, **static
    )
    return jnp.where(is_real_B1, state.tokens_BS[:, 1 : length + 1], text.PAD_ID)

  def serve(params, sources_BE, seed, length):
    is_real_B1, args = rows(sources_BE, seed, length)
    state = loop.decode(
      types.Params(target_params, params),
      *args,
      target=target,
      drafter=drafter,
      verifier=verify.token_verifier,
      max_len=length + 1,
      **static,
    )
    targets_BT, logits_BTV = online.replay(state)
    kept_BT = jnp.where(is_real_B1, targets_BT[:, :length], text.PAD_ID)
    return kept_BT, logits_BTV[:, :length]

  return Sampler(draw, serve)


def make_prepare(
  recipe: Recipe,
  target: types.Model,
  target_params: Any,
  draft: types.Model,
  num_ids: int,
  vocabulary: text.Vocabulary,
  *,
  total_steps: int,
  seed: int,
) -> Prepare:
  """What becomes of a batch before a step: texts by `recipe.data`, laws, weight.

  Args:
    recipe: data, divergence, temperature.
    target: the target.
    target_params: its frozen parameters.
    draft: the draft model.
    num_ids: V, the width of both models' logits.
    vocabulary: of both; ids from its size on are padding.
    total_steps: of the run.
    seed: of the samples; a step's depend on it, on the step and on the draft.

  Returns:
    `(draft params, step, batch) -> LawBatch`. The batch's targets are used by data
    'fixed', 'target' and 'mixed'; otherwise they say how long texts may be.
  """
  sampler = make_sampler(recipe, target, target_params, draft, num_ids, vocabulary)
  size = vocabulary.size

  def laws(sources_BE, targets_BT):
    if recipe.divergence == 'cross_entropy':
      return point_masses(targets_BT, num_ids=num_ids)
    return score(
      target_params,
      sources_BE,
      targets_BT,
      model=target,
      size=size,
      temperature=recipe.temperature,
    )

  def prepare(params: Any, step: int, batch: corpus.Batch) -> LawBatch:
    sources_BE, targets_BT = (jnp.asarray(each) for each in batch)
    rnd = random.Random(f'{seed}/{step}')
    fraction = {'draft': 1.0, 'mixed': recipe.draft_fraction}.get(recipe.data, 0.0)
    is_drafted, key_seed = rnd.random() < fraction, rnd.getrandbits(31)
    length = targets_BT.shape[1]
    weight = jnp.float32(recipe.tvd_weight(step, total_steps))
    if recipe.data == 'online':
      targets_BT, logits_BTV = sampler.serve(params, batch[0], key_seed, length)
      if recipe.divergence != 'cross_entropy':
        logp_BTV = log_law(logits_BTV, size, recipe.temperature)
        return LawBatch(sources_BE, targets_BT, logp_BTV, weight)
    elif is_drafted:
      targets_BT = sampler.draw(params, batch[0], key_seed, length)
    return LawBatch(sources_BE, targets_BT, laws(sources_BE, targets_BT), weight)

  return prepare


def answer_pairs(answers: Sequence[Answer]) -> list[corpus.Pair]:
  """Sources with the target's answers to them, without their laws."""
  return [corpus.Pair(list(each.source), list(each.target)) for each in answers]


def pair_batches(
  pairs: Sequence[corpus.Pair],
  buckets: Sequence[tuple[int, int]],
  tokens_per_batch: int,
  seed: int,
  start: int = 0,
) -> Iterator[corpus.Batch]:
  """Epochs of `corpus.batch_pairs`, each shuffled anew, from batch `start` on."""
  step = 0
  epoch = 0
  while True:
    order = np.random.default_rng((seed, epoch)).permutation(len(pairs))
    shuffled = (pairs[i] for i in order)
    batches = corpus.batch_pairs(shuffled, buckets, tokens_per_batch, f'{seed}/{epoch}')
    for batch in batches:
      if step >= start:
        yield batch
      step += 1
    epoch += 1
