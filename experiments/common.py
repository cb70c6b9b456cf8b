"""What the experiments share: options, texts, decoding, measuring, writing.

Each experiment is `python -m experiments.NAME`, on the embedded pair by default and
on another with `--config`, and writes results.jsonl (and pictures) to its own folder
or to `--output`.
"""

import argparse
import functools
import json
import math
import pathlib
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table

from specjax import config as config_lib
from specjax import config_files, generation, load
from specjax.command import session
from specjax.config import RunConfig, SamplingConfig, SpeculationConfig
from specjax.core import types, warp
from specjax.data import corpus
from specjax.data import text as text_lib
from specjax.eval import metrics
from specjax.pair import EMBEDDED, Pair

HERE = pathlib.Path(__file__).parent
# Told apart without colour too: dashes, markers, and greys of their own.
STYLES = (
  {'color': '#000000', 'linestyle': '-', 'marker': 'o'},
  {'color': '#0072b2', 'linestyle': '--', 'marker': 's'},
  {'color': '#d55e00', 'linestyle': '-.', 'marker': '^'},
  {'color': '#009e73', 'linestyle': ':', 'marker': 'D'},
  {'color': '#8c8c8c', 'linestyle': (0, (6, 2)), 'marker': 'v'},
  {'color': '#cc79a7', 'linestyle': (0, (1, 1)), 'marker': 'P'},
)


def parser(name: str, description: str, **defaults: int) -> argparse.ArgumentParser:
  """Options of all experiments, and one integer option for each of `defaults`."""
  result = argparse.ArgumentParser(
    prog=f'python -m experiments.{name}', description=description.partition('\n')[0]
  )
  result.add_argument(
    '--output',
    type=pathlib.Path,
    default=HERE / name,
    metavar='FOLDER',
    help="where results and pictures go; default the experiment's folder",
  )
  for option, default in defaults.items():
    result.add_argument(f'--{option}', type=int, default=default, metavar='INT')
  result.add_argument(
    '--quick',
    action='store_true',
    help='the smallest sizes, to see that it runs; the numbers mean nothing',
  )
  return result


def parse(
  parser: argparse.ArgumentParser, argv: Sequence[str] | None, **quick: Any
) -> argparse.Namespace:
  """Parses; with --quick, `quick` are the defaults."""
  if parser.parse_args(argv).quick:
    parser.set_defaults(**quick)
  return parser.parse_args(argv)


def pair_parser(
  name: str, description: str, **defaults: int
) -> argparse.ArgumentParser:
  """`parser` with `--config`."""
  result = parser(name, description, **defaults)
  result.add_argument(
    '--config',
    default='embedded',
    metavar='FILE',
    help='a file or shipped name with a RunConfig: pair, texts (input or task)',
  )
  return result


class Subject(NamedTuple):
  """A pair, its configuration, and sources by task (one task for --config's own)."""

  pair: Pair
  config: RunConfig
  sources: dict[str, list[list[int]]]


def load_subject(name: str, count: int, *, draft: bool = False) -> Subject:
  """The pair of a configuration, with at most `count` sources of each task.

  Texts are the configuration's own, or else, for the embedded pair, drawn with seed
  0 from the test split of its corpus.

  Args:
    name: of the configuration.
    count: most sources of a task.
    draft: whether a draft model is needed.

  Raises:
    ValueError: a configuration of another pair that names no texts; no draft model
      where one is needed.
  """
  config = config_files.load_config(name)
  pair = _load_pair(config.pair)
  if draft and pair.draft is None:
    raise ValueError(f'config: {name} has no draft model; name one')
  task, texts = session.read_task(config), session.read_texts(config)
  if task is not None:
    named = {config.io.task: list(task.sources)}
  elif texts is not None:
    named = {'texts': texts}
  elif pair.name == EMBEDDED:
    named = {task: corpus_texts(task) for task in corpus.PREFIXES}
  else:
    raise ValueError(
      f'config: {name} names no texts; give its io an input file, prompts or a task'
    )
  sources = {
    task: pair.encode(
      random.Random(0).sample(each, min(count, len(each))), truncate=True
    )
    for task, each in named.items()
  }
  return Subject(pair, config, sources)


@functools.cache  # its functions are static arguments: once, and nothing compiles twice
def _load_pair(config: config_lib.PairConfig) -> Pair:
  return load.load_pair(
    config.model,
    draft=config.draft_model,
    dtype=config.dtype,
    cache_dtype=config.cache_dtype,
    target_weights=config.target_weights,
    table_text=config.table_text,
    vocabulary=config.vocabulary,
  )


def corpus_texts(task: str) -> list[str]:
  """All sources of a task in the embedded corpus' test split, with their prefix."""
  examples = corpus.read_corpus('test')
  examples += corpus.fix_examples(examples)
  prefix = corpus.PREFIXES[task]
  return [
    prefix + each.source.removeprefix(prefix) for each in examples if each.task == task
  ]


def bucket_of(pair: Pair, sources: Sequence[Sequence[int]]) -> int:
  """The length that the longest source is padded to."""
  longest = max(len(ids) for ids in sources)
  return min(each for each in pair.source_buckets if each >= longest)


class Run(NamedTuple):
  """A decode that can be repeated: `run()` is the device's work and nothing else.

  Attributes:
    run: decodes all batches; returns their final states.
    batches: the batches.
    params: of target and drafter.
    static: what `loop.decode` is told.
  """

  run: Callable[[], list[types.DecodeState]]
  batches: list[generation.Batch]
  params: types.Params
  static: dict[str, Any]

  def generations(self, pair: Pair) -> list[generation.Generation]:
    found = []
    for batch, state in zip(self.batches, self.run(), strict=True):
      found += generation.read_rows(state, batch.indices, pair.vocabulary)
    return sorted(found, key=lambda each: each.index)


def prepare(
  pair: Pair,
  sources: Sequence[Sequence[int]],
  sampling: SamplingConfig,
  speculation: SpeculationConfig,
  batch_size: int,
  bucket: int | None = None,
  **replaced: Any,
) -> Run:
  """Builds batches of one source length, so that little compiles.

  Args:
    pair: decodes.
    sources: ids of the texts.
    sampling: of all texts.
    speculation: who drafts, how much, and how it is verified.
    batch_size: most texts decoded together.
    bucket: the length that sources are padded to; by default `bucket_of` them.
    **replaced: arguments of `loop.decode` to use instead of the pair's.
  """
  params, static = pair.decoder(speculation, max_new_tokens=sampling.max_new_tokens)
  static |= replaced
  caps = [static['drafter'].num_draft] * len(sources)
  batches = list(
    generation.make_batches(
      sources,
      [sampling] * len(sources),
      caps,
      batch_size=batch_size,
      buckets=(bucket or bucket_of(pair, sources),),
    )
  )

  def run():
    return [pair.decode(params, batch, static) for batch in batches]

  return Run(run, batches, params, static)


def counts(generations: Sequence[generation.Generation]) -> metrics.Summary:
  """Pooled counts."""
  return metrics.total(each.summary for each in generations)


def tokens_per_call(
  generations: Sequence[generation.Generation],
) -> tuple[float, float]:
  """Pooled tokens per target call, and its standard error over texts."""
  tokens = np.array([len(each.ids) for each in generations], float)
  calls = np.array([each.num_target_calls for each in generations], float)
  mean = tokens.sum() / calls.sum()
  residual = tokens - mean * calls
  error = math.sqrt(np.sum(residual**2)) / calls.sum()
  return float(mean), float(error)


def prefixes(
  pair: Pair,
  sources: Sequence[Sequence[int]],
  generations: Sequence[generation.Generation],
  sampling: SamplingConfig,
):
  """(inputs_BE, tokens_BS, length_B, sampling) for teacher-forced passes."""
  slots = generation.max_length(sampling.max_new_tokens)
  tokens_BS = np.zeros((len(sources), slots), np.int32)
  for row, each in enumerate(generations):
    tokens_BS[row, 1 : 1 + len(each.ids)] = each.ids
  length_B = np.array([1 + len(each.ids) for each in generations], np.int32)
  rows = generation.make_sampling(
    [sampling] * len(sources), len(sources), [0] * len(sources)
  )
  inputs_BE = jnp.asarray(text_lib.pad(sources, bucket_of(pair, sources)))
  return inputs_BE, jnp.asarray(tokens_BS), jnp.asarray(length_B), rows


def measure_alpha(pair: Pair, text, draft: types.Model, draft_params: Any) -> float:
  """alpha of a draft on text that the target's law has, from `prefixes`."""
  with pair.precision():
    measured = metrics.alpha(
      types.Params(pair.params.target, draft_params),
      *text,
      target=pair.target,
      draft=draft,
      warp=warp.make_warp(pair.vocabulary.size, pair.eos_id, ()),
    )
  return measured.mean


def write_records(
  folder: pathlib.Path, records: Sequence[dict[str, Any]], name: str = 'results'
) -> None:
  """NAME.jsonl, whole or not at all."""
  folder.mkdir(parents=True, exist_ok=True)
  part = folder / f'{name}.jsonl.part'
  part.write_text(''.join(json.dumps(each) + '\n' for each in records))
  part.replace(folder / f'{name}.jsonl')


def print_table(records: Sequence[dict[str, Any]], title: str = '') -> None:
  """The records as a table, keys as columns."""
  table = rich.table.Table(title=title or None)
  names = dict.fromkeys(name for each in records for name in each)
  for name in names:
    table.add_column(name, justify='right')
  for each in records:
    cells = (each.get(name) for name in names)
    table.add_row(*('' if cell is None else str(cell) for cell in cells))
  console = rich.console.Console()
  wide = console.options.update(width=1000)
  # Whole, even where a file or a narrow terminal has fewer columns.
  console.width = max(console.width, console.measure(table, options=wide).maximum)
  console.print(table)


def plots():
  """matplotlib.pyplot, drawing into files.

  Raises:
    ValueError: it is not installed.
  """
  try:
    import matplotlib
  except ImportError as error:
    raise ValueError(
      "matplotlib: not installed; pip install 'specjax[plots]'"
    ) from error
  matplotlib.use('Agg')
  import matplotlib.pyplot as plt

  plt.rcParams.update(
    {
      'font.size': 9,
      'axes.grid': True,
      'grid.color': '#dddddd',
      'axes.axisbelow': True,
      'axes.spines.top': False,
      'axes.spines.right': False,
      'legend.frameon': False,
      'legend.handlelength': 3.2,
      'lines.markersize': 5,
    }
  )
  return plt


def save_figure(figure, folder: pathlib.Path, name: str) -> None:
  """Writes a PNG and forgets the figure."""
  folder.mkdir(parents=True, exist_ok=True)
  figure.savefig(folder / f'{name}.png', dpi=150, bbox_inches='tight')
  plots().close(figure)


def run(main: Callable[[], None]) -> None:
  """Calls `main`; a ValueError is one line on stderr and exit code 2."""
  try:
    main()
  except ValueError as error:
    raise SystemExit(_fail(error)) from None


def _fail(error: ValueError) -> int:
  from specjax.command import cli

  return cli.fail(error)
