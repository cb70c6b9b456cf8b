"""Saving a run's state, going on from it, and saying how after a failure."""

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints import store
from specjax.checkpoints.orbax import AsyncSaver

RUN = 'run.json'
_MIX = np.uint32(2654435761)


@jax.jit
def checksum(tree: Any) -> jax.Array:
  """uint32 [] that any change of one element of a tree changes.

  Each element's bits count times an odd number of its own, modulo 2^32; that sum
  does not depend on how the tree is sharded.
  """
  total = jnp.uint32(0)
  for leaf in jax.tree.leaves(tree):
    leaf = jnp.asarray(leaf)
    bits = jax.lax.bitcast_convert_type(leaf, f'uint{8 * leaf.dtype.itemsize}')
    place = jax.lax.iota(jnp.uint32, leaf.size).reshape(leaf.shape)
    total = total * _MIX + jnp.sum(bits.astype(jnp.uint32) * (2 * place + 1))
  return total


@jax.jit
def is_finite(tree: Any) -> jax.Array:
  """Whether all values are neither infinite nor NaN."""
  return functools.reduce(
    jnp.logical_and, (jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))
  )


def make_folder(folder: Path) -> None:
  """Makes a run's folder, if it is absent.

  Raises:
    ValueError: it can not be made.
  """
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(
      f'folder: cannot make {folder} ({error.strerror}); choose another place'
    ) from error


def save(saver: AsyncSaver, state: Any) -> None:
  """Saves a `TrainState` under its step, unless it is no use to go on from.

  Raises:
    ValueError: a parameter is not finite.
  """
  if not is_finite(state.params):
    raise ValueError(
      f'params: not finite after step {state.step}; lower --learning_rate, set '
      'fit.clip_norm, or train in float32'
    )
  saver.save(state.step, (*state, checksum(tuple(state[:2]))))


def begin(
  saver: AsyncSaver,
  state: Any,
  folder: Path,
  resume: bool,
  identity: Mapping[str, Any] | None = None,
) -> Any:
  """The `TrainState` to go on from; a run is neither lost nor overwritten by mistake.

  Args:
    saver: of the run's checkpoints.
    state: where a new run begins; its shardings are where a restored one goes.
    folder: of the run.
    resume: go on from the newest checkpoint.
    identity: of the run, kept in `run.json` and compared.

  Raises:
    ValueError: there is no checkpoint, one too many, a damaged one, or one of
      another run.
  """
  step = saver.latest_step
  if resume and step is None:
    raise ValueError(f'resume: no checkpoint in {folder}; start without --resume')
  if not resume and step is not None:
    raise ValueError(
      f'folder: {folder} has a checkpoint of step {step}; go on from it '
      'with --resume, or name another folder'
    )
  if not resume:
    if identity is not None:
      text = json.dumps(identity, indent=2, sort_keys=True)
      store.write_atomically(folder / RUN, text.encode())
    return state
  if identity is not None:
    _check_identity(folder, identity)
  return _restore(saver, state, folder, step)


def _check_identity(folder: Path, identity: Mapping[str, Any]) -> None:
  path = folder / RUN
  try:
    began = json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError) as error:
    raise ValueError(
      f'resume: cannot read {path} ({error}); a run is told from others by it, start '
      'another one in another folder'
    ) from error
  for field, now in json.loads(json.dumps(identity)).items():
    before = began.get(field)
    if before == now:
      continue
    if isinstance(before, dict) and isinstance(now, dict):  # say what differs
      names = [name for name in now if now[name] != before.get(name)] or [*before]
      now, before = ({name: x.get(name) for name in names} for x in (now, before))
    raise ValueError(
      f'{field}: {now} is not what the run in {folder} began with, which is '
      f'{before}; resume with the same, or name another folder'
    )


def _restore(saver: AsyncSaver, state: Any, folder: Path, step: int | None) -> Any:
  others = [other for other in saver.steps if other != step]
  remedy = f'delete {folder}/state/{step} and go on from ' + (
    f'step {max(others)} with --resume' if others else 'the beginning without --resume'
  )
  damaged = f'resume: the checkpoint of step {step} in {folder} is damaged'
  try:
    *found, expected = saver.restore((*state, jnp.uint32(0)))
  except Exception as error:  # each layer below has its own kinds
    reason = ' '.join(str(error).split()).partition('. ')[0][:200]
    raise ValueError(f'{damaged} ({reason}); {remedy}') from error
  if int(checksum(tuple(found[:2]))) != int(expected):
    raise ValueError(f'{damaged} (its checksum differs); {remedy}')
  return type(state)(*found)


@contextlib.contextmanager
def advice(saver: AsyncSaver, folder: Path) -> Iterator[None]:
  """Adds to an error which step is saved and how to go on from it."""
  try:
    yield
  except (OSError, ValueError) as error:
    reason = ' '.join(str(error).split())
    if isinstance(error, OSError):
      reason = (
        f'folder: cannot write {folder} ({error.strerror or reason}); free some space '
        'or choose another disk'
      )
    with contextlib.suppress(Exception):  # what is being written may still succeed
      saver.wait()
    steps = saver.steps
    rest = (
      f'step {max(steps)} is saved, go on from it with --resume'
      if steps
      else 'nothing is saved yet, start again without --resume'
    )
    raise ValueError(f'{reason}; {rest}') from error
