"""Checkpoints by Orbax: a T5 with its configuration, and a training run's state.

Orbax records the devices that an array was saved from. Neither function here asks
it: weights are read block by block into whatever shardings `leaves.restore` is
given, and a training state into the shardings of the caller's example.
"""

import contextlib
import glob
import json
import logging
import os
import re
import shutil
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import flax.traverse_util
import jax
import orbax.checkpoint as ocp

from specjax.checkpoints import arrays, files
from specjax.checkpoints.leaves import Weights, check_shapes
from specjax.models import t5

FORMAT = 'specjax.t5.orbax.1'

_PARAMS = 'params'
_ABOUT = 'about'


def save(
  path: str | os.PathLike,
  params: Mapping[str, Any],
  config: t5.T5Config,
  *,
  notes: Mapping[str, Any] | None = None,
) -> None:
  """Writes a T5 to a folder, all of it or nothing.

  Each process writes the shards that it holds; parameters keep their dtype.

  Args:
    path: the folder to make.
    params: nested dictionaries of arrays under T5X's names, sharded or not.
    config: the network's shape; stored beside the arrays, as JSON.
    notes: anything JSON can hold.

  Raises:
    ValueError: `params` do not fit `config`, or the place is taken or can not be
      written.
  """
  place = files.resolve(path)
  leaves = flax.traverse_util.flatten_dict(dict(params), sep='/')
  check_shapes(place, {name: leaf.shape for name, leaf in leaves.items()}, config)
  if files.names(place):
    raise ValueError(f'weights: {place} exists; choose another place, or delete it')
  about = {'format': FORMAT, 'config': config.to_dict(), 'notes': dict(notes or {})}
  items = {
    _PARAMS: ocp.args.StandardSave(dict(params)),
    _ABOUT: ocp.args.JsonSave(about),
  }
  try:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
      checkpointer.save(place, ocp.args.Composite(**items))
  except OSError as error:
    for rest in glob.glob(f'{glob.escape(place)}.orbax-checkpoint-tmp*'):
      shutil.rmtree(rest, ignore_errors=True)
    raise ValueError(
      f'weights: cannot write {place} ({error.strerror}); choose a folder that is '
      'writable'
    ) from error


def open_weights(path: str | os.PathLike) -> Weights:
  """Opens what `save` wrote; reads names and shapes, no weights.

  Args:
    path: the folder; local (absolute, relative, `~`, a link) or `gs://...`.

  Returns:
    `Weights`, with the notes that `save` was given.

  Raises:
    ValueError: no such checkpoint, an incomplete or damaged one, or arrays that do
      not fit the configuration; one line that names the parameter.
  """
  place = files.resolve(path)
  about = _read_json(f'{place}/{_ABOUT}/metadata')
  if about.get('format') != FORMAT:
    raise ValueError(
      f'weights: {place} is no {FORMAT} checkpoint (format {about.get("format")!r}); '
      'write it with specjax.checkpoints.orbax.save'
    )
  metadata = _read_json(f'{place}/{_PARAMS}/_METADATA')
  try:
    config = t5.T5Config.from_dict(about['config'])
    names = [
      [key['key'] for key in entry['key_metadata']]
      for entry in metadata['tree_metadata'].values()
    ]
  except (KeyError, TypeError, AttributeError, ValueError) as error:
    raise ValueError(
      f'weights: {place} holds no valid configuration or names ({error}); '
      f'{arrays.AGAIN}'
    ) from error
  # Orbax keeps all arrays in one OCDBT database, each a Zarr folder there.
  base = files.kvstore(f'{place}/{_PARAMS}')
  stores = {
    '/'.join(keys): {'driver': 'ocdbt', 'base': base, 'path': f'{".".join(keys)}/'}
    for keys in names
  }
  leaves = arrays.open_arrays(place, stores)
  check_shapes(place, {name: leaf.shape for name, leaf in leaves.items()}, config)
  return Weights(config, leaves, about['notes'])


class AsyncSaver:
  """Saves a training run's state while the training goes on.

  A step is there wholly or not at all, whenever the process dies.

  Example:
    with orbax.AsyncSaver('runs/draft/state', keep=2) as saver:
      if saver.latest_step is not None:
        state = saver.restore(state)
      for step in ...:
        state = train_step(state, ...)
        if step % 1000 == 0:
          saver.save(step, state)
  """

  def __init__(self, path: str | os.PathLike, *, keep: int = 3):
    """Opens or makes a folder of steps.

    Args:
      path: the folder; what dead processes left half-written in it does not count
        and is gone when the first new step is saved.
      keep: the newest steps that stay, at least 1.
    """
    if keep < 1:
      raise ValueError(f'keep: {keep}; give 1 or more')
    self._place = files.resolve(path)
    for name in ('absl', 'asyncio'):
      logging.getLogger(name).addFilter(_is_no_error_of_orbax)
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep, cleanup_tmp_directories=True, enable_async_checkpointing=True
    )
    self._manager = ocp.CheckpointManager(self._place, options=options)

  def __enter__(self) -> 'AsyncSaver':
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
    # What went wrong first is what is to be said.
    with contextlib.suppress(*([Exception] if kind else [])):
      self.close()

  @property
  def latest_step(self) -> int | None:
    """The newest step; one that is being written counts, see `wait`."""
    return self._manager.latest_step()

  @property
  def steps(self) -> list[int]:
    """The steps that are wholly on disk, oldest first."""
    return sorted(int(name) for name in files.names(self._place) if name.isdigit())

  def save(self, step: int, state: Any) -> None:
    """Copies a state off the devices and returns; writing goes on behind.

    Args:
      step: larger than those saved before.
      state: a pytree of arrays, typed keys and numbers. It may be donated or
        changed once this returns.

    Raises:
      ValueError: the step is not new, or this or the save before could not be
        written.
    """
    latest = self.latest_step
    if latest is not None and step <= latest:
      raise ValueError(
        f'step: {step}, but {self._place} has step {latest}; give a later one'
      )
    with self._writing():
      self._manager.save(step, args=ocp.args.StandardSave(state), force=True)

  def wait(self) -> None:
    """Returns when all that was saved is on disk.

    Raises:
      ValueError: it could not be written.
    """
    with self._writing():
      self._manager.wait_until_finished()
      self._manager.check_for_errors()

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    try:
      yield
    except Exception as error:  # Orbax and TensorStore have their own kinds
      reason = ' '.join(str(error).split())[:200]
      # The system's own words stand behind many of TensorStore's.
      if code := re.search(r"os_error_code='(\d+)'", str(error)):
        reason = os.strerror(int(code[1]))
      raise ValueError(
        f'checkpoint: cannot write {self._place} ({reason}); free some space or '
        'choose another disk'
      ) from error

  def restore(self, like: Any, step: int | None = None) -> Any:
    """Reads a state, every value as it was saved, when all saving is done.

    Args:
      like: a pytree like the state's, of arrays or `jax.ShapeDtypeStruct`s; its
        shardings are where arrays go, on any number of devices.
      step: None for the newest.

    Raises:
      ValueError: there is no such step, or the state has another structure.
    """
    steps = sorted(self._manager.all_steps())
    step = self.latest_step if step is None else step
    if step not in steps:
      raise ValueError(f'step: {step}, but {self._place} has {steps or "none"}')
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))

  def close(self) -> None:
    """Waits and ends the background threads."""
    self._manager.close()


def _is_no_error_of_orbax(record: logging.LogRecord) -> bool:
  """Orbax raises its errors; it and asyncio log pages of tracebacks of them too."""
  if record.levelno < logging.ERROR:
    return True
  trace = record.exc_info[2] if record.exc_info else None
  text = f'{record.pathname} {record.getMessage()} {traceback.format_tb(trace)}'
  return 'orbax' not in text


def _read_json(path: str) -> dict[str, Any]:
  try:
    value = json.loads(files.read(path))
  except ValueError as error:
    reason = str(error).partition('\n')[0]
    raise ValueError(
      f'weights: no Orbax checkpoint of a T5: {path}: {reason}; {arrays.AGAIN}'
    ) from error
  return value if isinstance(value, dict) else {}
