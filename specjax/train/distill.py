"""Distils a draft from a target: `python -m specjax.train.distill --config FILE`.

What a draft must predict is the target, not the corpus. So the target first
answers the training sources itself (greedily, and a part by sampling), and its
law at every position of its answers is kept, cut to the likeliest ids. The draft
then learns those laws (Kim and Rush 2016; Hinton et al. 2015): cross-entropy to
the target's law raises sum_x min(p, q), cross-entropy to its likeliest id raises
the agreement of greedy decoding.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro

from specjax.checkpoints import store
from specjax.data import corpus, text
from specjax.models import t5
from specjax.train.answers import (
  Answer,
  AnswerBatch,
  answer_batches,
  answer_train_split,
  answer_valid_split,
  endless_batches,
  load_answers,
  save_answers,
)
from specjax.train.config import DistillConfig, load_config, run_command
from specjax.train.fit import TrainState, fit
from specjax.train.train import VOCABULARY_PATH, init_params, teacher_forcing


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


def distill(
  config: DistillConfig,
  target: Path,
  folder: Path,
  *,
  resume: bool = False,
) -> TrainState:
  """Distils a draft and leaves `model.safetensors` (bfloat16) in `folder`.

  Answers are kept in `folder/answers.npz` and used again if they exist: remove
  the file when the target has changed.

  Args:
    config: the draft and how it learns.
    target: weights of the target.
    folder: where everything goes; made if absent.
    resume: go on from the checkpoint in `folder`.
  """
  vocabulary = text.sentencepiece_vocabulary(VOCABULARY_PATH)
  folder.mkdir(parents=True, exist_ok=True)
  began = time.monotonic()
  path = folder / 'answers.npz'
  teacher = store.load(target)
  if path.is_file():
    answers = load_answers(path)
  else:
    answers = answer_train_split(config, teacher, vocabulary)
    save_answers(path, answers)
  held_out = answer_valid_split(config, teacher, vocabulary)

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
    lambda step: endless_batches(
      answers, config.data.buckets, config.data.tokens_per_batch, config.fit.seed, step
    ),
    folder,
    export=export,
    evaluate=make_agreement(config.model, held_out),
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
  distill(
    loaded,
    Path(target).expanduser(),
    Path(folder).expanduser(),
    resume=resume,
  )


if __name__ == '__main__':
  run_command(main)
