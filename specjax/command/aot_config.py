"""What is compiled ahead of time: a frozen dataclass, and its command line."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import tyro

from specjax import config as config_lib
from specjax import config_files
from specjax.command import cli

PROG = 'python -m specjax.aot'
DESCRIPTION = """Compiles a pair for TPUs, without one, and says what it would do there:
memory, traffic, collectives, transfers to the host, and the speed that the chip's
published figures promise. Nothing runs and no weights are read.

Example: python -m specjax.aot --config paper/ende_small_t0@v4"""


def _alias(metavar: str | None, *aliases: str) -> Any:
  return tyro.conf.arg(metavar=metavar, aliases=aliases)


@dataclasses.dataclass(frozen=True)
class AotConfig:
  """Fields that `RunConfig` has too mean the same."""

  config: Annotated[
    str | None,
    tyro.conf.arg(
      metavar='NAME',
      help='A configuration of a run, such as paper/ende_small_t0@v4, whose pair, '
      'gamma, batch size and devices are taken. The other options override it.',
    ),
  ] = None
  topology: str = 'v4:1x1x1'
  """A slice, such as v4:2x2x1 or v5p-8; an unknown name lists the known ones."""
  target: Annotated[str, _alias('SIZE')] = 't5_1_1_xxl'
  """A published T5, such as t5_1_1_xxl or byt5_base."""
  draft: Annotated[str, _alias('SIZE')] = 't5_1_1_small'
  """Another one of the same vocabulary."""
  dtype: Literal['float32', 'bfloat16'] = 'bfloat16'
  """Of weights and activations; laws are float32 in any case."""
  mesh_data: Annotated[int | None, _alias('INT')] = None
  """Groups of chips that a batch's rows are split among; by default the rest."""
  mesh_model: Annotated[int | None, _alias('INT')] = None
  """Chips that the target is split among; by default as many as its shape divides."""
  shard_draft: bool = False
  """Split the draft among a group's chips too; otherwise each holds all of it."""
  batch_size: int = 1
  """Rows."""
  max_source: int = 512
  """Length of sources."""
  max_new_tokens: int = 128
  """Longest output."""
  num_speculative_tokens: Annotated[int, _alias('INT', '--gamma')] = 7
  """Tokens drafted per call of the target."""
  alpha: float = 0.75
  """Expected acceptance probability, for the speedup; the paper has .75 for English to
  German with T5-small, greedy."""
  sweep: Annotated[str | None, _alias('gamma=A..B')] = None
  """Gammas to predict. Each verifies in its own compiled step, up to 4 of them; the
  rest lie on straight lines between."""
  matrix_unit: bool = True
  """Multiply single rows on the matrix unit, against XLA's default."""
  output: Annotated[str | None, _alias('FILE')] = None
  """JSON with all that was found."""
  plot: Annotated[str | None, _alias('FILE')] = None
  """A picture of speedup by gamma."""
  serialize: Annotated[str | None, _alias('FILE')] = None
  """The compiled loop, for specjax.parallel.aot.load on such a slice."""

  def __post_init__(self):
    config_lib.check_choice('dtype', self.dtype, config_lib.DTYPES)
    for field in ('batch_size', 'max_source', 'max_new_tokens', 'mesh_data',
                  'mesh_model', 'num_speculative_tokens'):  # fmt: skip
      value = getattr(self, field)
      if value is not None and value < 1:
        raise ValueError(f'{field}: {value}; give 1 or more')
    config_lib.check_budget(self.num_speculative_tokens, self.max_new_tokens)
    if not 0 <= self.alpha <= 1:
      raise ValueError(f'alpha: {self.alpha}; a probability in [0, 1] is needed')
    config_lib.check_budget(max(self.gammas), self.max_new_tokens)

  @property
  def gammas(self) -> list[int]:
    """What the sweep asks for, and gamma."""
    if self.sweep is None:
      return [self.num_speculative_tokens]
    match = re.fullmatch(r'gamma=(\d+)(?:\.\.(\d+))?', self.sweep)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not 1 <= first <= last:
      raise ValueError(f'sweep: {self.sweep!r}; give gamma=A..B with 1 <= A <= B')
    return sorted({*range(first, last + 1), self.num_speculative_tokens})


def parse(argv: Sequence[str]) -> AotConfig:
  """Arguments -> configuration: `--config` first, then the other options.

  Raises:
    ValueError: an unknown option (near names are given) or a bad value.
    SystemExit: after `--help`.
  """
  name = cli.config_name(argv)
  default = AotConfig() if name is None else _from_run(name)
  return cli.read(argv, default, PROG, DESCRIPTION)


def _from_run(name: str) -> AotConfig:
  from specjax import published

  run = config_files.load_config(name)
  machine = name.partition('@')[2]
  speculation = run.speculation.within(run.sampling.max_new_tokens)
  if speculation.is_auto:
    raise ValueError(
      f"num_speculative_tokens: 'auto' in {name}; give --gamma an integer instead of "
      '--config'
    )
  return AotConfig(
    config=name,
    topology=machine or AotConfig.topology,
    target=_size(published, 'model', run.pair.model),
    draft=_size(published, 'draft_model', run.pair.draft_model),
    dtype=run.pair.dtype,
    shard_draft=run.parallel.shard_draft,
    batch_size=run.io.batch_size,
    max_new_tokens=run.sampling.max_new_tokens,
    num_speculative_tokens=speculation.max_draft,
  )


def _size(published, field: str, path: str | None) -> str:
  for family in (
    published.T5_1_0, published.T5_1_1, published.FLAN_T5, published.BYT5
  ):  # fmt: skip
    for checkpoint in family.values():
      if checkpoint.path == path:
        return checkpoint.size
  raise ValueError(
    f'{field}: {path!r} is no published checkpoint, so its shape is not known; give '
    '--target and --draft instead of --config'
  )
