"""Unigram and bigram tables as drafts: the cheapest approximations of all.

Section 4 of Leviathan, Kalman and Matias (ICML 2023) measures such drafts: a
bigram table reaches alpha of about 0.2 at a cost c of nearly 0.
"""

from collections.abc import Callable, Iterable, Sequence

import jax.numpy as jnp
import numpy as np

from specjax import shapes
from specjax.core import types
from specjax.drafters import model


def _no_cache(params, inputs_BE, *, num_slots):
  del params, inputs_BE, num_slots
  return ()


def _unigram_extend(logp_V, cache, tokens_BT, start_B):
  del start_B
  shape_BTV = (*tokens_BT.shape, logp_V.shape[0])
  return types.Output(jnp.broadcast_to(logp_V[None, None], shape_BTV)), cache


def _bigram_extend(logp_VV, cache, tokens_BT, start_B):
  del start_B
  return types.Output(logp_VV[tokens_BT]), cache


# `metrics.alpha` measures them as it does any model; `Params.draft` as below.
unigram_model = types.Model(_no_cache, _unigram_extend)
bigram_model = types.Model(_no_cache, _bigram_extend)


def unigram_draft(
  warp: Callable[..., shapes.Logits_BTV], num_draft: int
) -> types.Drafter:
  """Every draft is drawn from one law: q(x) = warp(logp_V).

  Args:
    warp: as for `model_draft`.
    num_draft: G >= 1.

  Returns:
    A `Drafter`; `Params.draft` is a float32 [V] of log-probabilities, such as
    `fit_unigram` makes.
  """
  return model.model_draft(unigram_model, warp, num_draft)


def bigram_draft(
  warp: Callable[..., shapes.Logits_BTV], num_draft: int
) -> types.Drafter:
  """Each draft depends on the token before it: q(x | y) = warp(logp_VV[y]).

  Args:
    warp: as for `model_draft`.
    num_draft: G >= 1.

  Returns:
    A `Drafter`; `Params.draft` is a float32 [V, V] of log-probabilities, row y
    the law after token y, such as `fit_bigram` makes.
  """
  return model.model_draft(bigram_model, warp, num_draft)


def fit_unigram(
  sequences: Iterable[Sequence[int]], vocab_size: int, smoothing: float = 1.0
) -> np.ndarray:
  """Additively smoothed unigram log-probabilities of token sequences.

    q(x) = (count(x) + smoothing) / (total + smoothing V)

  Args:
    sequences: token ids in [0, vocab_size), without the start token and with
      the end token, as the target should produce them.
    vocab_size: V.
    smoothing: pseudo-count of every token, > 0.

  Returns:
    float32 [V].

  Raises:
    ValueError: smoothing <= 0, or an id outside the vocabulary.
  """
  count_V = np.zeros(vocab_size)
  for tokens in _checked(sequences, vocab_size, smoothing):
    count_V += np.bincount(tokens, minlength=vocab_size)
  count_V += smoothing
  return np.log(count_V / count_V.sum()).astype(np.float32)


def fit_bigram(
  sequences: Iterable[Sequence[int]],
  vocab_size: int,
  smoothing: float = 1.0,
  start_id: int = 0,
) -> np.ndarray:
  """Bigram log-probabilities that back off to the unigram law.

    q(x | y) = (count(y, x) + smoothing q(x)) / (count(y) + smoothing)

  Args:
    sequences: as for `fit_unigram`.
    vocab_size: V.
    smoothing: pseudo-count of every context, spread as the unigram law, > 0.
    start_id: the context of a sequence's first token.

  Returns:
    float32 [V, V]; row y is the law after token y.

  Raises:
    ValueError: smoothing <= 0, or an id outside the vocabulary.
  """
  count_VV = np.zeros((vocab_size, vocab_size))
  unigram_V = np.ones(vocab_size)
  for tokens in _checked(sequences, vocab_size, smoothing):
    np.add.at(count_VV, (np.concatenate([[start_id], tokens[:-1]]), tokens), 1.0)
    unigram_V += np.bincount(tokens, minlength=vocab_size)
  count_VV += smoothing * (unigram_V / unigram_V.sum())[None]
  return np.log(count_VV / count_VV.sum(axis=1, keepdims=True)).astype(np.float32)


def _checked(sequences, vocab_size, smoothing):
  if not smoothing > 0:
    raise ValueError(
      f'smoothing={smoothing}: choose a positive value, so that the draft can'
      ' propose any token'
    )
  for tokens in sequences:
    tokens = np.asarray(tokens, np.int64)
    if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab_size):
      raise ValueError(
        f'a sequence holds ids from {tokens.min()} to {tokens.max()}: they must be'
        f' in [0, vocab_size={vocab_size})'
      )
    if tokens.size:
      yield tokens
