"""Distils a draft from a target: `python -m specjax.train.distill --config FILE`.

What a draft must predict is the target, not the corpus. So the target first
answers the training sources itself (greedily, and a part by sampling), and its
law at every position of its answers is kept, cut to the likeliest ids. The draft
then learns those laws (Kim and Rush 2016; Hinton et al. 2015): cross-entropy to
the target's law raises sum_x min(p, q), cross-entropy to its likeliest id raises
the agreement of greedy decoding.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress
import tyro

from specjax.checkpoints import store
from specjax.core import autoregressive, rng, types
from specjax.core import warp as warps
from specjax.data import corpus, text
from specjax.models import t5
from specjax.train.config import DistillConfig, load_config
from specjax.train.fit import TrainState, fit
from specjax.train.train import VOCABULARY_PATH, init_params, make_evaluate, shift_right


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
  lengths = [len(source) for source in sources]
  for padded, rows in text.group_by_length(lengths, batch_size):
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
    top = _top_laws(params, inputs_BE, state.tokens_BS, model=model, num_top=num_top)
    top_ids_BTK, top_logp_BTK = (np.asarray(x) for x in top)
    tokens_BS, length_B = np.asarray(state.tokens_BS), np.asarray(state.length_B)
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
  network = t5.Transformer(model)

  def loss(params: Any, batch: AnswerBatch) -> jax.Array:
    targets_BT = jnp.asarray(batch.targets_BT)
    logits_BTV = network.apply(
      {'params': params}, batch.sources_BE, shift_right(targets_BT)
    )
    log_z_BT1 = jax.nn.logsumexp(logits_BTV, axis=-1, keepdims=True)
    top_ids_BTK = jnp.asarray(batch.top_ids_BTK)
    logq_BTK = jnp.take_along_axis(logits_BTV, top_ids_BTK, -1) - log_z_BT1
    p_BTK = jax.nn.softmax(batch.top_logp_BTK.astype(jnp.float32), axis=-1)
    soft_BT = -jnp.sum(p_BTK * logq_BTK, axis=-1)
    losses_BT = (1 - hard_weight) * soft_BT - hard_weight * logq_BTK[..., 0]
    real_BT = targets_BT != text.PAD_ID
    return jnp.sum(losses_BT, where=real_BT) / jnp.sum(real_BT)

  return loss


def batch_answers(
  answers: Sequence[Answer],
  buckets: Sequence[tuple[int, int]],
  tokens_per_batch: int,
  seed: int,
  start: int = 0,
) -> Iterator[AnswerBatch]:
  """Endless batches of answers; each epoch is shuffled anew."""
  num_top = answers[0].top_ids_TK.shape[-1]

  def stream():
    for epoch in itertools.count():
      order = np.random.default_rng((seed, epoch)).permutation(len(answers))
      groups = corpus.group_pairs(
        (answers[i] for i in order), buckets, tokens_per_batch, f'{seed}/{epoch}'
      )
      for (max_source, max_target), rows, group in groups:
        top_ids = np.zeros((rows, max_target, num_top), np.int32)
        top_logp = np.zeros((rows, max_target, num_top), np.float16)
        for i, each in enumerate(group):
          top_ids[i, : len(each.target)] = each.top_ids_TK
          top_logp[i, : len(each.target)] = each.top_logp_TK
        yield AnswerBatch(
          text.pad([each.source for each in group], max_source, rows),
          text.pad([each.target for each in group], max_target, rows),
          top_ids,
          top_logp,
        )

  return itertools.islice(stream(), start, None)


def save_answers(path: Path, answers: Sequence[Answer]) -> None:
  """Writes answers to one `.npz` file."""
  columns = list(zip(*answers, strict=True))
  with path.open('wb') as file:
    np.savez(
      file,
      source_lengths=np.asarray([len(source) for source in columns[0]]),
      target_lengths=np.asarray([len(target) for target in columns[1]]),
      **{
        name: np.concatenate(column)
        for name, column in zip(Answer._fields, columns, strict=True)
      },
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


def answer_corpus(
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
    for _, each in rich.progress.track(
      found, f'answers at T={temperature:g}', total=len(part)
    ):
      answers.append(each)
  return answers


def distill(
  config: DistillConfig, target: Path, folder: Path, *, resume: bool = False
) -> TrainState:
  """Distils a draft and leaves `model.safetensors` (bfloat16) in `folder`.

  Answers are kept in `folder/answers.npz` and used again if they exist: remove
  the file when the target has changed.
  """
  vocabulary = text.sentencepiece_vocabulary(VOCABULARY_PATH)
  folder.mkdir(parents=True, exist_ok=True)
  began = time.monotonic()
  path = folder / 'answers.npz'
  if path.is_file():
    answers = load_answers(path)
  else:
    answers = answer_corpus(config, store.load(target), vocabulary)
    save_answers(path, answers)

  def export(params, step):
    notes = {
      'step': step,
      'seed': config.fit.seed,
      'corpus_sha256': corpus.corpus_sha256(),
      'answers': len(answers),
      'seconds_of_this_run': round(time.monotonic() - began),
    }
    store.save(folder / 'model.safetensors', params, config.model, notes=notes)

  return fit(
    config.fit,
    distillation(config.model, config.hard_weight),
    init_params(config.model, config.fit.seed),
    lambda step: batch_answers(
      answers, config.data.buckets, config.data.tokens_per_batch, config.fit.seed, step
    ),
    folder,
    export=export,
    evaluate=make_evaluate(config, vocabulary),
    resume=resume,
  )


def main(
  config: Annotated[str, tyro.conf.arg(help='A file that defines CONFIG.')],
  target: Annotated[str, tyro.conf.arg(help="The target's weights.")],
  folder: Annotated[str, tyro.conf.arg(help='Where checkpoints go.')],
  resume: Annotated[bool, tyro.conf.arg(help='Go on from the checkpoint.')] = False,
  total_steps: Annotated[
    int | None, tyro.conf.arg(help='Replaces fit.total_steps.')
  ] = None,
) -> None:
  """Distils a draft from a target on the embedded corpus."""
  loaded = load_config(config, DistillConfig)
  if total_steps is not None:
    schedule = dataclasses.replace(loaded.fit, total_steps=total_steps)
    loaded = dataclasses.replace(loaded, fit=schedule)
  distill(loaded, Path(target).expanduser(), Path(folder).expanduser(), resume=resume)


if __name__ == '__main__':
  tyro.cli(main)
