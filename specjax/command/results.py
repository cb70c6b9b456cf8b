"""Result files: JSON lines that are never half a file.

  {"record": "run", "config": ..., "versions": ..., "device": ...}
  {"record": "text", "index": 0, "source": ..., "text": ..., "ids": ..., ...}
  {"record": "summary", ...}     with --task: {"task", "split", "scores": {"bleu": ...}}

Lines go to a file beside the final one, which takes its place at the end, also
when the run is interrupted: what is finished is kept.
"""

import importlib.metadata
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

import specjax
from specjax.config import RunConfig
from specjax.eval import metrics
from specjax.generation import Generation

# Whose law outputs have, by `target_weights`.
LAWS = {'full': "the target's", 'int8': "the int8 target's"}
_PACKAGES = ('jax', 'jaxlib', 'flax', 'numpy', 'sentencepiece', 'safetensors')


class Writer:
  """Writes the records of one run.

  Raises:
    ValueError: the file's folder is missing or can not be written.
  """

  def __init__(self, path: str, config: RunConfig):
    self._final = Path(path).expanduser()
    # A device or pipe can not be replaced, only written.
    in_place = self._final.exists() and not self._final.is_file()
    name = f'.{self._final.name}.{os.getpid()}.tmp'
    self._path = self._final if in_place else self._final.with_name(name)
    try:
      if not in_place and self._final.exists():
        self._final.open('a').close()  # refuses a file that may not be written
      self._file = self._path.open('w', encoding='utf-8')
    except OSError as error:
      raise ValueError(
        f'output: cannot write {path} ({error.strerror}); choose a folder that '
        'exists and is writable'
      ) from error
    self._write({'record': 'run', **run_record(config)})

  def texts(
    self,
    sources: Sequence[str],
    generations: Iterable[Generation],
    targets: Sequence[Any] | None = None,
    **fields: Any,
  ) -> None:
    """One record for each generation; flushed, so that a crash loses nothing."""
    for generation in generations:
      index = generation.index
      target = {} if targets is None else {'target': targets[index]}
      record = {'record': 'text', 'source': sources[index], **target, **fields}
      self._write({**record, **generation.to_dict()})
    self._file.flush()

  def summary(self, **fields: Any) -> None:
    self._write({'record': 'summary', **fields})

  def close(self) -> None:
    """Puts the file in its place."""
    self._file.close()
    if self._path != self._final:
      os.replace(self._path, self._final)

  def _write(self, record: dict[str, Any]) -> None:
    self._file.write(json.dumps(record, ensure_ascii=False, default=str) + '\n')


def run_record(config: RunConfig) -> dict[str, Any]:
  """What a result depends on: configuration, versions, device."""
  device = jax.devices()[0]
  precision = 'highest' if config.pair.dtype == 'float32' else 'default'
  return {
    'config': config.to_dict(),
    'versions': {
      'specjax': specjax.__version__,
      **{name: importlib.metadata.version(name) for name in _PACKAGES},
    },
    'device': {
      'platform': device.platform,
      'kind': device.device_kind,
      'count': jax.device_count(),
    },
    'matmul_precision': precision,
    'law': LAWS[config.pair.target_weights],
  }


def total(generations: Iterable[Generation]) -> metrics.Summary:
  """Counts and rates of several texts together."""
  return metrics.total([generation.summary for generation in generations])
