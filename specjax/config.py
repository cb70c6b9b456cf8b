"""What a decoding run is told: frozen dataclasses that check themselves.

The command line (`specjax.command.cli`) is generated from these classes, and files in
configs/ hold a `RunConfig` named CONFIG. Importing this module starts nothing.
"""

import dataclasses
import difflib
import math
import numbers
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

METHODS = ('draft_model', 'ngram', 'table', 'none')
RULES = ('token', 'block')
AUTO = 'auto'  # for num_speculative_tokens
DEFAULT_DRAFT = 4
COUPLINGS = ('none', 'gumbel')
DTYPES = ('float32', 'bfloat16')
CACHE_DTYPES = ('dtype', *DTYPES)
TARGET_WEIGHTS = ('full', 'int8')
_MAX_SEED = 2**32


def _alias(metavar: str | None, *aliases: str) -> Any:
  return tyro.conf.arg(metavar=metavar, aliases=aliases)


def check_budget(num_draft: int, max_new_tokens: int) -> None:
  """A round emits one token beyond the accepted ones: longer drafts are waste."""
  most = max_new_tokens - 1
  if num_draft > most:
    remedy = f'give at most {most}' if most else 'pass --method none'
    raise ValueError(
      f'num_speculative_tokens: {num_draft} is more than max_new_tokens '
      f'{max_new_tokens} can use; {remedy}'
    )


def check_output(output: str | None, reads: dict[str, str | None]) -> None:
  """Refuses to replace a file that is read: results take their file's place."""
  if output is None:
    return
  place = Path(output).expanduser().resolve()
  for field, name in reads.items():
    if name is not None and Path(name).expanduser().resolve() == place:
      raise ValueError(
        f'output: {output} is what --{field} reads, and would be replaced; name '
        'another file'
      )


def check_choice(field: str, value: Any, choices: Iterable[str]) -> None:
  """Raises a ValueError that names the choices, near ones first."""
  choices = list(choices)
  if value not in choices:
    raise ValueError(f'{field}: {value!r} is unknown; {suggest(str(value), choices)}')


def suggest(name: str, choices: Iterable[str]) -> str:
  """'did you mean a or b?', or all choices when none is near."""
  choices = sorted(choices)
  near = difflib.get_close_matches(name, choices, n=3, cutoff=0.6)
  if near:
    # Others count only if they are about as near as the nearest.
    score = {x: difflib.SequenceMatcher(None, x, name).ratio() for x in near}
    near = [x for x in near if score[x] > score[near[0]] - 0.1]
    return f'did you mean {" or ".join(near)}?'
  return f'choose from {", ".join(choices)}'


def _is_int(value: Any) -> bool:
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _check_int(field: str, value: Any, lowest: int, remedy: str) -> None:
  if not _is_int(value) or value < lowest:
    raise ValueError(f'{field}: {value!r}; {remedy}')


def _check_float(field: str, value: Any, remedy: str) -> None:
  number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not number or not math.isfinite(value):
    raise ValueError(f'{field}: {value!r}; {remedy}')


@dataclasses.dataclass(frozen=True)
class PairConfig:
  """Which target and which draft."""

  model: Annotated[str, _alias('NAME', '--pair')] = 'embedded'
  """'embedded', a folder with {target,draft}.safetensors and vocab.model, or any
  checkpoint of a T5 (Hugging Face, T5X, Orbax), local or gs://."""
  draft_model: Annotated[str | None, _alias('NAME', '--assistant_model')] = None
  """Another draft for that target: any checkpoint, or a pair's folder."""
  table_text: Annotated[str | None, _alias('FILE')] = None
  """For --method table: output texts, one a line, whose bigrams are counted."""
  dtype: Literal['float32', 'bfloat16'] = 'float32'
  """Of weights and activations; laws are float32 in any case."""
  vocabulary: Annotated[str | None, _alias('FILE')] = None
  """A SentencePiece file, or 'bytes'; by default what lies beside the target."""
  cache_dtype: Literal['dtype', 'float32', 'bfloat16'] = 'dtype'
  """Of the cached keys and values; another one than --dtype is another law."""
  target_weights: Literal['full', 'int8'] = 'full'
  """int8 halves bfloat16's memory; outputs then have the law of the int8 target."""

  def __post_init__(self):
    check_choice('dtype', self.dtype, DTYPES)
    check_choice('cache_dtype', self.cache_dtype, CACHE_DTYPES)
    check_choice('target_weights', self.target_weights, TARGET_WEIGHTS)


@dataclasses.dataclass(frozen=True)
class SpeculationConfig:
  """Who drafts, how much, and how it is verified."""

  method: Literal['draft_model', 'ngram', 'table', 'none'] = 'draft_model'
  """A smaller model, prompt lookup in source and output, bigrams, or no draft."""
  num_speculative_tokens: Annotated[
    int | Literal['auto'] | None,
    _alias(
      'INT|auto', '--gamma', '--num_assistant_tokens', '--prompt_lookup_num_tokens'
    ),
  ] = None
  """Tokens drafted per call of the target; auto: chosen while decoding, 0 too.
  Left out: 4, or what --max_new_tokens can use."""
  rejection_sample_method: Literal['token', 'block'] = 'token'
  """token (Leviathan et al. 2023) or block (Sun et al. 2024); both are exact."""
  prompt_lookup_max: Annotated[int, _alias('INT', '--max_matching_ngram_size')] = 3
  """Longest n-gram that prompt lookup matches."""
  prompt_lookup_min: Annotated[int, _alias('INT')] = 1
  """Shortest n-gram that prompt lookup matches."""
  coupling: Literal['none', 'gumbel'] = 'none'
  """gumbel: noise shared by slot; sampled text equals plain decoding's (debugging)."""
  max_speculative_tokens: Annotated[int, _alias('INT')] = 8
  """With auto: most tokens drafted per call."""

  def __post_init__(self):
    check_choice('method', self.method, METHODS)
    check_choice('coupling', self.coupling, COUPLINGS)
    check_choice('rejection_sample_method', self.rejection_sample_method, RULES)
    gamma = self.num_speculative_tokens
    if gamma not in (AUTO, None) and (not _is_int(gamma) or int(gamma) < 1):
      raise ValueError(
        f"num_speculative_tokens: {gamma!r}; give an integer >= 1 or 'auto', or decode "
        'plainly with --method none'
      )
    _check_int('max_speculative_tokens', self.max_speculative_tokens, 1, 'give >= 1')
    low, high = self.prompt_lookup_min, self.prompt_lookup_max
    if not (_is_int(low) and _is_int(high) and 1 <= low <= high):
      raise ValueError(
        f'prompt_lookup_min: {low!r} with prompt_lookup_max {high!r}; give '
        '1 <= prompt_lookup_min <= prompt_lookup_max'
      )

  @property
  def is_auto(self) -> bool:
    """Whether gamma is chosen while decoding."""
    return self.num_speculative_tokens == AUTO and self.method != 'none'

  @property
  def max_draft(self) -> int:
    """The longest draft of a round."""
    gamma = self.num_speculative_tokens
    if gamma is None:
      return DEFAULT_DRAFT
    return self.max_speculative_tokens if gamma == AUTO else int(gamma)

  def within(self, max_new_tokens: int) -> 'SpeculationConfig':
    """With a gamma that was not given settled: what the budget can use, at most 4."""
    if self.num_speculative_tokens is not None:
      return self
    most = max_new_tokens - 1
    return dataclasses.replace(
      self,
      method=self.method if most else 'none',  # one token leaves nothing to draft
      num_speculative_tokens=max(1, min(DEFAULT_DRAFT, most)),
    )


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """The law that outputs are drawn from, and how long they may be."""

  temperature: float = 0.0
  """0 is greedy."""
  top_k: int = 0
  """Only the k likeliest tokens; 0 is off."""
  top_p: float = 1.0
  """Only the likeliest tokens that hold this much probability; 1 is off."""
  seed: int = 0
  """Of all random draws; two runs that give none both use the default."""
  max_new_tokens: int = 128
  """Longest output, the end token included."""
  min_new_tokens: int = 0
  """No end token before that many tokens."""
  banned_ids: Annotated[tuple[int, ...], tyro.conf.arg(metavar='[INT ...]')] = ()
  """Token ids that are never emitted."""

  def __post_init__(self):
    _check_float('temperature', self.temperature, 'give 0 (greedy) or more')
    if self.temperature < 0:
      raise ValueError(f'temperature: {self.temperature}; give 0 (greedy) or more')
    _check_float('top_p', self.top_p, 'give more than 0 and at most 1 (off)')
    if not 0 < self.top_p <= 1:
      raise ValueError(f'top_p: {self.top_p}; give more than 0 and at most 1 (off)')
    _check_int('top_k', self.top_k, 0, 'give 0 (off) or more')
    _check_int('seed', self.seed, 0, 'give an integer from 0 to 2**32 - 1')
    if self.seed >= _MAX_SEED:
      raise ValueError(f'seed: {self.seed}; give an integer from 0 to 2**32 - 1')
    _check_int('max_new_tokens', self.max_new_tokens, 1, 'give 1 or more')
    _check_int('min_new_tokens', self.min_new_tokens, 0, 'give 0 or more')
    if self.min_new_tokens > self.max_new_tokens:
      raise ValueError(
        f'min_new_tokens: {self.min_new_tokens} is more than max_new_tokens '
        f'{self.max_new_tokens}; lower the one or raise the other'
      )
    object.__setattr__(self, 'banned_ids', tuple(self.banned_ids))


@dataclasses.dataclass(frozen=True)
class IOConfig:
  """Where texts come from and what is shown of them."""

  prompt: Annotated[
    tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar='TEXT')
  ] = ()
  """A source with its task's prefix: 'ende: ...', 'summ: ...', 'fix: ...'."""
  input: Annotated[str | None, _alias('FILE')] = None
  """A file of sources, one a line; - reads standard input."""
  output: Annotated[str | None, _alias('FILE')] = None
  """JSON lines: the configuration, then one record a text. Replaces the file."""
  batch_size: int = 8
  """Texts decoded together."""
  truncate: bool = False
  """Cut sources that are longer than the model's limit."""
  stream: bool = False
  """Show each text as it grows, one after the other."""
  trace: bool = True
  """Show where each token came from (the first 8 texts)."""
  compare: bool = True
  """If greedy, decode all texts plainly too; exit code 1 if outputs differ."""
  task: Annotated[str | None, _alias('NAME')] = None
  """Decode a task and score it: ende, summ, fix, or a SeqIO task (extra: seqio)."""
  split: Annotated[str, _alias('NAME')] = 'test'
  """Of the task, such as test or validation."""
  num_examples: Annotated[int | None, _alias('INT')] = None
  """Only the task's first so many examples."""
  task_module: Annotated[str | None, _alias('MODULE')] = None
  """A Python module that registers SeqIO tasks, such as t5.data.tasks."""

  def __post_init__(self):
    object.__setattr__(self, 'prompt', tuple(self.prompt))
    _check_int('batch_size', self.batch_size, 1, 'give 1 or more')
    for number, text in enumerate(self.prompt, 1):
      if not text.strip():
        raise ValueError(f'prompt: number {number} is empty; give it some text')
    if self.prompt and self.input is not None:
      raise ValueError(f'input: {self.input} beside --prompt; give one of the two')
    if self.task is not None and (self.prompt or self.input is not None):
      raise ValueError(
        f'task: {self.task} beside --prompt or --input; give one of them'
      )
    if self.task is None and (self.num_examples or self.task_module) is not None:
      raise ValueError('num_examples, task_module: they belong to --task; name a task')
    if self.num_examples is not None:
      _check_int('num_examples', self.num_examples, 1, 'give 1 or more')


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
  """Which devices decode, and how they share the work."""

  mesh_data: int = 1
  """Groups of devices that a batch's rows are split among."""
  mesh_model: int = 1
  """Devices of a group, which the target is split among."""
  shard_draft: bool = False
  """Split the draft among a group's devices too; otherwise each holds all of it."""
  multi_host: bool = False
  """Join the processes of this TPU slice, Slurm or Open MPI job."""
  coordinator_address: Annotated[str | None, _alias('HOST:PORT')] = None
  """Join processes anywhere: where process 0 listens."""
  num_processes: Annotated[int | None, _alias('INT')] = None
  """With --coordinator_address: processes in all."""
  process_id: Annotated[int | None, _alias('INT')] = None
  """With --coordinator_address: number of this process, from 0."""
  join_seconds: int = 300
  """Longest wait for the other processes."""

  def __post_init__(self):
    for field in ('mesh_data', 'mesh_model', 'join_seconds'):
      _check_int(field, getattr(self, field), 1, 'give 1 or more')

  @property
  def joins(self) -> bool:
    """Whether this process is one of several."""
    explicit = (self.coordinator_address, self.num_processes, self.process_id)
    return self.multi_host or any(value is not None for value in explicit)


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """Everything a run is told; equal configurations give equal outputs."""

  pair: PairConfig = PairConfig()
  speculation: SpeculationConfig = SpeculationConfig()
  sampling: SamplingConfig = SamplingConfig()
  io: IOConfig = IOConfig()
  parallel: ParallelConfig = ParallelConfig()

  def __post_init__(self):
    reads = {
      'input': self.io.input,
      'model': self.pair.model,
      'draft_model': self.pair.draft_model,
      'table_text': self.pair.table_text,
      'vocabulary': self.pair.vocabulary,
    }
    check_output(self.io.output, reads)
    is_given = self.speculation.num_speculative_tokens not in (AUTO, None)
    if self.speculation.method != 'none' and is_given:
      check_budget(self.speculation.max_draft, self.sampling.max_new_tokens)

  def to_dict(self) -> dict[str, Any]:
    """The configuration as JSON types."""
    return dataclasses.asdict(self)
