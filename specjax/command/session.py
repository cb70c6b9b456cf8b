"""Decoding what the command line names: texts in, lines and records out.

Outputs go to stdout, one a line in the order of the input, and everything else
(traces, progress, figures) to stderr, so that stdout can be piped.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import rich.progress
from rich.console import Console
from rich.text import Text

from specjax.command.compare import differences
from specjax.command.results import LAWS, Writer, total
from specjax.config import RunConfig
from specjax.core.loop import Source
from specjax.data import tasks
from specjax.data.text import Vocabulary, read_lines
from specjax.eval import interleave, trace, tuning
from specjax.generation import Generation
from specjax.pair import Pair

INTERRUPTED = 130
DIFFERENT = 1
MAX_TRACES = 8
TURNS = 3


def read_texts(config: RunConfig) -> list[str] | None:
  """The texts of --prompt or --input; None for neither."""
  if config.io.input is not None:
    return read_lines(config.io.input)
  return list(config.io.prompt) or None


def read_task(config: RunConfig) -> tasks.TaskData | None:
  """What --task names; None without it."""
  io = config.io
  if io.task is None:
    return None
  return tasks.read_task(
    io.task, io.split, num_examples=io.num_examples, module=io.task_module
  )


def decoding_options(config: RunConfig, method: str | None = None) -> dict[str, Any]:
  """`Pair.generate`'s keyword arguments."""
  speculation = config.speculation
  return {
    'sampling': config.sampling,
    'num_draft': speculation.num_speculative_tokens,
    'method': method or speculation.method,
    'rejection_sample_method': speculation.rejection_sample_method,
    'prompt_lookup_max': speculation.prompt_lookup_max,
    'prompt_lookup_min': speculation.prompt_lookup_min,
    'coupling': speculation.coupling,
    'max_draft': speculation.max_speculative_tokens,
    'batch_size': config.io.batch_size,
    # Evaluations cut long sources, as SeqIO does.
    'truncate': config.io.truncate or config.io.task is not None,
  }


def trace_tokens(generation: Generation, vocabulary: Vocabulary) -> list[trace.Token]:
  """What `eval.trace` renders."""
  return [
    trace.Token(vocabulary.piece(token), Source[source.upper()], round_)
    for token, source, round_ in zip(
      generation.ids, generation.sources, generation.rounds, strict=True
    )
  ]


class Session:
  """One run over texts; the constructor checks everything, `run` decodes.

  Args:
    config: of the run.
    pair: decodes.
    texts: sources.
    task: what the outputs are scored by, if the texts are a task's sources.

  Raises:
    ValueError: bad input; nothing has been decoded or written.
  """

  def __init__(
    self,
    config: RunConfig,
    pair: Pair,
    texts: Sequence[str],
    task: tasks.TaskData | None = None,
  ):
    self.config, self.pair, self.texts, self.task = config, pair, texts, task
    self.console = Console(stderr=True, highlight=False, soft_wrap=True)
    self.results: dict[int, Generation] = {}
    self.choices: list[tuning.Choice] = []
    self.sources = pair.encode(texts, truncate=decoding_options(config)['truncate'])
    self._batches = self._decode()
    self.writer = Writer(config.io.output, config) if config.io.output else None
    self._num_printed = 0

  def run(self) -> int:
    """Decodes, shows, compares; returns the exit code."""
    code = 0
    began = time.perf_counter()
    try:
      if self.config.io.trace:
        self.console.print(trace.legend(colour=trace.uses_colour(self.console)))
      self._consume(began)
      code = self._compare() if self._compares() else 0
    except KeyboardInterrupt:
      self._print_texts(to_the_end=True)
      self.console.print(
        f'interrupted: {len(self.results)} of {len(self.texts)} texts are finished'
        + (f' and kept in {self.config.io.output}' if self.writer else '')
      )
      code = INTERRUPTED
    finally:
      if self.writer is not None:
        self.writer.close()
    return code

  def _decode(self) -> Iterator[list[Generation]]:
    options = {**decoding_options(self.config), 'on_choice': self.choices.append}
    if not self.config.io.stream:
      return self.pair.generate_batches(self.texts, **options)
    del options['batch_size']
    streams = [
      self.pair.stream(text, index=index, **options)
      for index, text in enumerate(self.texts)
    ]
    return (list(self._show_stream(chunks)) for chunks in streams)

  def _show_stream(self, chunks) -> Iterator[Generation]:
    for chunk in chunks:
      print(_one_line(chunk.text), end='', flush=True)
      if chunk.generation is not None:
        print(flush=True)
        yield chunk.generation

  def _consume(self, began: float) -> None:
    with self._progress() as advance:
      for batch in self._batches:
        self.results.update({each.index: each for each in batch})
        if self.writer is not None:
          self.writer.texts(self.texts, batch, self.task and self.task.targets)
        self._print_texts()
        advance(len(batch))
    summary = total(self.results.values())
    seconds = time.perf_counter() - began
    scores, title = self._scores()
    if self.writer is not None:
      self.writer.summary(
        **summary.as_dict(), seconds=seconds, **scores, **self._auto()
      )
    drafts = self.config.speculation.method != 'none'
    acceptance = f'acceptance rate {summary.acceptance_rate:.2f}, ' * drafts
    self.console.print(
      f'{title}{_count(len(self.texts))}, {summary.num_emitted_tokens} tokens, '
      f'{summary.block_efficiency:.2f} per target call, {acceptance}{seconds:.1f} s '
      'with compilation'
    )
    if self.choices:
      self._print_choice()

  def _auto(self) -> dict[str, Any]:
    """The summary record's part about the last choice of gamma."""
    return {'auto': self.choices[-1].to_dict()} if self.choices else {}

  def _print_choice(self) -> None:
    line = self.choices[-1].describe()
    speculation, sampling = self.config.speculation, self.config.sampling
    if sampling.temperature > 0 and speculation.coupling == 'none':
      line += '; other choices draw other samples of the same law'
    self.console.print(line)

  def _scores(self) -> tuple[dict[str, Any], str]:
    """The task's part of the summary record, and of the summary line."""
    if self.task is None:
      return {}, ''
    texts = [self.results[index].text for index in range(len(self.texts))]
    scores = tasks.score(self.task, texts)
    shown = ', '.join(f'{name} {value:.2f}' for name, value in scores.items())
    shown = shown or 'no metric'
    task = {'task': self.task.name, 'split': self.task.split, 'scores': scores}
    return task, f'{self.task.name} {self.task.split}: {shown}; '

  def _print_texts(self, to_the_end: bool = False) -> None:
    """Prints what is next in order; unfinished texts between are empty lines."""
    last = max(self.results, default=-1) if to_the_end else len(self.texts) - 1
    while self._num_printed <= last:
      generation = self.results.get(self._num_printed)
      if generation is None and not to_the_end:
        return
      shows_trace = self.config.io.trace and self._num_printed < MAX_TRACES
      if generation is not None and shows_trace:
        source = _one_line(self.texts[self._num_printed])
        self.console.print(Text(f'{self._num_printed + 1}  {source}', style='dim'))
      if not self.config.io.stream:
        print('' if generation is None else _one_line(generation.text), flush=True)
      if generation is not None and shows_trace:
        trace.print_trace(trace_tokens(generation, self.pair.vocabulary), self.console)
      self._num_printed += 1

  @contextlib.contextmanager
  def _progress(self):
    """A bar on a terminal's stderr, if there is more than one batch."""
    many = len(self.texts) > self.config.io.batch_size
    if not many or not self.console.is_terminal or self.config.io.stream:
      yield lambda count: None
      return
    with rich.progress.Progress(
      *rich.progress.Progress.get_default_columns(),
      rich.progress.MofNCompleteColumn(),
      console=self.console,
      redirect_stdout=sys.stdout.isatty(),
    ) as bar:
      task = bar.add_task('texts', total=len(self.texts))
      yield lambda count: bar.advance(task, count)

  def _compares(self) -> bool:
    speculation = self.config.speculation
    same_text = self.config.sampling.temperature == 0 or speculation.coupling != 'none'
    return self.config.io.compare and same_text and speculation.method != 'none'

  def _compare(self) -> int:
    plain_options = decoding_options(self.config, 'none')
    plain = self.pair.generate(self.texts, **plain_options)
    ordered = [self.results[index] for index in range(len(self.texts))]
    found = differences(self.pair, self.sources, ordered, plain)
    equal = len(plain) - len(found)
    answer = 'yes' if not found else 'no'
    self.console.print(
      f'output identical to {LAWS[self.config.pair.target_weights]}: '
      f'{answer} {equal}/{len(plain)}'
    )
    for difference in found:
      self.console.print(Text(difference.describe(self.pair)))
    speedup = self._speedup(plain_options)
    self.console.print(
      f'{speedup.median:.2f} times as fast as plain decoding (median of {TURNS} warm '
      f'turns on {_count(min(len(self.texts), self.config.io.batch_size))}; batch size '
      f'{self.config.io.batch_size})'
    )
    if self.writer is not None:
      self.writer.summary(
        identical=equal,
        compared=len(plain),
        speedup=speedup.median,
        differences=[dataclasses.asdict(difference) for difference in found],
      )
    return DIFFERENT if any(not each.is_rounding for each in found) else 0

  def _speedup(self, plain_options: dict[str, Any]) -> interleave.Samples:
    texts = self.texts[: self.config.io.batch_size]
    options = decoding_options(self.config)
    times, _ = interleave.interleave(
      {
        'ours': lambda: self.pair.generate(texts, **options) and (),
        'plain': lambda: self.pair.generate(texts, **plain_options) and (),
      },
      TURNS,
    )
    return interleave.ratio(times['plain'], times['ours'])


def _count(texts: int) -> str:
  return f'{texts} text{"s" * (texts > 1)}'


def _one_line(text: str) -> str:
  """Keeps a text on its line, and terminals from obeying what a model wrote."""
  text = text.replace('\n', '\\n')
  return ''.join(x if x.isprintable() or x == '\t' else '\ufffd' for x in text)
