"""The demonstration's texts."""

import json
from pathlib import Path
from typing import NamedTuple

from specjax.data import corpus
from specjax.data import text as text_lib
from specjax.load import ASSETS
from specjax.pair import Pair


class Sample(NamedTuple):
  """A sample input; `source` has its task's prefix."""

  task: str
  source: str


def read_samples(pair: Pair) -> list[Sample]:
  """`samples.jsonl` of the pair's folder, or else the embedded one, by task.

  Raises:
    ValueError: no file, or a line that is no record with `task` and `source`.
  """
  path = Path(pair.name).expanduser() / 'samples.jsonl'
  path = path if path.is_file() else ASSETS / 'samples.jsonl'
  samples = []
  for number, line in enumerate(text_lib.read_lines(path), 1):
    try:
      record = json.loads(line)
      samples.append(_with_prefix(Sample(record['task'], record['source'])))
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(
        f'samples: line {number} of {path} is no record with task and source'
      ) from error
  tasks = list(dict.fromkeys(sample.task for sample in samples))
  return sorted(samples, key=lambda sample: tasks.index(sample.task))


def _with_prefix(sample: Sample) -> Sample:
  prefix = corpus.PREFIXES.get(sample.task, '')
  return sample._replace(source=prefix + sample.source.removeprefix(prefix))
