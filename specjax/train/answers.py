"""A target's answers to sources, with its law at every token, and learning from them.

The laws are cut to the likeliest ids, so that they can be kept in a file. The draft
then learns those laws (Kim and Rush 2016; Hinton et al. 2015): cross-entropy to
the target's law raises sum_x min(p, q), cross-entropy to its likeliest id raises
the agreement of greedy decoding. `train.recipe` is the way without such a file.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress

from specjax.checkpoints import store
from specjax.core import autoregressive, rng, types
from specjax.core import warp as warps
from specjax.data import corpus, text
from specjax.models import t5
from specjax.train.config import DistillConfig
from specjax.train.train import teacher_forcing


class Answer(NamedTuple):
  """A source, the target's answer, and the target's law at each of its tokens.

  Attributes:
    source: ids with EOS.
    target: ids of the answer, EOS included if it came to it.
    top_ids_TK: uint16; the K likeliest ids, likeliest first.
    top_logp_TK: float16; their log-probabilities.
  """

  source: np.ndarray
  target: np.ndarray
  top_ids_TK: np.ndarray
  top_logp_TK: np.ndarray


class AnswerBatch(NamedTuple):
  """Padded answers; 0 pads sources and targets."""

  sources_BE: np.ndarray
  targets_BT: np.ndarray
  top_ids_BTK: np.ndarray
  top_logp_BTK: np.ndarray


def answer(
  checkpoint: store.Checkpoint,
  vocabulary: text.Vocabulary,
  sources: Sequence[Sequence[int]],
  *,
  temperature: float,
  seed: int,
  num_top: int = 16,
  max_new_tokens: int = 127,
  batch_size: int = 128,
) -> Iterator[tuple[int, Answer]]:
  """Lets the target answer sources and keeps its laws.

  Args:
    checkpoint: the target.
    vocabulary: of the pair.
    sources: ids with EOS.
    temperature: 0 is greedy. The laws that are kept are those at temperature 1.
    seed: of the sampling; a source's answer depends on it and on its number.
    num_top: K, ids kept of each law.
    max_new_tokens: longest answer.
    batch_size: rows decoded at once.

  Yields:
    The number of a source and its `Answer`, each source once.
  """
  model = t5.t5_model(checkpoint.config)
  params = jax.device_put(checkpoint.params)
  # A pad inside an answer would be taken for the end of it.
  warp = warps.make_warp(vocabulary.size, vocabulary.eos_id, (text.PAD_ID,))
  # Sources of equal length have answers of similar length: few rows wait for one.
  order = sorted(range(len(sources)), key=lambda row: len(sources[row]))
  groups = text.group_by_length([len(sources[row]) for row in order], batch_size)
  for padded, places in groups:
    rows = [order[place] for place in places]
    inputs_BE = jnp.asarray(
      text.pad([sources[row] for row in rows], padded, batch_size)
    )
    # The rows that fill up a batch stop at once.
    filler = np.arange(batch_size) >= len(rows)
    state = autoregressive.decode(
      types.Params(params),
      inputs_BE,
      rng.row_keys(seed, np.resize(rows, batch_size)),
      warps.make_sampling(
        batch_size,
        temperature=temperature,
        max_new_tokens=np.where(filler, 1, max_new_tokens),
      ),
      target=model,
      warp=warp,
      max_len=min(max_new_tokens, 2 * padded + 16) + 1,
      eos_id=vocabulary.eos_id,
    )
    tokens_BS, length_B = np.asarray(state.tokens_BS), np.asarray(state.length_B)
    num_slots = text.bucket_length(max(length_B), (16, 32, 48, 64, 96, 128))
    fed_BS = jnp.asarray(np.pad(tokens_BS, ((0, 0), (0, num_slots)))[:, :num_slots])
    top = _top_laws(params, inputs_BE, fed_BS, model=model, num_top=num_top)
    top_ids_BTK, top_logp_BTK = (np.asarray(x) for x in top)
    for i, row in enumerate(rows):
      num_tokens = length_B[i] - 1
      yield (
        row,
        Answer(
          np.asarray(sources[row], np.uint16),
          tokens_BS[i, 1 : length_B[i]].astype(np.uint16),
          top_ids_BTK[i, :num_tokens].astype(np.uint16),
          top_logp_BTK[i, :num_tokens].astype(np.float16),
        ),
      )


@functools.partial(jax.jit, static_argnames=('model', 'num_top'))
def _top_laws(params, inputs_BE, tokens_BS, *, model, num_top):
  """The likeliest ids of the law of each slot from 1 on, in one wide pass."""
  num_rows, num_slots = tokens_BS.shape
  cache = model.init(params, inputs_BE, num_slots=num_slots)
  start_B = jnp.zeros(num_rows, jnp.int32)
  output, _ = model.extend(params, cache, tokens_BS, start_B)
  logits_BTK, top_ids_BTK = jax.lax.top_k(output.logits_BTV, num_top)
  log_z_BT1 = jax.nn.logsumexp(output.logits_BTV, axis=-1, keepdims=True)
  return top_ids_BTK, logits_BTK - log_z_BT1


def answer_batches(
  answers: Iterable[Answer],
  buckets: Sequence[tuple[int, int]],
  tokens_per_batch: int,
  seed: str,
) -> Iterator[AnswerBatch]:
  """`corpus.group_pairs` as padded arrays; the last of a bucket has empty rows."""
  groups = corpus.group_pairs(answers, buckets, tokens_per_batch, seed)
  for (max_source, max_target), rows, group in groups:
    num_top = group[0].top_ids_TK.shape[-1]
    top_ids_BTK = np.zeros((rows, max_target, num_top), np.int32)
    top_logp_BTK = np.zeros((rows, max_target, num_top), np.float16)
    for i, each in enumerate(group):
      top_ids_BTK[i, : len(each.target)] = each.top_ids_TK
      top_logp_BTK[i, : len(each.target)] = each.top_logp_TK
    yield AnswerBatch(
      text.pad([each.source for each in group], max_source, rows),
      text.pad([each.target for each in group], max_target, rows),
      top_ids_BTK,
      top_logp_BTK,
    )


def endless_batches(
  answers: Sequence[Answer],
  buckets: Sequence[tuple[int, int]],
  tokens_per_batch: int,
  seed: int,
  start: int = 0,
) -> Iterator[AnswerBatch]:
  """Epochs of `answer_batches`, each shuffled anew, from batch `start` on."""

  def stream():
    for epoch in itertools.count():
      order = np.random.default_rng((seed, epoch)).permutation(len(answers))
      shuffled = (answers[i] for i in order)
      yield from answer_batches(shuffled, buckets, tokens_per_batch, f'{seed}/{epoch}')

  return itertools.islice(stream(), start, None)


def save_answers(path: Path, answers: Sequence[Answer]) -> None:
  """Writes answers to one `.npz` file."""
  columns = list(zip(*answers, strict=True))
  arrays: dict[str, Any] = {
    name: np.concatenate(column)
    for name, column in zip(Answer._fields, columns, strict=True)
  }
  with path.open('wb') as file:
    np.savez(
      file,
      source_lengths=np.asarray([len(source) for source in columns[0]]),
      target_lengths=np.asarray([len(target) for target in columns[1]]),
      **arrays,
    )


def load_answers(path: Path) -> list[Answer]:
  """Reads what `save_answers` wrote."""
  with np.load(path) as arrays:
    ends = {
      name: np.cumsum(arrays[f'{name}_lengths'])[:-1] for name in ('source', 'target')
    }
    columns = [
      np.split(arrays[name], ends['source' if name == 'source' else 'target'])
      for name in Answer._fields
    ]
  return [Answer(*fields) for fields in zip(*columns, strict=True)]


def answer_train_split(
  config: DistillConfig, checkpoint: store.Checkpoint, vocabulary: text.Vocabulary
) -> list[Answer]:
  """The target's answers to one epoch of the training sources."""
  examples = corpus.read_corpus('train')
  seed = config.fit.seed
  chosen = corpus.epoch_examples(examples, dict(config.data.mixture), seed, 0)
  sources = [
    corpus.encode_example(vocabulary, example, config.data.max_source).source
    for example in chosen
  ]
  num_sampled = round(len(sources) * config.sampled_fraction)
  answers = []
  for part, temperature in ((sources[:num_sampled], 1.0), (sources[num_sampled:], 0.0)):
    found = answer(
      checkpoint,
      vocabulary,
      part,
      temperature=temperature,
      seed=seed,
      num_top=config.num_top,
    )
    bar = rich.progress.track(found, f'answers at T={temperature:g}', len(part))
    answers += [each for _, each in bar]
  return answers


def answer_valid_split(
  config: DistillConfig,
  checkpoint: store.Checkpoint,
  vocabulary: text.Vocabulary,
  num_examples: int = 96,
) -> dict[str, list[Answer]]:
  """Greedy answers to the first valid sources of each task."""
  examples = corpus.read_corpus('valid')
  examples += corpus.fix_examples(examples)
  answers = {}
  for task, _ in config.data.mixture:
    chosen = [example for example in examples if example.task == task][:num_examples]
    sources = [
      corpus.encode_example(vocabulary, example, config.data.max_source).source
      for example in chosen
    ]
    found = answer(
      checkpoint,
      vocabulary,
      sources,
      temperature=0.0,
      seed=config.fit.seed,
      num_top=config.num_top,
    )
    answers[task] = [each for _, each in found]
  return answers


def distillation(
  model: t5.T5Config, hard_weight: float
) -> Callable[[Any, AnswerBatch], jax.Array]:
  """Cross-entropy of the draft to the target's laws, per token.

    (1 - w) * sum_x p(x) (-log q(x)) + w * (-log q(argmax p))

  with p renormalised over the ids that were kept.

  Args:
    model: the draft's shape.
    hard_weight: w in [0, 1].

  Returns:
    `(params, batch) -> loss`.
  """
  logits = teacher_forcing(model)

  def loss(params: Any, batch: AnswerBatch) -> jax.Array:
    targets_BT = jnp.asarray(batch.targets_BT)
    logits_BTV = logits(params, batch.sources_BE, targets_BT)
    log_z_BT1 = jax.nn.logsumexp(logits_BTV, axis=-1, keepdims=True)
    top_ids_BTK = jnp.asarray(batch.top_ids_BTK)
    logq_BTK = jnp.take_along_axis(logits_BTV, top_ids_BTK, -1) - log_z_BT1
    p_BTK = jax.nn.softmax(batch.top_logp_BTK.astype(jnp.float32), axis=-1)
    soft_BT = -jnp.sum(p_BTK * logq_BTK, axis=-1)
    losses_BT = (1 - hard_weight) * soft_BT - hard_weight * logq_BTK[..., 0]
    real_BT = targets_BT != text.PAD_ID
    return jnp.sum(losses_BT, where=real_BT) / jnp.sum(real_BT)

  return loss


def make_agreement(
  model: t5.T5Config, answers: Mapping[str, Sequence[Answer]]
) -> Callable[[Any], str]:
  """Per task, how well a draft predicts the target on held-out answers.

  Returns:
    `params -> text` with alpha at temperature 0 (how often the likeliest ids
    agree) and at 1 (the mean of sum_x min(p, q) over the kept ids).
  """
  logits = teacher_forcing(model)

  @jax.jit
  def count(params, batch):
    logits_BTV = logits(params, batch.sources_BE, batch.targets_BT)
    real_BT = batch.targets_BT != text.PAD_ID
    same_BT = jnp.argmax(logits_BTV, axis=-1) == batch.top_ids_BTK[..., 0]
    q_BTK = jnp.take_along_axis(
      jax.nn.softmax(logits_BTV, axis=-1), batch.top_ids_BTK, axis=-1
    )
    p_BTK = jnp.exp(batch.top_logp_BTK.astype(jnp.float32))
    shared_BT = jnp.sum(jnp.minimum(p_BTK, q_BTK), axis=-1)
    sums = [jnp.sum(x, where=real_BT) for x in (same_BT, shared_BT)]
    return jnp.stack([*sums, jnp.sum(real_BT)])

  batches = {
    task: list(answer_batches(task_answers, ((128, 128),), 4096, '0'))
    for task, task_answers in answers.items()
  }

  def evaluate(params: Any) -> str:
    parts = []
    for task, task_batches in batches.items():
      same, shared, real = sum(count(params, batch) for batch in task_batches)
      parts.append(f'{task}: alpha {same / real:.3f} (T=0), {shared / real:.3f} (T=1)')
    return '; '.join(parts)

  return evaluate
