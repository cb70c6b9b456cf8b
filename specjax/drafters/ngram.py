"""Prompt lookup: copy what followed the same n-gram in the source or the output.

For encoder-decoder models the text to copy from is the *encoder's source* first
of all: corrections and extractive summaries repeat it. Costs no model call.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp

from specjax import shapes
from specjax.core import types


class NgramState(NamedTuple):
  """The source, int32; 0 marks padding."""

  inputs_BE: shapes.Tokens_BE


@functools.cache
def ngram_draft(
  num_draft: int, vocab_size: int, max_ngram: int = 3, min_ngram: int = 1
) -> types.Drafter:
  """A drafter that looks the last n emitted tokens up in source and output.

  Over the text `[source without pads ; output so far]`, for every position j,

    m_j = largest n <= max_ngram with text[j-n .. j-1] = output[-n ..]

  and the proposals are `text[j], text[j+1], ..` at the j of largest m_j >=
  min_ngram. Among equal m_j a source position beats an output position; of source
  positions the one nearest to j = length wins, as copying goes through the source
  roughly in order, and of output positions the latest.

  The draft's law is a point mass (log-probability 0, and -inf elsewhere), so a
  proposal is accepted with the target's probability of it. `count_B` is the
  number of tokens that really follow: never a pad, never beyond the end of the
  source or of the output, 0 when nothing matches (the round is then a plain
  step of the target).

  Args:
    num_draft: G >= 1.
    vocab_size: the target's number of logits V. Ids outside [1, V) are never
      matched or proposed.
    max_ngram: longest suffix of the output to look up, >= min_ngram.
    min_ngram: shortest, >= 1.

  Returns:
    A `Drafter`; it ignores `Params.draft`.

  Raises:
    ValueError: num_draft < 1, or not 1 <= min_ngram <= max_ngram.

  References:
    Saxena, Prompt Lookup Decoding, 2023 (decoder-only, over the prompt).
  """
  if num_draft < 1:
    raise ValueError(f'num_draft={num_draft}: prompt lookup needs at least 1')
  if not 1 <= min_ngram <= max_ngram:
    raise ValueError(
      f'min_ngram={min_ngram}, max_ngram={max_ngram}: choose'
      ' 1 <= min_ngram <= max_ngram'
    )

  def init(params, inputs_BE, *, num_slots):
    del params, num_slots
    return NgramState(inputs_BE)

  def propose(params, state, key_B, history):
    del params, key_B
    tokens_BS, length_B = history.tokens_BS, history.length_B
    num_inputs = state.inputs_BE.shape[1]
    text_BN = jnp.concatenate([state.inputs_BE, tokens_BS], axis=1)
    num_text = text_BN.shape[1]
    slot_1N = jnp.arange(num_text)[None] - num_inputs
    # The start token between source and output is not a word of the text, so it
    # separates them: no n-gram and no proposal crosses from one to the other.
    emitted_BN = (slot_1N >= 1) & (slot_1N < length_B[:, None])
    known_BN = (text_BN > 0) & (text_BN < vocab_size) & ((slot_1N < 0) | emitted_BN)

    matches_BN, ngram_BN = known_BN, jnp.zeros(text_BN.shape, jnp.int32)
    word_BN = jnp.where(known_BN, text_BN, -1)
    for n in range(1, max_ngram + 1):
      last_B1 = jnp.take_along_axis(tokens_BS, jnp.maximum(length_B - n, 0)[:, None], 1)
      before_BN = jnp.pad(word_BN, ((0, 0), (n, 0)), constant_values=-1)
      matches_BN &= (before_BN[:, :num_text] == last_B1) & (length_B > n)[:, None]
      ngram_BN += matches_BN
    ngram_BN = jnp.where(ngram_BN >= min_ngram, ngram_BN, 0)

    off_diagonal_BN = jnp.abs(slot_1N + num_inputs - length_B[:, None])
    rank_BN = jnp.where(slot_1N < 0, 2 * num_text - off_diagonal_BN, slot_1N)
    at_B = jnp.argmax(ngram_BN * (2 * num_text + 1) + rank_BN, axis=1)
    found_B = jnp.max(ngram_BN, axis=1) > 0

    next_BG = at_B[:, None] + jnp.arange(num_draft)[None]
    inside_BG = jnp.minimum(next_BG, num_text - 1)
    follows_BG = jnp.take_along_axis(known_BN, inside_BG, axis=1)
    follows_BG &= (next_BG < num_text) & found_B[:, None]
    run_BG = jnp.cumprod(follows_BG.astype(jnp.int32), axis=1)
    tokens_BG = jnp.take_along_axis(text_BN, inside_BG, axis=1) * run_BG
    count_B = jnp.minimum(run_BG.sum(axis=1), history.sampling.num_draft_B)
    return types.Draft(tokens_BG, point_mass(tokens_BG, vocab_size), count_B), state

  def advance(params, state, draft, verdict, output):
    del params, draft, verdict, output
    return state

  return types.Drafter(num_draft, init, propose, advance)


def point_mass(tokens_BG: shapes.Tokens_BG, vocab_size: int) -> shapes.LogLaw_BGV:
  """The log-law that is certain of `tokens_BG`: 0 there and -inf elsewhere."""
  is_token_BGV = tokens_BG[..., None] == jnp.arange(vocab_size)[None, None]
  return jnp.where(is_token_BGV, 0.0, -jnp.inf).astype(jnp.float32)
