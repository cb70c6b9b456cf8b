"""Pairs of random tables for `models.table`, and their laws as functions."""

from collections.abc import Callable

import numpy as np


def random_pair(
  seed: int,
  vocab_size: int,
  order: int = 1,
  *,
  agreement: float = 0.65,
  zeros_p: int = 0,
  zeros_q: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
  """Log-probability tables of a target and of a draft that resembles it.

    p(. | c) ~ Dirichlet(1),   q = agreement p + (1 - agreement) r,  r ~ Dirichlet(1)

  Args:
    seed: of the tables.
    vocab_size: V.
    order: number of tokens that the laws depend on.
    agreement: share of p in q, in [0, 1].
    zeros_p: ids that each row of p rules out (log-probability -inf), < V.
    zeros_q: ids that each row of q rules out.

  Returns:
    Two float32 [(V+1)^order, V].
  """
  rng = np.random.default_rng(seed)
  num_contexts = (vocab_size + 1) ** order

  def ruled_out(law_CV, zeros):
    order_CV = rng.random(law_CV.shape).argsort(axis=1)
    return np.where(order_CV < zeros, 0.0, law_CV)

  p_CV, r_CV = rng.dirichlet(np.ones(vocab_size), (2, num_contexts))
  q_CV = ruled_out(agreement * p_CV + (1 - agreement) * r_CV, zeros_q)
  p_CV = ruled_out(p_CV, zeros_p)
  with np.errstate(divide='ignore'):
    p_CV, q_CV = (
      np.log(law_CV / law_CV.sum(axis=1, keepdims=True)) for law_CV in (p_CV, q_CV)
    )
  return p_CV.astype(np.float32), q_CV.astype(np.float32)


def conditional(
  logits_CV: np.ndarray,
  order: int = 1,
  temperature: float = 1.0,
  top_k: int = 0,
  top_p: float = 1.0,
) -> Callable[[tuple[int, ...]], np.ndarray]:
  """The law of a table as a function of the emitted tokens.

  Args:
    logits_CV: [(V+1)^order, V], as for `models.table.table_model`.
    order: number of tokens that the law depends on.
    temperature: >= 0; 0 is the point mass on the first largest logit.
    top_k: keeps the k likeliest ids, and ties; 0: all.
    top_p: keeps the smallest set of likeliest ids of that mass; 1: all.

  Returns:
    Emitted tokens (a tuple) -> float64 law of the next token, [V].
  """
  logits_CV = np.asarray(logits_CV, np.float64)
  vocab_size = logits_CV.shape[1]
  if temperature == 0:
    law_CV = np.eye(vocab_size)[logits_CV.argmax(axis=1)]
  else:
    top_C1 = logits_CV.max(axis=1, keepdims=True)
    law_CV = np.exp((logits_CV - top_C1) / temperature)
    law_CV /= law_CV.sum(axis=1, keepdims=True)
  law_CV = np.array([_filtered(law_V, top_k, top_p) for law_V in law_CV])

  def law(prefix: tuple[int, ...]) -> np.ndarray:
    recent = ([vocab_size] * order + list(prefix))[len(prefix) :]
    code = sum(t * (vocab_size + 1) ** i for i, t in enumerate(reversed(recent)))
    return law_CV[code]

  return law


def _filtered(law_V, top_k, top_p):
  """Sorted and cut by hand, where `core.warp` bisects."""
  if top_k:
    law_V = np.where(law_V >= np.sort(law_V)[-top_k], law_V, 0.0)
    law_V /= law_V.sum()
  if top_p < 1:
    falling_V = np.sort(law_V)[::-1]
    kept = int(np.searchsorted(np.cumsum(falling_V), top_p)) + 1
    law_V = np.where(law_V >= falling_V[kept - 1], law_V, 0.0)
    law_V /= law_V.sum()
  return law_V
