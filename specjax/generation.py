"""From texts to results: batches, buckets, and what a decoded row tells.

Nothing here depends on how many texts are decoded together: a text's random
stream is that of its seed and its number, and padding rows are born done.
"""

import dataclasses
import inspect
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.config import SamplingConfig, suggest
from specjax.core import loop, rng
from specjax.core.types import DecodeState, Sampling, Trace
from specjax.data import text as text_lib
from specjax.data.text import Vocabulary
from specjax.eval import metrics
from specjax.parallel import distributed
from specjax.parallel import mesh as mesh_lib

# Few and coarse: encoding some pads is cheap, compiling is not.
SOURCE_BUCKETS = (64, 128, 256, 512)
LENGTH_BUCKETS = (16, 32, 64, 128, 256, 512)
SOURCE_NAMES = {source.value: source.name.lower() for source in loop.Source}

Source = str | Sequence[int]
Progress = Callable[[int, int], None]  # (texts done, texts in all)


@dataclasses.dataclass(frozen=True)
class Generation:
  """One decoded text; token i of it is described by entry i of the tuples.

  Attributes:
    index: number of the source in the input, from 0.
    text: the output.
    ids: token ids, the end token included.
    logprobs: log-probability of each token under the warped target's law, given
      the tokens before it; 0 where greedy.
    finish_reason: 'eos' or 'length'.
    sources: where each token came from: 'accepted' (drafted), 'correction' (after
      a rejection), 'bonus' (after all drafts were accepted), 'plain' (nothing
      was drafted).
    rounds: the round, from 1, that each token came in.
    num_target_calls: rounds, each one call of the target.
    drafted_per_position: drafts really proposed at each position of a block.
    accepted_per_position: those that were accepted and emitted.
    gammas: where gamma was chosen while decoding: (first round, gamma) of each
      stretch of rounds.
  """

  index: int
  text: str
  ids: tuple[int, ...]
  logprobs: tuple[float, ...]
  finish_reason: str
  sources: tuple[str, ...]
  rounds: tuple[int, ...]
  num_target_calls: int
  drafted_per_position: tuple[int, ...]
  accepted_per_position: tuple[int, ...]
  gammas: tuple[tuple[int, int], ...] = ()

  @property
  def summary(self) -> metrics.Summary:
    """Counts and rates, as `eval.metrics` defines them."""
    ended_by_draft = self.finish_reason == 'eos' and self.sources[-1] == 'accepted'
    return metrics.Summary(
      num_target_calls=self.num_target_calls,
      num_drafts=sum(self.drafted_per_position[:1]),
      num_draft_tokens=self.num_drafted,
      num_accepted_tokens=self.num_accepted,
      num_corrections=self.sources.count('correction'),
      num_emitted_tokens=len(self.ids),
      num_eos_accepted=int(ended_by_draft),
      draft_tokens_per_position=self.drafted_per_position,
      accepted_tokens_per_position=self.accepted_per_position,
    )

  @property
  def num_drafted(self) -> int:
    return sum(self.drafted_per_position)

  @property
  def num_accepted(self) -> int:
    return sum(self.accepted_per_position)

  @property
  def acceptance_rate(self) -> float:
    """Accepted / really proposed; 0 when nothing was."""
    return self.summary.acceptance_rate

  @property
  def block_efficiency(self) -> float:
    """Tokens per call of the target."""
    return self.summary.block_efficiency

  def to_dict(self) -> dict[str, Any]:
    """JSON types, counts and rates included."""
    record = dataclasses.asdict(self)
    if not self.gammas:
      del record['gammas']
    return {
      **record,
      'num_drafted': self.num_drafted,
      'num_accepted': self.num_accepted,
      'acceptance_rate': self.acceptance_rate,
      'block_efficiency': self.block_efficiency,
    }


@dataclasses.dataclass(frozen=True)
class Chunk:
  """What one round added to a streamed text; `str(chunk)` is the new text.

  Attributes:
    text: the new piece; may be empty while a character is incomplete.
    ids: the new token ids.
    sources: where each came from, as in `Generation`.
    generation: the whole result, in the last chunk only.
  """

  text: str
  ids: tuple[int, ...]
  sources: tuple[str, ...]
  generation: Generation | None = None

  def __str__(self) -> str:
    return self.text


def encode_sources(
  texts: Sequence[Source], vocabulary: Vocabulary, *, max_source: int, truncate: bool
) -> list[list[int]]:
  """`Pair.encode`: ids of sources, checked."""
  if isinstance(texts, str):
    raise ValueError('texts: one string; give a list of texts')
  if not texts:
    raise ValueError('texts: none; give at least one')
  sources = []
  for number, source in enumerate(texts, 1):
    if isinstance(source, str):
      ids = vocabulary.encode(source) if source.strip() else []
    else:
      ids = _checked_ids(source, number, vocabulary)
    if not ids:
      raise ValueError(f'source {number} is empty; give it some text')
    if len(ids) > max_source:
      if not truncate:
        raise ValueError(
          f'source {number} has {len(ids)} tokens, the limit is {max_source}; '
          'shorten it or pass --truncate to cut it'
        )
      ids = [*ids[: max_source - 1], vocabulary.eos_id]
    sources.append(ids)
  return sources


def _checked_ids(source: Sequence[int], number: int, vocabulary: Vocabulary):
  if np.ndim(source) != 1 or not all(isinstance(x, numbers.Integral) for x in source):
    raise ValueError(
      f'source {number} is {source!r}; give a string or a sequence of token ids'
    )
  ids = [int(token) for token in source]
  for token in ids:
    if not 0 < token < vocabulary.size:
      raise ValueError(
        f'source {number} has the id {token}, which is outside the vocabulary; give '
        f'ids from 1 to {vocabulary.size - 1}'
      )
  if ids and ids[-1] != vocabulary.eos_id:
    ids.append(vocabulary.eos_id)
  return ids


def check_banned(banned_ids: Sequence[int], vocabulary: Vocabulary) -> None:
  """Raises a ValueError for an id that is no token's."""
  for token in banned_ids:
    if not 0 <= token < vocabulary.size:
      raise ValueError(
        f'banned_ids: {token} is outside the vocabulary; give ids from 0 to '
        f'{vocabulary.size - 1}'
      )


def per_text(field: str, value: Any, count: int) -> list[Any]:
  """One value per text, from such a list or from one value for all."""
  if not isinstance(value, list | tuple):
    return [value] * count
  if len(value) != count:
    raise ValueError(f'{field}: {len(value)} for {count} texts; give one, or one each')
  return list(value)


def check_keywords(name: str, given: Iterable[str], function: Any) -> None:
  """Refuses keywords that `function` does not take, in the name of its caller."""
  known = inspect.signature(function).parameters
  for keyword in given:
    if keyword not in known:
      raise TypeError(
        f'{name}() got an unexpected keyword argument {keyword!r}; '
        + suggest(keyword, known)
      )


class Batch(NamedTuple):
  """Rows that are decoded together.

  Attributes:
    indices: numbers of the texts; rows beyond are padding.
    inputs_BE: int32 source ids.
    row_key_B: one key per row.
    sampling: the rows' options; padding rows have no budget.
  """

  indices: tuple[int, ...]
  inputs_BE: jax.Array
  row_key_B: jax.Array
  sampling: Sampling


def make_sampling(
  rows: Sequence[SamplingConfig], num_rows: int, cap: Sequence[int]
) -> Sampling:
  """The rows' options as arrays; rows beyond `rows` are born done."""

  def column(values, dtype, surplus):
    surplus_rows = [surplus] * (num_rows - len(rows))
    # NumPy: `jit` puts it on the device, which costs less than an eager copy each.
    return np.array([*values, *surplus_rows], dtype)

  return Sampling(
    temperature_B=column((row.temperature for row in rows), np.float32, 0),
    top_k_B=column((row.top_k for row in rows), np.int32, 0),
    top_p_B=column((row.top_p for row in rows), np.float32, 1),
    min_new_tokens_B=column((row.min_new_tokens for row in rows), np.int32, 0),
    max_new_tokens_B=column((row.max_new_tokens for row in rows), np.int32, 0),
    num_draft_B=column(cap, np.int32, 0),
  )


def make_batches(
  sources: Sequence[Sequence[int]],
  sampling: Sequence[SamplingConfig],
  caps: Sequence[int],
  *,
  batch_size: int,
  buckets: Sequence[int] = SOURCE_BUCKETS,
  first_index: int = 0,
  mesh: jax.sharding.Mesh | None = None,
) -> Iterator[Batch]:
  """Batches of few shapes: lengths are bucketed, row counts powers of two.

  Args:
    sources: ids of each text.
    sampling: options of each text.
    caps: most drafted tokens a round, of each text.
    batch_size: most rows of a batch.
    buckets: source lengths that are padded to.
    first_index: number of the first text, which its random stream depends on.
    mesh: rows are spread over its data axis, padded to a multiple of it; one row is
      copied.

  Yields:
    Each text in one batch; texts keep their order within a bucket.
  """
  lengths = [len(ids) for ids in sources]
  for length, rows in text_lib.group_by_length(lengths, batch_size, buckets):
    num_rows = min(batch_size, 1 << (len(rows) - 1).bit_length())
    num_rows = mesh_lib.padded_rows(num_rows, mesh)
    # A padding row needs one visible position, or its softmax has no term.
    ids = [sources[row] for row in rows]
    ids += [[text_lib.EOS_ID]] * (num_rows - len(rows))
    seeds = [sampling[row].seed for row in rows]
    surplus = [0] * (num_rows - len(rows))
    example_ids = [first_index + row for row in rows] + surplus
    batch = Batch(
      indices=tuple(first_index + row for row in rows),
      inputs_BE=jnp.asarray(text_lib.pad(ids, length)),
      row_key_B=rng.row_keys(
        np.array(seeds + surplus, np.uint32), np.array(example_ids, np.int32)
      ),
      sampling=make_sampling(
        [sampling[row] for row in rows], num_rows, [caps[row] for row in rows]
      ),
    )
    if mesh is not None:
      batch = Batch(batch.indices, *mesh_lib.place_rows(tuple(batch[1:]), mesh))
    yield batch


def max_length(max_new_tokens: int) -> int:
  """The loop's static length: bucketed, so that few budgets compile."""
  return text_lib.bucket_length(max_new_tokens, LENGTH_BUCKETS) + 1


def read_rows(
  state: DecodeState, indices: Sequence[int], vocabulary: Vocabulary
) -> list[Generation]:
  """The results of a batch's real rows."""
  tokens_BS, length_B, trace = distributed.to_host(
    (state.tokens_BS, state.length_B, state.trace)
  )
  return [
    _read_row(index, tokens_BS[row, 1 : length_B[row]], trace, row, vocabulary)
    for row, index in enumerate(indices)
  ]


def _read_row(
  index: int, ids: np.ndarray, trace: Trace, row: int, vocabulary: Vocabulary
) -> Generation:
  emitted = slice(1, 1 + len(ids))
  ended = bool(len(ids)) and int(ids[-1]) == vocabulary.eos_id
  return Generation(
    index=index,
    text=vocabulary.decode(ids.tolist()),
    ids=tuple(ids.tolist()),
    logprobs=tuple(trace.logp_BS[row, emitted].tolist()),
    finish_reason='eos' if ended else 'length',
    sources=tuple(
      SOURCE_NAMES[code] for code in trace.source_BS[row, emitted].tolist()
    ),
    rounds=tuple(trace.round_BS[row, emitted].tolist()),
    num_target_calls=int(trace.rounds_B[row]),
    drafted_per_position=tuple(trace.drafted_BG[row].tolist()),
    accepted_per_position=tuple(trace.accepted_BG[row].tolist()),
  )


def read_stream(
  states: Iterator[DecodeState],
  index: int,
  vocabulary: Vocabulary,
) -> Iterator[Chunk]:
  """Chunks of a one-row stream; their texts join to the final text."""
  shown, num_ids = '', 0
  for state in states:
    (generation,) = read_rows(state, [index], vocabulary)
    done = bool(state.done_B[0])
    text = generation.text
    # The rest of a character may come with the next token.
    stable = text if done else text.rstrip('\ufffd')
    if not stable.startswith(shown):
      stable = shown
    yield Chunk(
      text=stable[len(shown) :],
      ids=generation.ids[num_ids:],
      sources=generation.sources[num_ids:],
      generation=generation if done else None,
    )
    shown, num_ids = stable, len(generation.ids)
