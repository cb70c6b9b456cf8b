"""T5's pre-training examples: spans of a text are masked, and are what to predict.

  text      Thank you for inviting me to your party last week
  source    Thank you <X> me to your party <Y> week
  target    <X> for inviting <Y> last

Raffel et al. 2020, section 3.1.4: 15% of the tokens, spans of mean length 3, each
replaced by a sentinel of its own; the sentinels are the vocabulary's last ids, the
first of them is the last id. As in T5's code the target ends with the last span.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from specjax.data.corpus import Pair

MIN_TOKENS = 4  # a shorter rest has nothing to mask and anything left


class Lengths(NamedTuple):
  """Tokens of a piece of text, and the ids its source and target then have."""

  tokens: int
  source: int
  target: int


def span_counts(length: int, density: float, mean_span: float) -> tuple[int, int]:
  """How many tokens of `length` are masked, and in how many spans; both >= 1."""
  noise = min(max(round(length * density), 1), length - 1)
  spans = max(round(noise / mean_span), 1)
  return noise, min(spans, noise, length - noise)


def lengths(max_source: int, density: float, mean_span: float) -> Lengths:
  """The longest text whose source has at most `max_source` ids, EOS included.

  Example:
    >>> lengths(512, 0.15, 3.0)
    Lengths(tokens=568, source=512, target=114)
  """

  def of(tokens: int) -> Lengths:
    noise, spans = span_counts(tokens, density, mean_span)
    return Lengths(tokens, tokens - noise + spans + 1, noise + spans + 1)

  tokens = MIN_TOKENS
  if of(tokens).source > max_source:
    raise ValueError(
      f'buckets: sources of {max_source} ids hold no span-corrupted text; give a '
      f'bucket with a source length of at least {of(tokens).source}'
    )
  while of(tokens + 1).source <= max_source:
    tokens += 1
  return of(tokens)


def noise_mask(
  length: int, density: float, mean_span: float, rng: np.random.Generator
) -> np.ndarray:
  """Which tokens are masked: bool [length]; all segmentations are equally likely.

  Spans alternate, kept first and masked last, each of at least one token.
  """
  noise, spans = span_counts(length, density, mean_span)

  def segments(items: int) -> np.ndarray:
    cuts = 1 + np.sort(rng.permutation(items - 1)[: spans - 1])
    return np.diff(np.concatenate([[0], cuts, [items]]))

  lengths_S = np.stack([segments(length - noise), segments(noise)], 1).reshape(-1)
  return np.repeat(np.arange(2 * spans) % 2 == 1, lengths_S)


def replace_spans(
  tokens: np.ndarray, mask: np.ndarray, num_ids: int, eos_id: int
) -> list[int]:
  """Each run of masked tokens becomes one sentinel; EOS at the end."""
  first = mask & ~np.concatenate([[False], mask[:-1]])
  sentinels = num_ids - np.cumsum(first)
  kept = np.where(first, sentinels, tokens)[first | ~mask]
  return [*kept.tolist(), eos_id]


def corrupt(
  tokens: np.ndarray,
  density: float,
  mean_span: float,
  rng: np.random.Generator,
  *,
  num_ids: int,
  eos_id: int,
) -> Pair:
  """A text's source and target.

  Args:
    tokens: ids without EOS, `MIN_TOKENS` or more.
    density: part of them that is masked, in (0, 1).
    mean_span: mean length of a masked span, >= 1.
    rng: what the mask is drawn with.
    num_ids: of the vocabulary, sentinels included.
    eos_id: ends source and target.
  """
  mask = noise_mask(len(tokens), density, mean_span, rng)
  return Pair(
    replace_spans(tokens, mask, num_ids, eos_id),
    replace_spans(tokens, ~mask, num_ids, eos_id),
  )


def corrupted_epoch(
  documents: Sequence[np.ndarray],
  piece: int,
  density: float,
  mean_span: float,
  rng: np.random.Generator,
  *,
  num_ids: int,
  eos_id: int,
) -> Iterator[Pair]:
  """All documents in a new order, joined, cut into pieces, and corrupted.

  Args:
    documents: ids without EOS.
    piece: tokens of a piece, of `lengths`; the rest at the end is shorter.
    density: as in `corrupt`.
    mean_span: as in `corrupt`.
    rng: of the order and of the masks.
    num_ids: as in `corrupt`.
    eos_id: as in `corrupt`.
  """
  order = rng.permutation(len(documents))
  joined = np.concatenate([documents[number] for number in order])
  for start in range(0, len(joined), piece):
    tokens = joined[start : start + piece]
    if len(tokens) >= MIN_TOKENS:
      yield corrupt(tokens, density, mean_span, rng, num_ids=num_ids, eos_id=eos_id)
