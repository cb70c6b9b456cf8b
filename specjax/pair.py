"""A target and its draft, with everything that decoding text takes.

pair = specjax.load_pair()
for result in pair.generate(['ende: Click the button.'], num_draft=4):
  print(result.text, result.block_efficiency)
for piece in pair.stream('summ: ...'):
  print(piece, end='')
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax import drafters
from specjax.auto import AutoDecoder, Memory, OnChoice
from specjax.config import SamplingConfig, SpeculationConfig, check_budget
from specjax.core import autoregressive, coupling, loop, rng
from specjax.core.types import DecodeState, Drafter, Model, Params
from specjax.core.verify import block_verifier, token_verifier
from specjax.core.warp import make_warp
from specjax.data import corpus
from specjax.data import text as text_lib
from specjax.data.text import Vocabulary
from specjax.generation import (
  SOURCE_BUCKETS,
  Batch,
  Chunk,
  Generation,
  Progress,
  Source,
  check_banned,
  check_keywords,
  encode_sources,
  make_batches,
  max_length,
  per_text,
  read_rows,
  read_stream,
)
from specjax.models.t5 import T5Config
from specjax.parallel import mesh as mesh_lib
from specjax.parallel.model import shard_drafter, shard_while_loop
from specjax.parallel.rules import REPLICATED

EMBEDDED = 'embedded'
MAX_TABLE_IDS = 16384  # a bigram table of float32 is then 1 GB

_GREEDY = SamplingConfig()
_VERIFIERS = {'token': token_verifier, 'block': block_verifier}

PerText = SamplingConfig | Sequence[SamplingConfig]


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
  """A target, a draft, and the vocabulary that they share.

  Attributes:
    name: what was loaded.
    target: the model whose law outputs have.
    draft: the smaller model, over the target's logit width; None: only the other
      methods are there.
    params: parameters of both.
    target_config: the target's shape.
    draft_config: the draft's.
    vocabulary: ids `>= vocabulary.size` are padding and never emitted.
    max_source: most ids of a source, the end token included.
    table_text: file of output texts that the bigram table is counted on.
    source_buckets: lengths that sources are padded to.
    mesh: the devices that decode together (`specjax.shard_pair`); None: one device.
  """

  name: str
  target: Model
  draft: Model | None
  params: Params
  target_config: T5Config
  draft_config: T5Config | None
  vocabulary: Vocabulary
  max_source: int = 512
  table_text: str | None = None
  source_buckets: tuple[int, ...] = SOURCE_BUCKETS
  mesh: jax.sharding.Mesh | None = None

  @property
  def eos_id(self) -> int:
    return self.vocabulary.eos_id

  def encode(
    self, texts: Sequence[Source], *, truncate: bool = False
  ) -> list[list[int]]:
    """Ids of sources, checked.

    Args:
      texts: strings, or token ids (the end token is added where it is missing).
      truncate: cut sources longer than `max_source` instead of refusing them.

    Raises:
      ValueError: an empty source, a longer one, or an id outside the vocabulary.
    """
    return encode_sources(
      texts, self.vocabulary, max_source=self.max_source, truncate=truncate
    )

  def decoder(
    self,
    speculation: SpeculationConfig,
    *,
    max_new_tokens: int,
    banned_ids: tuple[int, ...] = (),
  ) -> tuple[Params, dict[str, Any]]:
    """What `loop.decode` and `loop.stream` are told about this pair.

    Equal arguments give identical functions, so nothing compiles twice.

    Returns:
      `(params, static keyword arguments)`.

    Raises:
      ValueError: the method needs a draft or table that is not there, the budget
        can not use so many drafted tokens, or a banned id is no token's.
    """
    check_banned(banned_ids, self.vocabulary)
    warp = make_warp(self.vocabulary.size, self.eos_id, tuple(banned_ids))
    params, drafter = self._drafter(speculation, warp)
    if self.mesh is not None:
      drafter = shard_drafter(drafter, self.mesh, REPLICATED)
    if drafter.num_draft:
      check_budget(drafter.num_draft, max_new_tokens)
    verifier = _VERIFIERS[speculation.rejection_sample_method]
    block_keys: Callable[..., rng.BlockKeys] = rng.block_keys
    if speculation.coupling == 'gumbel' and drafter.num_draft:
      verifier = coupling.gumbel_verifier
      block_keys = coupling.slot_block_keys(drafter.num_draft)
    return params, {
      'target': self.target,
      'drafter': drafter,
      'verifier': verifier,
      'block_keys': block_keys,
      'warp': warp,
      'max_len': max_length(max_new_tokens),
      'eos_id': self.eos_id,
    }

  def _drafter(self, speculation: SpeculationConfig, warp) -> tuple[Params, Drafter]:
    num_draft = speculation.max_draft
    target = self.params.target
    if speculation.method == 'none':
      return Params(target), autoregressive.no_draft
    if speculation.method == 'ngram':
      drafter = drafters.ngram_draft(
        num_draft,
        self.target_config.vocab_size,
        speculation.prompt_lookup_max,
        speculation.prompt_lookup_min,
      )
      return Params(target), drafter
    if speculation.method == 'table':
      return Params(target, self.table), drafters.bigram_draft(warp, num_draft)
    if self.draft is None:
      raise ValueError(
        f"method: 'draft_model', but {self.name} has no draft; name one with "
        '--draft_model, or use --method ngram'
      )
    is_coupled = speculation.coupling == 'gumbel'
    keys = {'keys': coupling.slot_keys} if is_coupled else {}
    return self.params, drafters.model_draft(self.draft, warp, num_draft, **keys)

  @functools.cached_property
  def memory(self) -> Memory:
    """What gamma 'auto' has measured and seen with this pair."""
    return Memory({}, {})

  @functools.cached_property
  def table(self) -> jax.Array:
    """float32 [V, V]; bigram log-probabilities of output texts."""
    num_ids = self.target_config.vocab_size
    if num_ids > MAX_TABLE_IDS:
      raise ValueError(
        f"method: 'table' with {num_ids} ids needs {num_ids**2 * 4 / 1e9:.0f} GB; "
        'use --method ngram'
      )
    if self.table_text is not None:
      texts = text_lib.read_lines(self.table_text)
    elif self.name == EMBEDDED:
      texts = [example.target for example in corpus.read_corpus('train')]
    else:
      raise ValueError(
        f"method: 'table', but there is no text to count bigrams of for {self.name}; "
        'name a file with --table_text'
      )
    sequences = [self.vocabulary.encode(text) for text in texts]
    table = drafters.fit_bigram(sequences, num_ids)
    if self.mesh is None:
      return jnp.asarray(table)
    return mesh_lib.place(table, mesh_lib.everywhere(self.mesh))

  def generate_batches(
    self,
    texts: Sequence[Source],
    *,
    sampling: PerText = _GREEDY,
    num_draft: int | str | None = None,
    method: str = 'draft_model',
    rejection_sample_method: str = 'token',
    prompt_lookup_max: int = 3,
    prompt_lookup_min: int = 1,
    coupling: str = 'none',
    max_draft: int = 8,
    num_draft_cap: int | Sequence[int] | None = None,
    batch_size: int = 8,
    truncate: bool = False,
    on_choice: OnChoice | None = None,
  ) -> Iterator[list[Generation]]:
    """Like `generate`, but yields the results of each batch when they are there.

    Arguments are checked at once; batches come shortest bucket first.
    """
    speculation = SpeculationConfig(
      method,  # type: ignore[arg-type]
      num_draft,  # type: ignore[arg-type]
      rejection_sample_method,  # type: ignore[arg-type]
      prompt_lookup_max,
      prompt_lookup_min,
      coupling,  # type: ignore[arg-type]
      max_draft,
    )
    if batch_size < 1:
      raise ValueError(f'batch_size: {batch_size}; give 1 or more')
    sources = self.encode(texts, truncate=truncate)
    rows = per_text('sampling', sampling, len(sources))
    budget = max(row.max_new_tokens for row in rows)
    speculation = speculation.within(budget)
    caps = per_text('num_draft_cap', num_draft_cap, len(sources))
    caps = [speculation.max_draft if cap is None else int(cap) for cap in caps]
    if min(caps) < 0:
      raise ValueError(f'num_draft_cap: {min(caps)}; give 0 or more')
    if len({row.banned_ids for row in rows}) > 1:
      raise ValueError('banned_ids: differ between texts; give all texts the same')
    limits: dict[str, Any] = {
      'max_new_tokens': budget, 'banned_ids': rows[0].banned_ids
    }  # fmt: skip
    read = self._reader(speculation, on_choice, **limits)
    batches = make_batches(
      sources,
      rows,
      caps,
      batch_size=batch_size,
      buckets=self.source_buckets,
      mesh=self.mesh,
    )
    return map(read, batches)

  def _reader(
    self, speculation: SpeculationConfig, on_choice: OnChoice | None, **limits: Any
  ) -> Callable[[Batch], list[Generation]]:
    if speculation.is_auto:
      return AutoDecoder(self, speculation, **limits, on_choice=on_choice).read
    params, static = self.decoder(speculation, **limits)

    def read(batch: Batch) -> list[Generation]:
      state = self.decode(params, batch, static)
      return read_rows(state, batch.indices, self.vocabulary)

    return read

  def decode(self, params: Params, batch: Batch, static: dict[str, Any]) -> DecodeState:
    """`loop.decode` of a batch, with what `decoder` returned."""
    mesh, while_loop = self.mesh, jax.lax.while_loop
    if mesh is not None:
      while_loop = shard_while_loop(mesh, REPLICATED)
    rows = (batch.inputs_BE, batch.row_key_B, batch.sampling)
    with self.precision():
      return loop.decode(params, *rows, **static, while_loop=while_loop)

  def generate(
    self,
    texts: Sequence[Source],
    *,
    on_progress: Progress | None = None,
    **options: Any,
  ) -> list[Generation]:
    """Decodes texts; the outputs' law is the target's, whatever drafts.

    New texts, seeds, temperatures, top-k, top-p, budgets (within a bucket) and
    caps never compile anything again. A text's result does not depend on its
    neighbours: its random stream is that of its seed and its number.

    Args:
      texts: strings with their task's prefix, or token ids.
      on_progress: called with (texts done, texts in all) after each batch.
      **options: those of `generate_batches`:
        sampling: a `SamplingConfig`, or one per text; greedy by default.
        num_draft: G >= 1, at most max_new_tokens - 1; by default 4, or what the
          largest budget can use. 'auto': measured and chosen, see `specjax.auto`.
        method: 'draft_model', 'ngram' (prompt lookup), 'table' or 'none'.
        rejection_sample_method: 'token' or 'block'.
        prompt_lookup_max, prompt_lookup_min: n-gram lengths of 'ngram'.
        coupling: 'gumbel' draws both models' tokens with shared noise: sampled text
          equals method 'none''s for the same seed, for fewer accepted drafts.
        max_draft: largest G of 'auto'; default 8.
        on_choice: called with each `eval.tuning.Choice` of 'auto'.
        num_draft_cap: most drafted tokens a round, for all texts or per text;
          unlike `num_draft` it compiles nothing.
        batch_size: most texts decoded together; default 8.
        truncate: cut sources longer than `max_source`.

    Returns:
      One `Generation` per text, in the order of `texts`.

    Raises:
      ValueError: bad input; the message names the field, the value, the remedy.
    """
    check_keywords('generate', options, self.generate_batches)
    results: dict[int, Generation] = {}
    for batch in self.generate_batches(texts, **options):
      results.update({generation.index: generation for generation in batch})
      if on_progress is not None:
        on_progress(len(results), len(texts))
    return [results[index] for index in range(len(texts))]

  def stream(
    self,
    text: Source,
    *,
    sampling: SamplingConfig = _GREEDY,
    num_draft: int | str | None = None,
    method: str = 'draft_model',
    rejection_sample_method: str = 'token',
    prompt_lookup_max: int = 3,
    prompt_lookup_min: int = 1,
    coupling: str = 'none',
    max_draft: int = 8,
    truncate: bool = False,
    index: int = 0,
    on_choice: OnChoice | None = None,
  ) -> Iterator[Chunk]:
    """Decodes one text round by round.

    Args:
      text: a string with its task's prefix, or token ids.
      sampling: options.
      truncate: cut a source longer than `max_source`.
      index: number of the text: with it, the stream equals `generate`'s result
        for the text of that number.
      num_draft, and the others: as for `generate`.

    Returns:
      An iterator of `Chunk`s, one per call of the target.

    Raises:
      ValueError: bad input; at once, not at the first chunk.
    """
    speculation = SpeculationConfig(
      method,  # type: ignore[arg-type]
      num_draft,  # type: ignore[arg-type]
      rejection_sample_method,  # type: ignore[arg-type]
      prompt_lookup_max,
      prompt_lookup_min,
      coupling,  # type: ignore[arg-type]
      max_draft,
    ).within(sampling.max_new_tokens)
    limits: dict[str, Any] = {
      'max_new_tokens': sampling.max_new_tokens, 'banned_ids': sampling.banned_ids
    }  # fmt: skip
    (batch,) = make_batches(
      self.encode([text], truncate=truncate),
      [sampling],
      [speculation.max_draft],
      batch_size=1,
      buckets=self.source_buckets,
      first_index=index,
      mesh=self.mesh,
    )
    if speculation.is_auto:
      return AutoDecoder(self, speculation, **limits, on_choice=on_choice).stream(batch)
    params, static = self.decoder(speculation, **limits)
    states = loop.stream(
      params, batch.inputs_BE, batch.row_key_B, batch.sampling, **static
    )
    return read_stream(self._precisely(states), index, self.vocabulary)

  def precision(self):
    """Context in which float32 is float32, on TPU and GPU too."""
    is_float32 = self.target_config.dtype == 'float32'
    return jax.default_matmul_precision('highest' if is_float32 else 'default')

  def _precisely(self, states: Iterator[DecodeState]) -> Iterator[DecodeState]:
    # Entered anew for each step: a generator must not leave its caller in it.
    while True:
      with self.precision():
        state = next(states, None)
      if state is None:
        return
      yield state
