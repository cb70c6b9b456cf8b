"""Trains a T5 on the embedded corpus: `python -m specjax.train.train --config FILE`.

Teacher forcing, cross-entropy over the targets' tokens, `fit`'s Adafactor.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import tyro

from specjax.checkpoints import store
from specjax.data import corpus, text
from specjax.models import t5
from specjax.train.config import DataConfig, TrainConfig, load_config, run_command
from specjax.train.fit import TrainState, fit

VOCABULARY_PATH = Path(__file__).parents[1] / 'assets' / 'vocab.model'


def shift_right(targets_BT: jax.Array) -> jax.Array:
  """Decoder inputs: the start token 0, then all targets but the last."""
  return jnp.pad(targets_BT, ((0, 0), (1, 0)))[:, :-1]


def init_params(config: t5.T5Config, seed: int) -> Any:
  """T5's random initial parameters."""
  tokens = jnp.zeros((1, 1), jnp.int32)
  init = jax.jit(t5.Transformer(config).init)
  return init(jax.random.key(seed), tokens, tokens)['params']


def teacher_forcing(model: t5.T5Config) -> Callable[..., jax.Array]:
  """`(params, sources_BE, targets_BT) -> logits_BTV`, the law of each target."""
  network = t5.Transformer(model)

  def logits(params: Any, sources_BE: Any, targets_BT: Any) -> Any:
    return network.apply({'params': params}, sources_BE, shift_right(targets_BT))

  return logits


def cross_entropy(
  model: t5.T5Config, z_loss: float = 1e-4
) -> Callable[[Any, corpus.Batch], jax.Array]:
  """The mean of -log p(target token) over all tokens that are not padding.

  Args:
    model: the network's shape.
    z_loss: weight of log(Z)^2, which keeps the logits' normaliser near 1.

  Returns:
    `(params, batch) -> loss`.
  """
  logits = teacher_forcing(model)

  def loss(params: Any, batch: corpus.Batch) -> jax.Array:
    targets_BT = jnp.asarray(batch.targets_BT)
    logits_BTV = logits(params, batch.sources_BE, targets_BT)
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    chosen_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], -1)[..., 0]
    real_BT = targets_BT != text.PAD_ID
    losses_BT = log_z_BT - chosen_BT + z_loss * jnp.square(log_z_BT)
    return jnp.sum(losses_BT, where=real_BT) / jnp.sum(real_BT)

  return loss


def corpus_batches(
  config: DataConfig, vocabulary: text.Vocabulary, seed: int, start: int = 0
) -> Iterator[corpus.Batch]:
  """Endless training batches; the stream from `start` on is the same stream."""
  examples = corpus.read_corpus('train')

  def stream():
    for epoch in itertools.count():
      chosen = corpus.epoch_examples(examples, dict(config.mixture), seed, epoch)
      yield from corpus.batch_pairs(
        (corpus.encode_example(vocabulary, e, config.max_source) for e in chosen),
        config.buckets,
        config.tokens_per_batch,
        f'{seed}/{epoch}',
      )

  return itertools.islice(stream(), start, None)


def make_evaluate(
  config: TrainConfig, vocabulary: text.Vocabulary, num_examples: int = 160
) -> Callable[[Any], str]:
  """Per task, teacher-forced loss and accuracy per token on the valid split."""
  logits = teacher_forcing(config.model)
  examples = corpus.read_corpus('valid')
  examples += corpus.fix_examples(examples)
  source, target = config.data.buckets[-1]

  @jax.jit
  def count(params, batch):
    targets_BT = batch.targets_BT
    real_BT = targets_BT != text.PAD_ID
    logits_BTV = logits(params, batch.sources_BE, targets_BT)
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)
    right_BT = real_BT & (jnp.argmax(logits_BTV, -1) == targets_BT)
    return jnp.stack([jnp.sum(losses_BT, where=real_BT), right_BT.sum(), real_BT.sum()])

  batches = {}
  for task, _ in config.data.mixture:
    pairs = [
      corpus.encode_example(vocabulary, e, source) for e in examples if e.task == task
    ]
    batches[task] = list(
      corpus.batch_pairs(pairs[:num_examples], [(source, target)], 4096, '0')
    )

  def evaluate(params: Any) -> str:
    parts = []
    for task, task_batches in batches.items():
      loss, right, real = sum(count(params, batch) for batch in task_batches)
      parts.append(f'{task}: loss {loss / real:.3f}, accuracy {right / real:.3f}')
    return '; '.join(parts)

  return evaluate


def train(config: TrainConfig, folder: Path, *, resume: bool = False) -> TrainState:
  """Trains a T5 and leaves `model.safetensors` (bfloat16) in `folder`."""
  vocabulary = text.sentencepiece_vocabulary(VOCABULARY_PATH)
  began = time.monotonic()

  def export(params, step):
    notes = {
      'step': step,
      'seed': config.fit.seed,
      'corpus_sha256': corpus.corpus_sha256(),
      'seconds_of_this_run': round(time.monotonic() - began),
    }
    store.save(folder / 'model.safetensors', params, config.model, notes=notes)

  return fit(
    config.fit,
    cross_entropy(config.model),
    init_params(config.model, config.fit.seed),
    lambda step: corpus_batches(config.data, vocabulary, config.fit.seed, step),
    folder,
    export=export,
    evaluate=make_evaluate(config, vocabulary),
    resume=resume,
  )


def main(
  config: Annotated[str, tyro.conf.arg(help='A file that defines CONFIG.')],
  folder: Annotated[str, tyro.conf.arg(help='Where checkpoints go.')],
  resume: Annotated[bool, tyro.conf.arg(help='Go on from the checkpoint.')] = False,
  total_steps: Annotated[
    int | None, tyro.conf.arg(help='Replaces fit.total_steps.')
  ] = None,
) -> None:
  """Trains a T5 on the embedded corpus."""
  loaded = load_config(config, TrainConfig)
  if total_steps is not None:
    schedule = dataclasses.replace(loaded.fit, total_steps=total_steps)
    loaded = dataclasses.replace(loaded, fit=schedule)
  train(loaded, Path(folder).expanduser(), resume=resume)


if __name__ == '__main__':
  run_command(main)
