"""What a training run is told, and how a configuration file is read."""

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from specjax.models import t5
from specjax.train.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class FitConfig:
  """How long and how fast to train.

  Attributes:
    total_steps: steps until the rate is 0. A resumed run may give another
      number: the decay then runs to that.
    learning_rate: relative step size of the constant part.
    warmup_steps: steps of the linear rise from 0.
    decay_fraction: the last part of the run, in which the rate falls to 0.
    seed: of the initial weights and of the order of the examples.
    checkpoint_seconds: time between two checkpoints.
    log_steps: steps between two lines of the log.
  """

  total_steps: int
  learning_rate: float = 1e-2
  warmup_steps: int = 200
  decay_fraction: float = 0.5
  seed: int = 0
  checkpoint_seconds: float = 240.0
  log_steps: int = 50

  def __post_init__(self):
    for name, lowest in (('total_steps', 1), ('warmup_steps', 0), ('log_steps', 1)):
      value = getattr(self, name)
      if value < lowest:
        raise ValueError(f'{name}={value}: must be at least {lowest}')
    if not self.learning_rate > 0:
      raise ValueError(f'learning_rate={self.learning_rate}: must be above 0')
    if not 0 <= self.decay_fraction <= 1:
      raise ValueError(f'decay_fraction={self.decay_fraction}: must be in [0, 1]')


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Which examples a batch holds.

  Attributes:
    mixture: per task, how often an epoch repeats its examples; a fraction
      takes that part of them, another one in every epoch.
    buckets: (source, target) lengths that batches are padded to, tried in this
      order; longer sources are cut to the longest, longer targets left out.
    tokens_per_batch: padded source and target tokens of a batch.
  """

  mixture: tuple[tuple[str, float], ...] = (('ende', 1.0), ('summ', 2.0), ('fix', 1.0))
  buckets: tuple[tuple[int, int], ...] = (
    (16, 16),
    (24, 28),
    (40, 44),
    (64, 64),
    (128, 48),
    (88, 92),
    (128, 128),
  )
  tokens_per_batch: int = 4096

  @property
  def max_source(self) -> int:
    return max(source for source, _ in self.buckets)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """A network, its examples and its schedule."""

  model: t5.T5Config
  fit: FitConfig
  data: DataConfig = DataConfig()


@dataclasses.dataclass(frozen=True)
class DistillConfig(TrainConfig):
  """A draft and what it learns from a target.

  Attributes:
    sampled_fraction: part of the answers that the target samples at
      temperature 1; the rest is greedy.
    num_top: ids kept of each of the target's laws.
    hard_weight: weight of the target's likeliest id against its law, in [0, 1].
    recipe: what to learn instead: laws over the whole vocabulary, in a chosen
      divergence, on chosen texts. The three fields above are then not used.
  """

  sampled_fraction: float = 0.25
  num_top: int = 16
  hard_weight: float = 0.5
  recipe: Recipe | None = None

  def __post_init__(self):
    for name in ('sampled_fraction', 'hard_weight'):
      if not 0 <= getattr(self, name) <= 1:
        raise ValueError(f'{name}={getattr(self, name)}: must be in [0, 1]')
    if self.num_top < 1:
      raise ValueError(f'num_top={self.num_top}: must be at least 1')


def load_config(path: str | Path, expected: type) -> Any:
  """The `CONFIG` of a configuration file.

  Raises:
    ValueError: no such file, or its `CONFIG` is not an `expected`.
  """
  path = Path(path).expanduser()
  if not path.is_file():
    raise ValueError(f'config: no file {path}; configurations lie in configs/')
  spec = importlib.util.spec_from_file_location(path.stem, path)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = getattr(module, 'CONFIG', None)
  if not isinstance(config, expected):
    raise ValueError(f'config: {path} has no CONFIG of type {expected.__name__}')
  return config


def run_command(main: Callable[..., None]) -> None:
  """Runs a function from the command line; a ValueError is one line and code 2."""
  try:
    tyro.cli(main)
  except ValueError as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)
