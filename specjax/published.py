"""Published checkpoints, and machines to decode them on: what configurations name.

Addresses are those of T5X's documentation (github.com/google-research/t5x,
docs/models.md). Nothing here opens them.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from specjax.config import (
  IOConfig,
  PairConfig,
  ParallelConfig,
  RunConfig,
  SamplingConfig,
  SpeculationConfig,
)
from specjax.models.t5 import T5Config

_BUCKET = 'gs://t5-data/pretrained_models/t5x'
_ENGLISH = 'gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model'


class Checkpoint(NamedTuple):
  """A T5 in a bucket.

  Attributes:
    size: its shape, a name for `T5Config.from_size`.
    path: a T5X checkpoint.
    vocabulary: a SentencePiece model, or 'bytes'.
  """

  size: str
  path: str
  vocabulary: str


class Machine(NamedTuple):
  """What decodes.

  Attributes:
    num_devices: as JAX counts them; a v4 or v5p chip is one device.
    gigabytes: memory of each, in 10^9 bytes.
  """

  num_devices: int
  gigabytes: float


def _family(sizes, folders, steps, vocabulary=_ENGLISH) -> dict[str, Checkpoint]:
  return {
    folder: Checkpoint(size, f'{_BUCKET}/{folder}/checkpoint_{step}', vocabulary)
    for size, folder, step in zip(sizes, folders, steps, strict=True)
  }


_NAMES = ('small', 'base', 'large', 'xl', 'xxl')
_V1_1 = [f't5_1_1_{name}' for name in _NAMES]
_BYT5 = [f'byt5_{name}' for name in _NAMES]
_MILLION = 1_000_000
# From the smallest to the largest of each family: each is a draft for those after it.
T5_1_0 = _family(
  [f't5_1_0_{name}' for name in ('small', 'base', 'large', '3b', '11b')],
  ['t5_small', 't5_base', 't5_large', 't5_3B', 't5_11B'],
  [_MILLION, 999_900, 1_000_700, _MILLION, _MILLION],
)
T5_1_1 = _family(_V1_1, _V1_1, [_MILLION] * 5)
FLAN_T5 = _family(
  _V1_1,
  [f'flan_t5_{name}' for name in _NAMES],
  [1_198_000, 1_184_000, 1_164_000, 1_138_000, 1_114_000],
)
BYT5 = _family(_BYT5, _BYT5, [_MILLION] * 5, 'bytes')

# A TPU's number counts cores up to v5p, which has two in a chip, and chips after.
MACHINES = {
  'v4': Machine(1, 32),  # one chip, as in the paper
  'v4-8': Machine(4, 32),
  'v5e-8': Machine(8, 16),
  'v5p-8': Machine(4, 95),
  'v6e-8': Machine(8, 32),
  'h100': Machine(1, 80),
  'h200': Machine(1, 141),
}


def mesh_shape(size: str, num_devices: int) -> tuple[int, int]:
  """(data, model): the target is split as far as its shape divides.

  Args:
    size: of the target.
    num_devices: a power of two.
  """
  config = T5Config.from_size(size)
  model = math.gcd(config.num_heads, config.mlp_dim, config.vocab_size, num_devices)
  return num_devices // model, model


def num_parameters(size: str) -> int:
  """Of a published T5; norms and relative biases, a thousandth, left out."""
  config = T5Config.from_size(size)
  attention = 4 * config.emb_dim * config.num_heads * config.head_dim
  mlp = (len(config.mlp_activations) + 1) * config.emb_dim * config.mlp_dim
  tables = 1 if config.logits_via_embedding else 2
  return (
    config.num_encoder_layers * (attention + mlp)
    + config.num_decoder_layers * (2 * attention + mlp)
    + tables * config.vocab_size * config.emb_dim
  )


def fits(target: Checkpoint, draft: Checkpoint, machine: Machine) -> bool:
  """Whether a device holds its part of the target and the draft, in bfloat16.

  A rule of thumb: 2 GB are left for caches and temporaries.
  """
  _, model = mesh_shape(target.size, machine.num_devices)
  per_device = num_parameters(target.size) / model + num_parameters(draft.size)
  return 2e-9 * per_device + 2 <= machine.gigabytes


def run_config(
  target: Checkpoint,
  draft: Checkpoint,
  machine: Machine,
  *,
  num_draft: int,
  temperature: float = 0.0,
  batch_size: int = 1,
) -> RunConfig:
  """A pair on a machine, in bfloat16.

  Args:
    target: the checkpoint whose law outputs have.
    draft: a smaller one of its vocabulary.
    machine: what decodes.
    num_draft: gamma.
    temperature: 0 is greedy.
    batch_size: texts decoded together by each group of the data axis.
  """
  data, model = mesh_shape(target.size, machine.num_devices)
  return RunConfig(
    pair=PairConfig(model=target.path, draft_model=draft.path, dtype='bfloat16'),
    speculation=SpeculationConfig(num_speculative_tokens=num_draft),
    sampling=SamplingConfig(temperature=temperature),
    io=IOConfig(batch_size=batch_size * data),
    parallel=ParallelConfig(mesh_data=data, mesh_model=model),
  )


# Gamma by the draft's place in its family: the paper's, for English to German.
_NUM_DRAFT = (7, 7, 3, 3)


def family_configs(family: dict[str, Checkpoint]) -> dict[str, RunConfig]:
  """Every target with every smaller draft on every machine that holds them, greedy.

  Args:
    family: checkpoints from the smallest to the largest.

  Returns:
    By name, such as 'xxl_small@v4-8'.
  """
  return dict(_family_configs(family))


def _family_configs(family: dict[str, Checkpoint]) -> Iterator[tuple[str, RunConfig]]:
  checkpoints = list(family.values())
  for place, target in enumerate(checkpoints):
    for draft, num_draft in zip(checkpoints[:place], _NUM_DRAFT, strict=False):
      pair = '_'.join(each.size.rpartition('_')[2] for each in (target, draft))
      for name, machine in MACHINES.items():
        if fits(target, draft, machine):
          config = run_config(target, draft, machine, num_draft=num_draft)
          yield f'{pair}@{name}', config
