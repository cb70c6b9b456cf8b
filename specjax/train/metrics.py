"""What a run measures, kept for people and for TensorBoard.

`metrics.jsonl` has one object a line: {"step": 50, "loss": 3.1, ...}. With the extra
`tensorboard` the same numbers go to event files beside it.
"""

import importlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = 'metrics.jsonl'


class MetricsWriter:
  """Appends measurements; closes on exit."""

  def __init__(self, folder: Path, step: int):
    """Opens the files of a run.

    Args:
      folder: of the run, which exists.
      step: where the run goes on; lines of later steps, which a process that died
        has left, are dropped, and TensorBoard is told to.
    """
    self._path = folder / NAME
    kept = _kept_lines(self._path, step)
    temporary = self._path.with_suffix('.tmp')
    temporary.write_text(''.join(kept), encoding='utf-8')
    temporary.replace(self._path)
    self._file = self._path.open('a', encoding='utf-8')
    self._events = _open_events(folder, step)

  def __enter__(self) -> 'MetricsWriter':
    return self

  def __exit__(self, *_: Any) -> None:
    self._file.close()
    if self._events is not None:
      self._events.close()

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes the values of a step; they are on disk when this returns."""
    self._file.write(json.dumps({'step': step, **values}) + '\n')
    self._file.flush()
    if self._events is not None:
      for name, value in values.items():
        self._events.add_scalar(name, value, step)
      self._events.flush()


def read(folder: str | Path) -> list[dict[str, float]]:
  """The lines of a run's metrics.jsonl."""
  lines = (Path(folder) / NAME).read_text(encoding='utf-8').splitlines()
  return [json.loads(line) for line in lines]


def has_tensorboard() -> bool:
  """Whether event files are written."""
  return importlib.util.find_spec('tensorboardX') is not None


def _open_events(folder: Path, step: int) -> Any:
  if not has_tensorboard():
    return None
  tensorboard = importlib.import_module('tensorboardX')
  return tensorboard.SummaryWriter(str(folder), purge_step=step + 1)


def _kept_lines(path: Path, step: int) -> list[str]:
  """Whole lines of steps up to `step`; the last line may have been cut."""
  if step == 0 or not path.exists():
    return []
  kept = []
  for line in path.read_text(encoding='utf-8', errors='replace').splitlines():
    try:
      if json.loads(line)['step'] <= step:
        kept.append(f'{line}\n')
    except (ValueError, KeyError, TypeError):
      continue
  return kept
