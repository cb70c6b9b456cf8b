"""The embedded pair: sampled text against plain sampling of the same target.

Its law can not be enumerated. Equality under shared noise is the sharp test; the
two-sample test with independent noise says less (it sees total variations from
about 0.1 on in the first two tokens and in the lengths), but of the shipped rules.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import specjax
from specjax.config import SpeculationConfig
from specjax.core import coupling, loop, rng, warp
from specjax.drafters import model_draft

LEVEL = 1e-6
TEXTS = (
  'ende: Click the button.',
  'ende: Enter the name of the file.',
  'ende: The dialog is open.',
  'ende: Select all cells of the table.',
)


@functools.cache
def pair():
  return specjax.load_pair()


def decode(texts, seed, max_new_tokens, method='draft_model', gumbel=False, **options):
  ids = pair().encode(texts)
  longest = max(map(len, ids))
  inputs_BE = np.array([row + [0] * (longest - len(row)) for row in ids], np.int32)
  params, static = pair().decoder(
    SpeculationConfig(method, 4, 'block'), max_new_tokens=max_new_tokens
  )
  if gumbel:
    drafter = model_draft(pair().draft, static['warp'], 4, keys=coupling.slot_keys)
    static |= {
      'drafter': drafter,
      'verifier': coupling.gumbel_verifier,
      'block_keys': coupling.slot_block_keys(4),
    }
  return loop.decode(
    params,
    jnp.asarray(inputs_BE),
    rng.row_keys(seed, jnp.arange(len(texts))),
    warp.make_sampling(
      len(texts), temperature=1.0, max_new_tokens=max_new_tokens, **options
    ),
    **static,
  )


def test_sampled_text_is_plain_decoding_s_under_shared_noise():
  texts, num_tokens = TEXTS * 4, 24
  state = decode(texts, 0, num_tokens, gumbel=True)
  expected = decode(texts, 0, num_tokens, method='none')
  np.testing.assert_array_equal(state.length_B, expected.length_B)
  np.testing.assert_array_equal(
    state.tokens_BS[:, : num_tokens + 1], expected.tokens_BS[:, : num_tokens + 1]
  )
  # Sampled: the same source gives different texts; drafts are accepted.
  assert len(np.unique(np.asarray(state.tokens_BS)[::4], axis=0)) > 1
  accepted = np.asarray(state.trace.accepted_BG).sum()
  drafted = np.asarray(state.trace.drafted_BG).sum()
  assert accepted > 0.2 * drafted > 0


def two_sample_p_value(ours, theirs, min_count=10):
  """Chi-square of homogeneity; cells of fewer observations are pooled."""
  _, cell = np.unique(np.concatenate([ours, theirs]), return_inverse=True)
  counts = np.stack(
    [np.bincount(half, minlength=cell.max() + 1) for half in np.split(cell, 2)]
  )
  large = counts.sum(axis=0) >= min_count
  rest = counts[:, ~large].sum(axis=1, keepdims=True)
  counts = np.concatenate([counts[:, large], rest], axis=1)
  counts = counts[:, counts.sum(axis=0) > 0]
  assert counts.shape[1] >= 3, 'too few cells: nothing was compared'
  return stats.chi2_contingency(counts).pvalue


@pytest.fixture(scope='module')
def samples():
  texts = TEXTS[:1] * 512
  return [
    decode(texts, seed, 12, method=method, top_k=20)
    for seed, method in ((1, 'draft_model'), (2, 'none'))
  ]


def test_first_tokens_and_lengths_have_the_same_law(samples):
  def pairs(state):
    tokens_BS = np.asarray(state.tokens_BS, np.int64)
    return tokens_BS[:, 1] * 10_000 + tokens_BS[:, 2]

  ours, theirs = samples
  assert two_sample_p_value(pairs(ours), pairs(theirs)) > LEVEL
  lengths = [np.asarray(state.length_B) for state in samples]
  assert two_sample_p_value(*lengths) > LEVEL


def test_the_two_sample_test_can_fail(samples):
  lengths = [np.asarray(state.length_B) for state in samples]
  longer = lengths[0] + (np.arange(512) % 4 == 0)
  assert two_sample_p_value(longer, lengths[1]) < LEVEL
