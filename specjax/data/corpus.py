"""The embedded pair's corpus: three tasks chosen by a prefix of the source.

  ende   English paragraph -> German          (like WMT En-De)
  summ   page -> "title. lead paragraph"      (like CNN/DailyMail)
  fix    misspelt paragraph -> the paragraph  (copying: lookup drafting wins)

`fix` is made on the fly from ende's English side. The text is the help of
LibreOffice (MPL-2.0, see assets/COPYRIGHT.libreoffice-help).
"""

import hashlib
import lzma
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from specjax.data import text

PREFIXES = {'ende': 'ende: ', 'summ': 'summ: ', 'fix': 'fix: '}
SPLITS = ('train', 'valid', 'test')
CORPUS_PATH = Path(__file__).parents[1] / 'assets' / 'embedded.tsv.xz'
CORPUS_SHA256 = '6cc470c66117ac8c30896d20d79c3c9fc768fe643732b144a7c5eba3be48bc4f'
MISSPELT_RATE = 0.12
# Shorter paragraphs are headings and menu entries: little to correct.
MIN_WORDS_TO_FIX = 8


class Example(NamedTuple):
  """One line of the corpus; `source` has no prefix yet."""

  task: str
  source: str
  target: str


class Pair(NamedTuple):
  """An encoded example: ids of prefix + source and of the target, with EOS."""

  source: list[int]
  target: list[int]


# A `Pair`, or anything else that has its two fields.
AnyPair = TypeVar('AnyPair', bound=Any)


class Batch(NamedTuple):
  """Padded examples.

  Attributes:
    sources_BE: int32; 0 pads.
    targets_BT: int32; 0 pads, and whole rows may be padding.
  """

  sources_BE: np.ndarray
  targets_BT: np.ndarray


def read_corpus(split: str, path: str | Path = CORPUS_PATH) -> list[Example]:
  """Examples of `ende` and `summ` in one split ('train', 'valid' or 'test')."""
  if split not in SPLITS:
    raise ValueError(f'split: {split!r} is none of {", ".join(SPLITS)}')
  examples = []
  with lzma.open(path, 'rt', encoding='utf-8') as file:
    for number, line in enumerate(file, 1):
      fields = line.rstrip('\n').split('\t')
      if len(fields) != 4 or fields[0] not in PREFIXES:
        raise ValueError(
          f'{path}, line {number}: expected task, split, source, target between tabs'
        )
      if fields[1] == split:
        examples.append(Example(fields[0], fields[2], fields[3]))
  return examples


def corpus_sha256(path: str | Path = CORPUS_PATH) -> str:
  """Hash of the corpus file, to say what a model was trained on."""
  return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def misspell(paragraph: str, seed: str, rate: float = MISSPELT_RATE) -> str:
  """Misspells words of four letters or more, each with probability `rate`.

  A misspelt word has two letters swapped, one left out, one doubled, or one
  replaced, never its first. The result depends on the arguments alone.
  """
  rnd = random.Random(seed)
  words = paragraph.split(' ')
  for i, word in enumerate(words):
    if len(word) > 3 and word.isalpha() and rnd.random() < rate:
      k = rnd.randrange(1, len(word) - 1)
      head, letter, tail = word[:k], word[k], word[k + 1 :]
      words[i] = rnd.choice(
        (
          head + tail[0] + letter + tail[1:],
          head + tail,
          head + letter + letter + tail,
          head + rnd.choice('etaoinsr') + tail,
        )
      )
  return ' '.join(words)


def fix_examples(examples: Iterable[Example], seed: int = 0) -> list[Example]:
  """The `fix` task over the English paragraphs of ende, misspelt anew per seed."""
  return [
    Example('fix', misspell(example.source, f'{seed}/{number}'), example.source)
    for number, example in enumerate(examples)
    if example.task == 'ende' and len(example.source.split()) >= MIN_WORDS_TO_FIX
  ]


def sample_examples(
  vocabulary: text.Vocabulary, per_task: int = 4, seed: int = 0
) -> list[Example]:
  """The demonstration's inputs: drawn by a seed from the test split, not chosen.

  Of each task, sources of 12 to 96 tokens, so that they fit a screen, and with
  something to correct.
  """
  examples = read_corpus('test')
  examples += fix_examples(examples)
  rnd = random.Random(seed)
  samples = []
  for task in PREFIXES:
    fitting = [
      example
      for example in examples
      if example.task == task
      and example.source != example.target
      and 12 <= len(vocabulary.encode(example.source)) <= 96
    ]
    samples += rnd.sample(fitting, per_task)
  return samples


def encode_example(
  vocabulary: text.Vocabulary, example: Example, max_source: int
) -> Pair:
  """Prefix and source (cut to `max_source` ids with EOS) and target as ids."""
  source = PREFIXES[example.task] + example.source
  (ids,) = text.encode_sources(vocabulary, [source], max_source, truncate=True)
  return Pair(ids, vocabulary.encode(example.target))


def epoch_examples(
  examples: Sequence[Example], mixture: dict[str, float], seed: int, epoch: int
) -> list[Example]:
  """One shuffled epoch: each task's examples `mixture[task]` times.

  A fraction takes that part of the task, another one in every epoch. Epochs
  with the same seed misspell differently.
  """
  rnd = random.Random(f'{seed}/{epoch}')
  by_task = {task: [e for e in examples if e.task == task] for task in ('ende', 'summ')}
  by_task['fix'] = fix_examples(examples, seed=(seed << 16) + epoch)
  chosen = []
  for task, repeats in mixture.items():
    pool = by_task[task]
    chosen += pool * int(repeats)
    chosen += rnd.sample(pool, round(len(pool) * (repeats % 1)))
  rnd.shuffle(chosen)
  return chosen


def group_pairs(
  pairs: Iterable[AnyPair],
  buckets: Sequence[tuple[int, int]],
  tokens_per_batch: int,
  seed: str,
) -> Iterator[tuple[tuple[int, int], int, list[AnyPair]]]:
  """Groups pairs of similar length, in an order shuffled by `seed`.

  Args:
    pairs: encoded examples; those that fit no bucket are left out.
    buckets: (source length, target length), tried in this order.
    tokens_per_batch: padded ids per batch; a bucket has
      `tokens_per_batch // (E + T)` rows, so that all steps cost about the same.
    seed: of the groups' order.

  Yields:
    The bucket, its number of rows, and as many pairs or, at its end, fewer.
  """
  members: list[list[AnyPair]] = [[] for _ in buckets]
  for pair in pairs:
    for i, (max_source, max_target) in enumerate(buckets):
      if len(pair.source) <= max_source and len(pair.target) <= max_target:
        members[i].append(pair)
        break
  groups = []
  for bucket, fitting in zip(buckets, members, strict=True):
    rows = max(1, tokens_per_batch // sum(bucket))
    groups += [
      (bucket, rows, fitting[i : i + rows]) for i in range(0, len(fitting), rows)
    ]
  random.Random(seed).shuffle(groups)
  yield from groups


def batch_pairs(
  pairs: Iterable[Pair],
  buckets: Sequence[tuple[int, int]],
  tokens_per_batch: int,
  seed: str,
) -> Iterator[Batch]:
  """`group_pairs` as padded arrays; the last of a bucket has empty rows."""
  for bucket, rows, group in group_pairs(pairs, buckets, tokens_per_batch, seed):
    yield Batch(
      text.pad([pair.source for pair in group], bucket[0], rows),
      text.pad([pair.target for pair in group], bucket[1], rows),
    )
