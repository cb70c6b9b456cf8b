"""Training throughput beside a minimal loop: `python -m specjax.train.bench`.

Both train the same network on the same batches of one shape, in turns. The minimal
loop is what one would write by hand with optax: it is given its batches ready made
and neither logs, checks, measures gradients nor saves.
"""

import dataclasses
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import optax
import tyro

from specjax.data import corpus
from specjax.train import loss, train
from specjax.train.config import TrainConfig, load_config, run_command
from specjax.train.fit import fit
from specjax.train.optimizer import make_optimizer


class Turn(NamedTuple):
  """Seconds that the same number of steps took in each loop."""

  ours: float
  minimal: float


def minimal_loop(
  loss_fn: Callable[[Any, Any], jax.Array],
  optimizer: optax.GradientTransformation,
  params: Any,
) -> Callable[[Sequence[corpus.Batch]], float]:
  """A loop of a few lines: `batches -> seconds` that it takes to train on them."""

  def update(state, batch):
    params, opt_state = state
    value, gradients = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  update = jax.jit(update, donate_argnums=0)
  params = jax.tree.map(jax.numpy.copy, params)
  state = params, optimizer.init(params)

  def run(batches: Sequence[corpus.Batch]) -> float:
    nonlocal state
    began = time.perf_counter()
    for batch in batches:
      state, _ = update(state, batch)
    jax.block_until_ready(state)
    return time.perf_counter() - began

  return run


def compare(config: TrainConfig, steps: int, turns: int) -> tuple[list[Turn], int]:
  """Trains in both loops, in turns of `steps` steps.

  Args:
    config: of the run; it must have one bucket, so that there is one program each.
    steps: of a turn.
    turns: after one of both that compiles and does not count.

  Returns:
    The turns, and the padded tokens of a batch.
  """
  vocabulary, _ = train.find_vocabulary(config.data.vocabulary, None)
  sources = train.open_sources(config.data, vocabulary)
  batches = functools.partial(train.source_batches, config, sources)
  ready = list(itertools.islice(batches(0), steps))
  params = train.init_params(config.model, config.fit.seed)
  loss_fn, factor = loss.from_config(config.model, config.loss)
  run = minimal_loop(loss_fn, make_optimizer(config.fit), params)
  found: list[Turn] = []
  began = time.perf_counter()

  def observe(params: Any, step: int) -> str:
    """The other loop's turn, while ours waits."""
    nonlocal began
    if not step % steps:
      jax.block_until_ready(params)
      ours = time.perf_counter() - began
      found.append(Turn(ours, run(ready)))
      began = time.perf_counter()
    return ''

  with tempfile.TemporaryDirectory() as folder:
    fit(
      dataclasses.replace(
        config.fit, total_steps=steps * (turns + 1), checkpoint_seconds=float('inf')
      ),
      loss_fn,
      params,
      batches,
      Path(folder),
      export=lambda params, step: None,
      observe=observe,
      factor=factor,
    )
  return found[1:], int(sum(np.size(ids) for ids in ready[0]))


def main(
  config: Annotated[str, tyro.conf.arg(help='A file that defines CONFIG.')],
  bucket: Annotated[
    tuple[int, int], tyro.conf.arg(help='Source and target length of all batches.')
  ] = (64, 64),
  tokens_per_batch: Annotated[
    int | None, tyro.conf.arg(help='Replaces data.tokens_per_batch.')
  ] = None,
  steps: Annotated[int, tyro.conf.arg(help='Of a turn.')] = 10,
  turns: Annotated[int, tyro.conf.arg(help='Of each loop.')] = 7,
) -> None:
  """Compares training with a minimal optax loop on the same network."""
  for name, value in (('steps', steps), ('turns', turns)):
    if value < 1:
      raise ValueError(f'{name}={value}: must be at least 1')
  loaded = load_config(config, TrainConfig)
  tokens = tokens_per_batch or loaded.data.tokens_per_batch
  data = dataclasses.replace(loaded.data, buckets=(bucket,), tokens_per_batch=tokens)
  # One line of the log a turn at the most.
  schedule = dataclasses.replace(loaded.fit, log_steps=steps)
  loaded = dataclasses.replace(loaded, data=data, fit=schedule)
  found, size = compare(loaded, steps, turns)
  print(f'\n{config}, {size} padded tokens a step, {steps} steps a turn')
  print('turn  specjax  minimal loop  ratio   (tokens/s)')
  for number, (ours, minimal) in enumerate(found, 1):
    print(
      f'{number:4}{size * steps / ours:9.0f}{size * steps / minimal:14.0f}'
      f'{minimal / ours:7.3f}'
    )
  ratio = statistics.median(minimal / ours for ours, minimal in found)
  print(f'median ratio {ratio:.3f} of the minimal loop, {jax.default_backend()}')


if __name__ == '__main__':
  run_command(main)
