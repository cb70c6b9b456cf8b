"""Span corruption: T5's counts, uniform masks, and nothing of the text is lost."""

import collections

import numpy as np
import pytest

from specjax.data import spans
from specjax.testing.chi_square import chi_square

NUM_IDS, EOS = 1000, 1


def _corrupt(tokens, seed=0, density=0.15, mean_span=3.0):
  rng = np.random.default_rng(seed)
  return spans.corrupt(tokens, density, mean_span, rng, num_ids=NUM_IDS, eos_id=EOS)


def _restored(pair):
  """Puts each of the target's spans back where its sentinel is in the source."""
  found, current = {}, None
  for token in pair.target[:-1]:
    if token >= 900:
      current = found.setdefault(token, [])
    else:
      current.append(token)
  return [t for token in pair.source[:-1] for t in found.get(token, [token])]


def test_lengths_are_t5s():
  """568 tokens make 512 ids of source and 114 of target (Raffel et al. 2020)."""
  assert spans.lengths(512, 0.15, 3.0) == (568, 512, 114)


@pytest.mark.parametrize('length', [4, 5, 57, 568])
def test_text_is_source_and_target_together(length):
  tokens = np.random.default_rng(length).integers(3, 900, length, dtype=np.int32)
  pair = _corrupt(tokens)
  assert _restored(pair) == tokens.tolist()
  assert pair.source[-1] == pair.target[-1] == EOS
  sentinels = [token for token in pair.source if token >= 900]
  noise, count = spans.span_counts(length, 0.15, 3.0)
  assert sentinels == list(range(NUM_IDS - 1, NUM_IDS - 1 - count, -1))
  assert len(pair.target) == noise + count + 1
  assert noise == max(1, round(0.15 * length))


def test_masks_are_equally_likely():
  """4 kept tokens in 2 spans, 3 masked in 2: 3 * 2 masks."""
  rng = np.random.default_rng(0)
  counts = collections.Counter(
    tuple(spans.noise_mask(7, 3 / 7, 1.5, rng)) for _ in range(3000)
  )
  assert len(counts) == 6
  assert all(not mask[0] and mask[-1] and sum(mask) == 3 for mask in counts)
  observed = np.array(list(counts.values()))
  assert chi_square(observed, np.full(6, 1 / 6)).p_value > 1e-3


def test_an_epoch_has_every_token_once():
  documents = [np.arange(3, 3 + n, dtype=np.int32) for n in (40, 1, 90)]
  rng = np.random.default_rng(1)
  found = spans.corrupted_epoch(
    documents, 25, 0.15, 3.0, rng, num_ids=NUM_IDS, eos_id=EOS
  )
  restored = [_restored(pair) for pair in found]
  assert [len(tokens) for tokens in restored] == [25] * 5 + [6]
  joined = np.concatenate(restored).tolist()
  assert sorted(joined) == sorted(np.concatenate(documents).tolist())


def test_short_sources():
  with pytest.raises(ValueError, match='sources of 3 ids hold no span-corrupted text'):
    spans.lengths(3, 0.15, 3.0)
