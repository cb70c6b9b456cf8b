"""The training loop: any loss, Adafactor, checkpoints, resuming.

Updates are relative to each parameter's scale (Shazeer and Stern 2018, as T5
was trained): a constant rate after a warm-up, then a linear decay to 0.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import rich.progress

from specjax.checkpoints.orbax import AsyncSaver
from specjax.train.config import FitConfig


class TrainState(NamedTuple):
  """What a checkpoint of a run holds."""

  params: Any
  opt_state: Any
  step: int


def make_schedule(config: FitConfig) -> optax.Schedule:
  """A linear rise, a constant part, and a linear fall to 0."""
  decay_steps = max(1, round(config.total_steps * config.decay_fraction))
  return optax.join_schedules(
    [
      optax.linear_schedule(0.0, config.learning_rate, max(1, config.warmup_steps)),
      optax.linear_schedule(config.learning_rate, 0.0, decay_steps),
    ],
    [max(config.warmup_steps, config.total_steps - decay_steps)],
  )


def make_optimizer(config: FitConfig) -> optax.GradientTransformation:
  """Adafactor with updates relative to each parameter's scale."""
  return optax.adafactor(
    make_schedule(config),
    multiply_by_parameter_scale=True,
    clipping_threshold=1.0,
    weight_decay_rate=None,
  )


def fit(
  config: FitConfig,
  loss_fn: Callable[[Any, Any], jax.Array],
  params: Any,
  batches: Callable[[int], Iterator[Any]],
  folder: Path,
  *,
  export: Callable[[Any, int], None],
  evaluate: Callable[[Any], str] = lambda params: '',
  prepare: Callable[[Any, int, Any], Any] = lambda params, step, batch: batch,
  observe: Callable[[Any, int], str] = lambda params, step: '',
  resume: bool = False,
) -> TrainState:
  """Minimises a loss, with checkpoints.

  Args:
    config: schedule.
    loss_fn: `(params, batch) -> scalar`; compiled once per batch shape.
    params: initial parameters.
    batches: `first step -> iterator of batches`; NamedTuples of arrays whose
      second field holds the targets.
    folder: where `state/` goes, the newest two checkpoints; made if absent.
    export: `(params, step)`, called at each checkpoint, to write the weights.
    evaluate: `params -> text` for the log, called at each checkpoint.
    prepare: `(params, steps done, batch) -> batch`, what the loss is given: for
      batches that depend on the parameters as they are.
    observe: `(params, step) -> text` for the log or '', called after every step.
    resume: go on from the checkpoint in `folder`.

  Returns:
    The final state.

  Raises:
    ValueError: `resume` without a checkpoint, or a folder that has one without it.
  """
  folder.mkdir(parents=True, exist_ok=True)
  optimizer = make_optimizer(config)
  state = TrainState(params, optimizer.init(params), 0)

  @jax.jit
  def update(params, opt_state, batch):
    loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  saved_at = logged_at = time.monotonic()
  losses: list[jax.Array] = []
  tokens = 0
  with AsyncSaver(folder / 'state', keep=2) as saver, _progress() as progress:
    params, opt_state, step = _begin(saver, state, folder, resume)
    task = progress.add_task('train', total=config.total_steps, completed=step)
    for batch in itertools.islice(batches(step), max(0, config.total_steps - step)):
      batch = prepare(params, step, batch)
      params, opt_state, loss = update(params, opt_state, batch)
      step += 1
      losses.append(loss)
      tokens += int((batch[0] > 0).sum() + (batch[1] > 0).sum())
      progress.advance(task)
      last = step == config.total_steps
      if step % config.log_steps == 0 or last:
        mean = float(jnp.mean(jnp.stack(losses)))
        now = time.monotonic()
        rate = f'{tokens / (now - logged_at):.0f} tokens/s'
        progress.update(task, description=f'loss {mean:.3f}, {rate}')
        progress.console.print(
          f'{time.strftime("%H:%M:%S")} step {step}/{config.total_steps} '
          f'loss {mean:.4f} {rate}',
          soft_wrap=True,
        )
        losses, tokens, logged_at = [], 0, now
      if seen := observe(params, step):
        progress.console.print(seen, soft_wrap=True, highlight=False)
      if last or time.monotonic() - saved_at > config.checkpoint_seconds:
        saver.save(step, (params, opt_state, step))  # written while the next steps run
        export(params, step)
        progress.console.print(f'step {step} saved. {evaluate(params)}', soft_wrap=True)
        saved_at = time.monotonic()
  return TrainState(params, opt_state, step)


def _begin(
  saver: AsyncSaver, state: TrainState, folder: Path, resume: bool
) -> TrainState:
  """The state to go on from; a run is neither lost nor overwritten by mistake."""
  if resume and saver.latest_step is None:
    raise ValueError(f'resume: no checkpoint in {folder}; start without --resume')
  if not resume and saver.latest_step is not None:
    raise ValueError(
      f'folder: {folder} has a checkpoint of step {saver.latest_step}; go on from it '
      'with --resume, or name another folder'
    )
  return TrainState(*saver.restore(tuple(state))) if resume else state


def _progress() -> rich.progress.Progress:
  return rich.progress.Progress(
    *rich.progress.Progress.get_default_columns(),
    rich.progress.MofNCompleteColumn(),
  )
