"""Training examples from several sources: mixed by weights, shuffled by epochs.

Everything that is drawn depends on a seed and the number of the epoch, so that a
run which was interrupted goes on with the very batches that it would have seen.
"""

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.data import corpus, pairs, spans, tasks, text

SPANS = 'spans:'


class Source(NamedTuple):
  """Examples of one kind.

  Attributes:
    name: as it was given.
    examples: `(seed, epoch) -> examples`, before they are mixed.
    encode: `example -> Pair`.
    path: the file they come from; None: a task.
  """

  name: str
  examples: Callable[[int, int], Sequence[Any]]
  encode: Callable[[Any], corpus.Pair]
  path: str | None = None


def file_of(name: str) -> str | None:
  """The path in a source's name; None if it is a task."""
  if name.startswith(SPANS):
    return name.removeprefix(SPANS)
  return name if pairs.kind(name) in pairs.KINDS else None


def open_source(
  name: str,
  vocabulary: text.Vocabulary,
  *,
  max_source: int,
  split: str = 'train',
  noise_density: float = 0.15,
  mean_span: float = 3.0,
  task_module: str | None = None,
) -> Source:
  """Opens and encodes a source.

  Args:
    name: 'ende', 'summ' or 'fix' of the embedded corpus; 'a.tsv', 'a.jsonl' (also
      packed, `pairs`); 'spans:a.txt'; or a SeqIO task.
    vocabulary: what it is encoded with.
    max_source: ids that longer sources are cut to, EOS included.
    split: of a task; a file is read wholly.
    noise_density: of 'spans:'.
    mean_span: of 'spans:'.
    task_module: module that registers SeqIO tasks.

  Raises:
    ValueError: a file is missing or damaged, or the task is unknown.
  """
  path = file_of(name)
  if name.startswith(SPANS):
    assert path is not None
    return _spans(name, path, vocabulary, max_source, noise_density, mean_span)
  if path is not None:
    return _fixed(name, pairs.read_pairs(path), vocabulary, max_source, path)
  if name in corpus.PREFIXES and task_module is None:
    return _embedded(name, vocabulary, max_source, split)
  data = tasks.read_task(name, split, module=task_module)
  texts = list(zip(data.sources, data.target_texts or data.targets, strict=True))
  return _fixed(name, texts, vocabulary, max_source)


def epoch_pairs(
  sources: Sequence[tuple[Source, float]], seed: int, epoch: int
) -> Iterator[corpus.Pair]:
  """One shuffled epoch: each source's examples as often as its weight says.

  A fraction takes that part of them, another one in every epoch.
  """
  rnd = random.Random(f'{seed}/{epoch}')
  chosen: list[tuple[Source, Any]] = []
  for source, repeats in sources:
    pool = [(source, example) for example in source.examples(seed, epoch)]
    chosen += pool * int(repeats)
    chosen += rnd.sample(pool, round(len(pool) * (repeats % 1)))
  rnd.shuffle(chosen)
  return (source.encode(example) for source, example in chosen)


def endless_batches(
  sources: Sequence[tuple[Source, float]],
  buckets: Sequence[tuple[int, int]],
  tokens_per_batch: int,
  seed: int,
  start: int = 0,
) -> Iterator[corpus.Batch]:
  """Batches of one epoch after another; from `start` on it is the same stream.

  Raises:
    ValueError: no example fits a bucket.
  """

  def groups():
    for epoch in itertools.count():
      found = corpus.group_pairs(
        epoch_pairs(sources, seed, epoch), buckets, tokens_per_batch, f'{seed}/{epoch}'
      )
      first = next(found, None)
      if first is None:
        longest = max(target for _, target in buckets)
        raise ValueError(
          f'buckets: every target is longer than {longest} ids, or there is no '
          'example; give longer buckets or more examples'
        )
      yield first
      yield from found

  for (max_source, max_target), rows, group in itertools.islice(groups(), start, None):
    yield corpus.Batch(
      text.pad([pair.source for pair in group], max_source, rows),
      text.pad([pair.target for pair in group], max_target, rows),
    )


def _embedded(
  name: str, vocabulary: text.Vocabulary, max_source: int, split: str
) -> Source:
  examples = _read_corpus(split)

  def choose(seed: int, epoch: int) -> Sequence[corpus.Example]:
    if name == 'fix':  # misspelt anew in every epoch
      return corpus.fix_examples(examples, seed=(seed << 16) + epoch)
    return [example for example in examples if example.task == name]

  def encode(example: corpus.Example) -> corpus.Pair:
    return corpus.encode_example(vocabulary, example, max_source)

  return Source(name, choose, encode)


@functools.cache
def _read_corpus(split: str) -> list[corpus.Example]:
  return corpus.read_corpus(split)


def _fixed(
  name: str,
  texts: Sequence[tuple[str, str]],
  vocabulary: text.Vocabulary,
  max_source: int,
  path: str | None = None,
) -> Source:
  """Examples that are the same in every epoch are encoded once."""
  sources = text.encode_sources(
    vocabulary, [source for source, _ in texts], max_source, truncate=True
  )
  targets = [vocabulary.encode(target) for _, target in texts]
  encoded = [corpus.Pair(*ids) for ids in zip(sources, targets, strict=True)]
  return Source(name, lambda seed, epoch: encoded, lambda pair: pair, path)


def _spans(
  name: str,
  path: str,
  vocabulary: text.Vocabulary,
  max_source: int,
  density: float,
  mean_span: float,
) -> Source:
  documents = [
    np.asarray(vocabulary.encode(document)[:-1], np.int32)
    for document in pairs.read_documents(path)
  ]
  piece = spans.lengths(max_source, density, mean_span).tokens
  _, count = spans.span_counts(piece, density, mean_span)
  first = vocabulary.piece(vocabulary.size - count)
  if 'extra_id_' not in first:
    raise ValueError(
      f'vocabulary: {count} masked spans take as many sentinels, and it has fewer; '
      'give shorter buckets or a larger mean_span'
    )

  def choose(seed: int, epoch: int) -> list[corpus.Pair]:
    rng = np.random.default_rng((seed, epoch))
    return list(
      spans.corrupted_epoch(
        documents,
        piece,
        density,
        mean_span,
        rng,
        num_ids=vocabulary.size,
        eos_id=vocabulary.eos_id,
      )
    )

  return Source(name, choose, lambda pair: pair, path)
