"""What is counted and timed, each name defined once (docs/metrics.md).

Counts come from the loop's trace, on the host; alpha from one wide pass of both
models over the emitted text; latencies from a clock that can be replaced.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import shapes
from specjax.core.loop import Source
from specjax.core.types import DecodeState, Model, Params, Sampling
from specjax.core.warp import Warp


class Summary(NamedTuple):
  """Counts over the rows of one or more batches; rates are derived from them.

  Attributes:
    num_target_calls: target passes, each counted once for every live row.
    num_drafts: of these, calls that had at least one draft to verify.
    num_draft_tokens: tokens that were really proposed, not gamma per call.
    num_accepted_tokens: of these, accepted *and* emitted.
    num_corrections: tokens drawn from the residual after a rejection.
    num_emitted_tokens: new tokens, EOS counted.
    num_eos_accepted: rows whose EOS was itself an accepted draft. Such a row's
      last call emits no further token, so that always
      `num_target_calls + num_accepted_tokens
      == num_emitted_tokens + num_eos_accepted`.
    draft_tokens_per_position: `num_draft_tokens` by place in the block, length G.
    accepted_tokens_per_position: `num_accepted_tokens` likewise.
  """

  num_target_calls: int
  num_drafts: int
  num_draft_tokens: int
  num_accepted_tokens: int
  num_corrections: int
  num_emitted_tokens: int
  num_eos_accepted: int
  draft_tokens_per_position: tuple[int, ...]
  accepted_tokens_per_position: tuple[int, ...]

  @property
  def acceptance_rate(self) -> float:
    """Accepted / really proposed, in [0, 1]; 0.0 if nothing was proposed."""
    return _rate(self.num_accepted_tokens, self.num_draft_tokens)

  @property
  def acceptance_rate_per_position(self) -> tuple[float, ...]:
    """`acceptance_rate` by place in the block, length G."""
    return tuple(
      _rate(accepted, drafted)
      for accepted, drafted in zip(
        self.accepted_tokens_per_position, self.draft_tokens_per_position, strict=True
      )
    )

  @property
  def block_efficiency(self) -> float:
    """Tokens emitted per target call, in [0, G + 1]; 0.0 without a call.

    The same number is called mean acceptance length elsewhere.
    """
    return _rate(self.num_emitted_tokens, self.num_target_calls)

  def block_efficiency_at(self, gamma: int) -> float:
    """What `block_efficiency` would be with another gamma, by the counts of this one.

    Draft i is taken to be accepted in as many calls as it was here; past this gamma,
    each as often where the one before it was, as the last one here. So positions need
    not be alike, and calls without a draft count as what they are.

    Args:
      gamma: >= 0; 0 is plain decoding, 1 token a call.
    """
    calls, counts = self.num_target_calls, self.accepted_tokens_per_position
    if gamma == 0 or not sum(counts):
      return 1.0
    *_, before, last = (calls, *counts)
    more = [last * _rate(last, before) ** i for i in range(1, gamma - len(counts) + 1)]
    share = (sum(counts[:gamma]) + sum(more)) / sum(counts)
    return 1.0 + (self.block_efficiency - 1.0) * share

  @property
  def alpha_estimate(self) -> float:
    """Accepted / judged: the likeliest alpha if acceptances were independent.

    Token-wise verification judges drafts up to the first rejection, so the number
    judged is accepted + corrections. 0.0 if nothing was judged. It needs no draft
    model's law, but averages over what was drafted: `alpha` is the definition.
    """
    return _rate(
      self.num_accepted_tokens, self.num_accepted_tokens + self.num_corrections
    )

  def as_dict(self) -> dict[str, Any]:
    """All counts and rates, for JSON."""
    return {
      **self._asdict(),
      'acceptance_rate': self.acceptance_rate,
      'acceptance_rate_per_position': self.acceptance_rate_per_position,
      'block_efficiency': self.block_efficiency,
      'alpha_estimate': self.alpha_estimate,
    }


def _rate(part: int, whole: int) -> float:
  return part / whole if whole else 0.0


def summarize(state: DecodeState, eos_id: int) -> Summary:
  """Counts of a finished (or running) decode.

  Args:
    state: what `loop.decode` returned or `loop.stream` yielded.
    eos_id: the id that ended rows; -1 for none.

  Returns:
    The `Summary` of all rows; rows that never ran add nothing.
  """
  trace = jax.tree.map(np.asarray, state.trace)
  tokens_BS, length_B = np.asarray(state.tokens_BS), np.asarray(state.length_B)
  last_B1 = length_B[:, None] - 1
  last_token_B = np.take_along_axis(tokens_BS, last_B1, axis=1)[:, 0]
  last_source_B = np.take_along_axis(trace.source_BS, last_B1, axis=1)[:, 0]
  drafted_G, accepted_G = trace.drafted_BG.sum(axis=0), trace.accepted_BG.sum(axis=0)
  return Summary(
    num_target_calls=int(trace.rounds_B.sum()),
    num_drafts=int(drafted_G[:1].sum()),
    num_draft_tokens=int(drafted_G.sum()),
    num_accepted_tokens=int(accepted_G.sum()),
    num_corrections=int((trace.source_BS == Source.CORRECTION).sum()),
    num_emitted_tokens=int((length_B - 1).sum()),
    num_eos_accepted=int(
      ((last_token_B == eos_id) & (last_source_B == Source.ACCEPTED)).sum()
    ),
    draft_tokens_per_position=tuple(drafted_G.tolist()),
    accepted_tokens_per_position=tuple(accepted_G.tolist()),
  )


def total(summaries: Iterable[Summary]) -> Summary:
  """The `Summary` of several batches together; rates are pooled, not averaged.

  Raises:
    ValueError: no summaries, or summaries of different gamma.
  """
  summaries = list(summaries)
  lengths = {len(each.draft_tokens_per_position) for each in summaries}
  if len(lengths) != 1:
    raise ValueError(
      f'summaries: gammas {sorted(lengths)}; give at least one, all of one gamma'
    )

  def add(values: Sequence[Any]) -> Any:
    if isinstance(values[0], tuple):
      return tuple(sum(each) for each in zip(*values, strict=True))
    return sum(values)

  return Summary(*(add(values) for values in zip(*summaries, strict=True)))


class Alpha(NamedTuple):
  """Measured alpha, and what it is the mean of.

  Attributes:
    sum_B: float32; sum over the row's prefixes of sum_x min(p(x), q(x)).
    count_B: int32; the row's prefixes, one for each emitted token.
  """

  sum_B: np.ndarray
  count_B: np.ndarray

  @property
  def mean(self) -> float:
    """alpha in [0, 1]: the mean over all prefixes; 0.0 without any."""
    count = int(self.count_B.sum())
    return float(self.sum_B.sum(dtype=np.float64)) / count if count else 0.0


@functools.partial(jax.jit, static_argnames=('target', 'draft', 'warp', 'draft_warp'))
def _overlap(
  params, inputs_BE, tokens_BS, length_B, sampling, *, target, draft, warp, draft_warp
):
  num_rows, num_slots = tokens_BS.shape
  slot_1S = jnp.arange(num_slots)[None]
  slot_BS = jnp.broadcast_to(slot_1S + 1, tokens_BS.shape)
  start_B = jnp.zeros(num_rows, jnp.int32)

  def law(model, model_params, model_warp):
    cache = model.init(model_params, inputs_BE, num_slots=num_slots)
    output, _ = model.extend(model_params, cache, tokens_BS, start_B)
    return jnp.exp(model_warp(output.logits_BTV, sampling, slot_BS))

  p_BSV = law(target, params.target, warp)
  q_BSV = law(draft, params.draft, draft_warp)
  # An id that only one of the two vocabularies has adds min(p, 0) = 0.
  num_ids = min(p_BSV.shape[-1], q_BSV.shape[-1])
  beta_BS = jnp.sum(jnp.minimum(p_BSV[..., :num_ids], q_BSV[..., :num_ids]), axis=-1)
  judged_BS = slot_1S < length_B[:, None] - 1
  return jnp.sum(jnp.where(judged_BS, beta_BS, 0.0), axis=1), length_B - 1


def alpha(
  params: Params,
  inputs_BE: shapes.Tokens_BE,
  tokens_BS: shapes.Tokens_BS,
  length_B: shapes.Int_B,
  sampling: Sampling,
  *,
  target: Model,
  draft: Model,
  warp: Warp,
  draft_warp: Warp | None = None,
) -> Alpha:
  """Mean over the text's prefixes of sum_x min(p(x), q(x)): Corollary 3.6.

    alpha = E[ sum_x min(p(x | prefix), q(x | prefix)) ],  prefixes drawn from p

  The loop's output has the target's law, so its prefixes are the right ones,
  whichever drafter made them. One teacher-forced `extend` of each model.

  Args:
    params: parameters of the target and of the draft model.
    inputs_BE: int32 source ids, 0 is padding.
    tokens_BS: int32, `DecodeState.tokens_BS`: slot 0 is the start token.
    length_B: int32 >= 1, `DecodeState.length_B`.
    sampling: the options the text was decoded with.
    target: the target.
    draft: the draft model, of the same vocabulary up to padding.
    warp: the target's logits -> log-law.
    draft_warp: the draft's; None for the target's.

  Returns:
    An `Alpha`: the mean, and sums and counts per row.
  """
  sum_B, count_B = _overlap(
    params,
    inputs_BE,
    tokens_BS,
    length_B,
    sampling,
    target=target,
    draft=draft,
    warp=warp,
    draft_warp=warp if draft_warp is None else draft_warp,
  )
  return Alpha(np.asarray(sum_B), np.asarray(count_B))


class Latency(NamedTuple):
  """Latencies of one request, in the clock's unit (seconds by default).

  Attributes:
    ttft: time to first token: from the request, encoder included, to the first
      chunk. Compilation is never inside.
    itl: inter-token latency: times between consecutive chunks; a chunk is what
      one round emits, so it does not depend on how many tokens that is.
    tpot: time per output token: (e2e - ttft) / (n - 1); None for n = 1.
    e2e: from the request to the last chunk.
    num_tokens: n.
  """

  ttft: float
  itl: tuple[float, ...]
  tpot: float | None
  e2e: float
  num_tokens: int

  @property
  def mean_itl(self) -> float | None:
    """Mean time between chunks; None for a single chunk."""
    return statistics.fmean(self.itl) if self.itl else None


def latency(
  chunk_times: Sequence[float], chunk_sizes: Sequence[int], start: float = 0.0
) -> Latency:
  """Latencies from the times at which chunks of tokens arrived.

  Args:
    chunk_times: not decreasing; when each chunk arrived.
    chunk_sizes: >= 1; tokens in each chunk.
    start: when the request was made.

  Raises:
    ValueError: no chunks, unequal lengths, an empty chunk, time running back.

  Example:
    >>> result = latency([10.0, 20.0, 30.0], [4, 1, 5])
    >>> result.ttft, result.itl, round(result.tpot, 4)
    (10.0, (10.0, 10.0), 2.2222)
  """
  if not chunk_times or len(chunk_times) != len(chunk_sizes):
    raise ValueError(
      f'chunk_times: {len(chunk_times)} times for {len(chunk_sizes)} chunks;'
      ' give one for each of at least one chunk'
    )
  if min(chunk_sizes) < 1:
    raise ValueError(f'chunk_sizes: {min(chunk_sizes)}; a chunk has at least 1 token')
  times = [start, *chunk_times]
  gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
  if min(gaps) < 0:
    raise ValueError(f'chunk_times: {times}; times must not decrease')
  num_tokens, e2e = sum(chunk_sizes), times[-1] - start
  tpot = (e2e - gaps[0]) / (num_tokens - 1) if num_tokens > 1 else None
  return Latency(gaps[0], tuple(gaps[1:]), tpot, e2e, num_tokens)


def measure_latency(
  stream: Callable[[], Iterable[DecodeState]],
  *,
  row: int = 0,
  clock: Callable[[], float] = time.perf_counter,
) -> Latency:
  """Latencies of one row of a stream.

  The stream runs twice: first to compile, unmeasured, then against the clock.

  Args:
    stream: starts a stream from the raw request, encoder included; for example
      `lambda: loop.stream(...)`.
    row: of the batch.
    clock: returns a time; replace it in tests.
  """
  for _ in stream():
    pass
  times, sizes = [], []
  start = clock()
  for size in _chunk_sizes(stream(), row):
    times.append(clock())
    sizes.append(size)
  return latency(times, sizes, start)


def _chunk_sizes(states: Iterable[DecodeState], row: int) -> Iterator[int]:
  """Tokens that each round emitted in one row; reading a length synchronises."""
  length = 1
  for state in states:
    now = int(np.asarray(state.length_B)[row])
    if now > length:
      yield now - length
    length = now
