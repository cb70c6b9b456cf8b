"""The training loop: any loss, an optimiser, checkpoints, resuming.

A checkpoint holds parameters, optimiser state, the step, which is the position in
the data, and a checksum of them. A run that was killed and goes on from one makes
the updates that it would have made, bit for bit on the same machine.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.progress
from jax.sharding import Mesh

from specjax.checkpoints.orbax import AsyncSaver
from specjax.parallel import mesh as mesh_lib
from specjax.parallel.rules import DATA
from specjax.train import resuming
from specjax.train.config import FitConfig
from specjax.train.metrics import MetricsWriter
from specjax.train.optimizer import (
  make_optimizer,
  make_schedule,
  param_shardings,
  state_shardings,
)


class TrainState(NamedTuple):
  """What a checkpoint of a run holds."""

  params: Any
  opt_state: Any
  step: int


def count_targets(batch: Any) -> jax.Array:
  """Tokens of a batch's targets, its second field; 0 pads."""
  return jnp.sum(jnp.asarray(batch[1]) != 0)


def fit(
  config: FitConfig,
  loss_fn: Callable[[Any, Any], jax.Array],
  params: Any,
  batches: Callable[[int], Iterator[Any]],
  folder: Path,
  *,
  export: Callable[[Any, int], None],
  evaluate: Callable[[Any], str | Mapping[str, float]] = lambda params: '',
  prepare: Callable[[Any, int, Any], Any] = lambda params, step, batch: batch,
  observe: Callable[[Any, int], str] = lambda params, step: '',
  resume: bool = False,
  factor: Callable[[Any], Any] = count_targets,
  mesh: Mesh | None = None,
  identity: Mapping[str, Any] | None = None,
) -> TrainState:
  """Minimises a loss, with checkpoints.

  Args:
    config: schedule.
    loss_fn: `(params, batch) -> scalar`; compiled once per batch shape.
    params: initial parameters; on a mesh they are given away (donated).
    batches: `first step -> iterator of batches`; NamedTuples of arrays whose
      second field holds the targets.
    folder: where `state/` goes, the newest two checkpoints, and metrics.jsonl;
      made if absent.
    export: `(params, step)`, called at each checkpoint, to write the weights.
    evaluate: `params -> text or {name: value}` for the log, at each checkpoint.
    prepare: `(params, steps done, batch) -> batch`, what the loss is given: for
      batches that depend on the parameters as they are.
    observe: `(params, step) -> text` for the log or '', called after every step.
    resume: go on from the checkpoint in `folder`.
    factor: `batch -> number` that `loss_fn` divides its sum over the batch by; with
      it the parts of an accumulated batch add up to the whole batch's loss.
    mesh: devices with the axes 'data' (rows) and 'model' (parameters and optimiser
      state, by T5's rules); None: one device.
    identity: what makes the run this one; a resumed one must give the same.

  Returns:
    The final state.

  Raises:
    ValueError: `resume` without a checkpoint, or a folder that has one without it;
      a checkpoint that is damaged or of another run; a loss that is not finite; a
      disk that is full. The message says what is saved and how to go on.
  """
  resuming.make_folder(folder)
  optimizer, schedule = make_optimizer(config), make_schedule(config)
  params, opt_state, out_shardings = _place(optimizer, params, mesh)

  def step_fn(params, opt_state, batch):
    loss, gradients = _gradients(loss_fn, factor, config.accumulate, params, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    norm = optax.tree.norm(gradients)
    return optax.apply_updates(params, updates), opt_state, (loss, norm)

  update = jax.jit(step_fn, donate_argnums=(0, 1), out_shardings=out_shardings)
  multiple = config.accumulate * (1 if mesh is None else mesh.shape[DATA])

  with AsyncSaver(folder / 'state', keep=2) as saver:
    state = TrainState(params, opt_state, 0)
    params, opt_state, step = resuming.begin(saver, state, folder, resume, identity)
    del state
    saved_at = logged_at = time.monotonic()
    window: list[tuple[jax.Array, jax.Array]] = []
    tokens = 0
    with (
      resuming.advice(saver, folder),
      MetricsWriter(folder, step) as metrics,
      _progress() as progress,
    ):
      task = progress.add_task('train', total=config.total_steps, completed=step)
      for batch in itertools.islice(batches(step), max(0, config.total_steps - step)):
        batch = prepare(params, step, batch)
        tokens += sum(int(np.count_nonzero(ids)) for ids in batch[:2])
        batch = _pad_rows(batch, multiple)
        if mesh is not None:
          batch = mesh_lib.place_rows(batch, mesh)
        params, opt_state, measured = update(params, opt_state, batch)
        step += 1
        window.append(measured)
        progress.advance(task)
        if seen := observe(params, step):
          progress.console.print(seen, soft_wrap=True, highlight=False)
        last = step == config.total_steps
        if step % config.log_steps and not last:
          continue
        loss, norm = _means(window, step)
        now = time.monotonic()
        rate = tokens / (now - logged_at)
        progress.update(task, description=f'loss {loss:.3f}, {rate:.0f} tokens/s')
        progress.console.print(
          f'{time.strftime("%H:%M:%S")} step {step}/{config.total_steps} '
          f'loss {loss:.4f} {rate:.0f} tokens/s',
          soft_wrap=True,
        )
        values = {
          'loss': loss,
          'grad_norm': norm,
          'learning_rate': float(schedule(step - 1)),
          'tokens_per_second': rate,
        }
        metrics.write(step, values)
        window, tokens, logged_at = [], 0, now
        if last or now - saved_at > config.checkpoint_seconds:
          # Written while the next steps run.
          resuming.save(saver, TrainState(params, opt_state, step))
          export(params, step)
          found = evaluate(params)
          if not isinstance(found, str):
            metrics.write(step, {f'eval/{name}': x for name, x in found.items()})
            found = ', '.join(f'{name} {x:.3f}' for name, x in found.items())
          progress.console.print(
            f'step {step} checkpoint. {found}'.rstrip(), soft_wrap=True
          )
          saved_at = logged_at = time.monotonic()
      saver.wait()
      progress.console.print(f'step {step} saved.')
  return TrainState(params, opt_state, step)


def _place(
  optimizer: optax.GradientTransformation, params: Any, mesh: Mesh | None
) -> tuple[Any, Any, Any]:
  """Parameters and optimiser state where they are updated, and `jit`'s shardings."""
  if mesh is None:
    params = jax.tree.map(jnp.copy, params)  # the caller's are not given away
    return params, optimizer.init(params), None
  placed = param_shardings(params, mesh)
  state_placed = state_shardings(optimizer, params, placed, mesh)
  params = mesh_lib.place(params, placed)
  opt_state = jax.jit(optimizer.init, out_shardings=state_placed)(params)
  return params, opt_state, (placed, state_placed, mesh_lib.everywhere(mesh))


def _gradients(
  loss_fn: Callable[[Any, Any], jax.Array],
  factor: Callable[[Any], Any],
  accumulate: int,
  params: Any,
  batch: Any,
) -> tuple[jax.Array, Any]:
  """Loss and gradients of a batch, computed in `accumulate` parts of its rows."""
  if accumulate == 1:
    return jax.value_and_grad(loss_fn)(params, batch)
  # Every accumulate-th row: each device of a mesh splits the rows that it has, and
  # the empty rows at the end of a batch are spread. Scalars are each part's.
  parts = jax.tree.map(
    lambda x: (
      jnp.swapaxes(x.reshape(-1, accumulate, *x.shape[1:]), 0, 1)
      if jnp.ndim(x)
      else jnp.broadcast_to(x, (accumulate,))
    ),
    batch,
  )
  whole = factor(batch)

  def add(total, part):
    share = factor(part) / whole
    found = jax.value_and_grad(loss_fn)(params, part)
    # A part without tokens may divide 0 by 0.
    return jax.tree.map(
      lambda x, y: x + jnp.where(share > 0, share * y, 0), total, found
    ), None

  zero = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
  return jax.lax.scan(add, zero, parts)[0]


def _pad_rows(batch: Any, multiple: int) -> Any:
  """Empty rows at the end, so that `multiple` divides their number."""
  surplus = -batch[0].shape[0] % multiple
  if not surplus:
    return batch

  def pad(x: Any) -> Any:
    if not np.ndim(x):
      return x
    return np.pad(x, ((0, surplus), *((0, 0),) * (x.ndim - 1)))

  return jax.tree.map(pad, batch)


def _means(window: list[tuple[jax.Array, jax.Array]], step: int) -> tuple[float, float]:
  """Mean loss and gradient norm of the steps that end with `step`; all finite."""
  losses, norms = np.asarray(jax.device_get(window), np.float64).T
  bad = np.flatnonzero(~(np.isfinite(losses) & np.isfinite(norms)))
  if len(bad):
    first = bad[0]
    raise ValueError(
      f'loss: {losses[first]} with a gradient of norm {norms[first]} at step '
      f'{step - len(losses) + 1 + first}; lower --learning_rate, set fit.clip_norm, '
      'or train in float32'
    )
  return float(losses.mean()), float(norms.mean())


def _progress() -> rich.progress.Progress:
  return rich.progress.Progress(
    *rich.progress.Progress.get_default_columns(),
    rich.progress.MofNCompleteColumn(),
  )
