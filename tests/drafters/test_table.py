"""Unigram and bigram drafts, and how they are fitted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import rng, types, warp
from specjax.drafters import bigram_draft, fit_bigram, fit_unigram, unigram_draft

WARP = warp.make_warp()
TEXTS = [[3, 4, 3, 4, 1], [3, 4, 1]]


def test_fit_unigram():
  law_V = np.exp(fit_unigram(TEXTS, 6, smoothing=0.5))
  np.testing.assert_allclose(law_V, np.array([0.5, 2.5, 0.5, 3.5, 3.5, 0.5]) / 11)
  assert fit_unigram(TEXTS, 6).dtype == np.float32


def test_fit_bigram():
  law_VV = np.exp(fit_bigram(TEXTS, 6, smoothing=1.0))
  unigram_V = np.array([1, 3, 1, 4, 4, 1]) / 14
  np.testing.assert_allclose(law_VV.sum(axis=1), 1.0, atol=1e-6)
  # 4 was followed by 3 once and by the end twice; both texts start with 3.
  after_four_V = np.eye(6)[3] + 2 * np.eye(6)[1] + unigram_V
  np.testing.assert_allclose(law_VV[4], after_four_V / 4, atol=1e-6)
  np.testing.assert_allclose(law_VV[0], (2 * np.eye(6)[3] + unigram_V) / 3, atol=1e-6)
  np.testing.assert_allclose(law_VV[5], unigram_V, atol=1e-6)  # never seen


@pytest.mark.parametrize('fit', [fit_unigram, fit_bigram])
def test_fit_refuses(fit):
  with pytest.raises(ValueError, match='smoothing=0'):
    fit(TEXTS, 6, smoothing=0)
  with pytest.raises(ValueError, match=r'from 1 to 4.*vocab_size=4'):
    fit(TEXTS, 4)
  with pytest.raises(ValueError, match='from -1'):
    fit([[-1, 2]], 4)


@pytest.mark.parametrize('fit', [fit_unigram, fit_bigram])
def test_fit_takes_empty_texts_and_generators(fit):
  np.testing.assert_array_equal(fit(iter([[], *TEXTS]), 6), fit(TEXTS, 6))


def propose(drafter, params, temperature=1.0):
  tokens_BS = jnp.array([[0, 3, 4, 0, 0, 0, 0], [0, 3, 0, 0, 0, 0, 0]], jnp.int32)
  sampling = warp.make_sampling(2, temperature=temperature)
  history = types.History(tokens_BS, jnp.array([3, 2], jnp.int32), sampling)
  state = drafter.init(params, jnp.zeros((2, 1), jnp.int32), num_slots=7)
  key_B = rng.row_keys(0, jnp.arange(2))
  return jax.jit(drafter.propose)(jnp.asarray(params), state, key_B, history)[0]


def test_unigram_draft():
  logp_V = fit_unigram(TEXTS, 6)
  draft = propose(unigram_draft(WARP, 3), logp_V, temperature=0.5)
  law_V = np.exp(2 * logp_V) / np.exp(2 * logp_V).sum()
  np.testing.assert_allclose(
    np.exp(draft.logq_BGV), np.broadcast_to(law_V, (2, 3, 6)), atol=1e-6
  )


def test_bigram_draft():
  logp_VV = fit_bigram(TEXTS, 6)
  draft = propose(bigram_draft(WARP, 3), logp_VV)
  before_BG = np.array([[4], [3]])
  before_BG = np.concatenate([before_BG, draft.tokens_BG[:, :-1]], axis=1)
  np.testing.assert_allclose(draft.logq_BGV, logp_VV[before_BG], atol=1e-6)
  greedy = propose(bigram_draft(WARP, 3), logp_VV, temperature=0.0)
  assert greedy.tokens_BG[1].tolist() == [4, 1, 3]
