"""What a training run is told, and how a configuration file is read."""

import dataclasses
import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from specjax.config import check_choice
from specjax.models import t5
from specjax.train.recipe import Recipe

OPTIMIZERS = ('adafactor', 'adamw')
SCHEDULES = ('linear', 'rsqrt')
NORMALIZERS = (
  'NUM_REAL_TARGET_TOKENS',
  'NUM_TOTAL_TARGET_TOKENS',
  'AVERAGE_PER_SEQUENCE',
)


@dataclasses.dataclass(frozen=True)
class FitConfig:
  """How long and how fast to train.

  Attributes:
    total_steps: steps until the rate is 0. A resumed run may give another
      number: the decay then runs to that.
    learning_rate: step size of the constant part; relative to each parameter's
      scale with Adafactor, absolute with AdamW.
    warmup_steps: steps of the linear rise from 0.
    decay_fraction: the last part of the run, in which the rate falls to 0; 0 keeps
      it constant.
    seed: of the initial weights and of the order of the examples.
    checkpoint_seconds: time between two checkpoints; they fall on steps that are
      logged, so that a resumed run logs the same means.
    log_steps: steps between two lines of the log.
    optimizer: 'adafactor', as T5 was trained, or 'adamw'.
    schedule: 'linear' is the rise, constant part and fall above; 'rsqrt' is
      T5's pre-training: `learning_rate / sqrt(max(step, warmup_steps))`.
    accumulate: parts that a batch's rows are split into, whose gradients are
      summed before one update: 1/accumulate of the memory for activations.
    weight_decay: AdamW's, decoupled; per step it is multiplied by the rate.
    clip_norm: gradients of a larger global norm are scaled down to it; None: not.
  """

  total_steps: int
  learning_rate: float = 1e-2
  warmup_steps: int = 200
  decay_fraction: float = 0.5
  seed: int = 0
  checkpoint_seconds: float = 240.0
  log_steps: int = 50
  optimizer: str = 'adafactor'
  schedule: str = 'linear'
  accumulate: int = 1
  weight_decay: float = 0.0
  clip_norm: float | None = None

  def __post_init__(self):
    for name, lowest in (
      ('total_steps', 1),
      ('warmup_steps', 0),
      ('log_steps', 1),
      ('accumulate', 1),
    ):
      value = getattr(self, name)
      if value < lowest:
        raise ValueError(f'{name}={value}: must be at least {lowest}')
    if not self.learning_rate > 0:
      raise ValueError(f'learning_rate={self.learning_rate}: must be above 0')
    if not 0 <= self.decay_fraction <= 1:
      raise ValueError(f'decay_fraction={self.decay_fraction}: must be in [0, 1]')
    check_choice('optimizer', self.optimizer, OPTIMIZERS)
    check_choice('schedule', self.schedule, SCHEDULES)
    if not self.weight_decay >= 0:
      raise ValueError(f'weight_decay={self.weight_decay}: must be at least 0')
    if self.weight_decay and self.optimizer != 'adamw':
      raise ValueError(
        f"weight_decay={self.weight_decay}: only optimizer='adamw' has one; give 0"
      )
    if self.clip_norm is not None and not self.clip_norm > 0:
      raise ValueError(f'clip_norm={self.clip_norm}: must be above 0, or None')


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """T5X's loss (`t5x/losses.py`); the defaults are T5's.

  Attributes:
    z_loss: weight of log(Z)^2, which keeps the logits' normaliser near 1.
    label_smoothing: probability that is spread over the other ids, in [0, 1).
    normalizer: what the sum over tokens is divided by: T5X's
      'NUM_REAL_TARGET_TOKENS', 'NUM_TOTAL_TARGET_TOKENS' (padding counts) or
      'AVERAGE_PER_SEQUENCE' (each row has the same weight), or a number.
  """

  z_loss: float = 1e-4
  label_smoothing: float = 0.0
  normalizer: str | float = 'NUM_REAL_TARGET_TOKENS'

  def __post_init__(self):
    if not self.z_loss >= 0:
      raise ValueError(f'z_loss={self.z_loss}: must be at least 0')
    if not 0 <= self.label_smoothing < 1:
      raise ValueError(f'label_smoothing={self.label_smoothing}: must be in [0, 1)')
    if isinstance(self.normalizer, str):
      check_choice('normalizer', self.normalizer, NORMALIZERS)
    elif not self.normalizer > 0:
      raise ValueError(f'normalizer={self.normalizer}: must be above 0')


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Which examples a batch holds.

  Attributes:
    mixture: per source, how often an epoch repeats its examples; a fraction
      takes that part of them, another one in every epoch. A source is one of the
      embedded corpus ('ende', 'summ', 'fix'), a file of pairs ('a.tsv', 'a.jsonl'),
      a text file whose spans are corrupted ('spans:a.txt'), or a SeqIO task.
    buckets: (source, target) lengths that batches are padded to, tried in this
      order; longer sources are cut to the longest, longer targets left out.
    tokens_per_batch: padded source and target tokens of a batch.
    vocabulary: a SentencePiece file, 'bytes', or 'embedded'.
    noise_density: of 'spans:', the part of the tokens that is masked.
    mean_span: of 'spans:', mean length of a masked span.
    task_module: module that registers SeqIO tasks when imported.
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
  vocabulary: str = 'embedded'
  noise_density: float = 0.15
  mean_span: float = 3.0
  task_module: str | None = None

  def __post_init__(self):
    if not self.mixture:
      raise ValueError('mixture: it is empty; name at least one source')
    for name, weight in self.mixture:
      if not (weight > 0 and math.isfinite(weight)):
        raise ValueError(f'mixture: {name!r} has weight {weight}; give more than 0')
    if not self.buckets or min(min(bucket) for bucket in self.buckets) < 2:
      raise ValueError(f'buckets={self.buckets}: give lengths of at least 2')
    if not 0 < self.noise_density < 1:
      raise ValueError(f'noise_density={self.noise_density}: must be in (0, 1)')
    if not self.mean_span >= 1:
      raise ValueError(f'mean_span={self.mean_span}: must be at least 1')

  @property
  def max_source(self) -> int:
    return max(source for source, _ in self.buckets)


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """What is measured at each checkpoint, on held-out examples.

  Attributes:
    sources: as in `DataConfig.mixture`; None takes the mixture's that have a split
      of their own ('valid', of SeqIO tasks 'validation'), so no files.
    num_examples: of each source, for loss and accuracy under teacher forcing.
    decode_examples: of each source, decoded greedily by the compiled loop and
      scored; 0 decodes nothing.
    max_new_tokens: longest decoded output.
    metrics: for files: 'bleu', 'chrf', 'rouge', 'exact_match'. Tasks have their own.
  """

  sources: tuple[str, ...] | None = None
  num_examples: int = 160
  decode_examples: int = 0
  max_new_tokens: int = 128
  metrics: tuple[str, ...] = ('bleu', 'exact_match')

  def __post_init__(self):
    for name, lowest in (
      ('num_examples', 1),
      ('decode_examples', 0),
      ('max_new_tokens', 1),
    ):
      if getattr(self, name) < lowest:
        raise ValueError(f'{name}={getattr(self, name)}: must be at least {lowest}')
    for name in self.metrics:
      check_choice('metrics', name, ('bleu', 'chrf', 'rouge', 'exact_match'))


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """How many devices train together, see docs/scale.md.

  Attributes:
    data: groups of devices that a batch's rows are split among.
    model: devices of a group, which parameters and optimiser state are split among.
  """

  data: int = 1
  model: int = 1

  def __post_init__(self):
    for name in ('data', 'model'):
      if getattr(self, name) < 1:
        raise ValueError(f'mesh_{name}: {getattr(self, name)}; give 1 or more')


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """A network, its examples and its schedule.

  Attributes:
    model: the network's shape; its `dtype` is that of the activations, parameters
      and optimiser state are float32.
    fit: the schedule.
    data: the examples.
    loss: the loss; distillation has its own.
    eval: what is measured on the way.
    mesh: devices.
  """

  model: t5.T5Config
  fit: FitConfig
  data: DataConfig = DataConfig()
  loss: LossConfig = LossConfig()
  eval: EvalConfig = EvalConfig()
  mesh: MeshConfig = MeshConfig()


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

  Args:
    path: a Python file, or the name of one that is shipped: 'pretrain_spans'.
    expected: its type.

  Raises:
    ValueError: no such file, or its `CONFIG` is not an `expected`.
  """
  path = Path(path).expanduser()
  shipped = Path(__file__).parents[1] / 'configs' / f'{path}.py'
  if not path.is_file() and shipped.is_file():
    path = shipped
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


def weighted(name: str) -> tuple[str, float]:
  """The source and weight of 'NAME=WEIGHT' or 'NAME'; raises ValueError."""
  head, equals, tail = name.rpartition('=')
  if not equals:
    return name, 1.0
  try:
    return head, float(tail)
  except ValueError as error:
    raise ValueError(f'data: {name!r}: {tail!r} is no weight; give a number') from error


def changed(part: Any, **fields: Any) -> Any:
  """A configuration with those fields replaced that were given: not None, not empty."""
  given = {name: value for name, value in fields.items() if value not in (None, ())}
  return dataclasses.replace(part, **given)


def run_command(main: Callable[..., None]) -> None:
  """Runs a function from the command line; a ValueError is one line and code 2."""
  try:
    tyro.cli(main)
  except ValueError as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)
