"""Prompt lookup: what it finds, and every way to find nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import types, warp
from specjax.drafters import ngram_draft

VOCAB_SIZE = 100
NUM_SLOTS = 16
NUM_INPUTS = 12  # padded, so that most sources share one compilation


@functools.cache
def compiled(num_draft, **fields):
  return jax.jit(ngram_draft(num_draft, VOCAB_SIZE, **fields).propose)


def lookup(
  source, output, num_draft=4, num_inputs=NUM_INPUTS, cap=9, garbage=77, **fields
):
  """Proposals for one source and what was emitted so far."""
  inputs_BE = np.zeros((1, num_inputs), np.int32)
  inputs_BE[0, : len(source)] = source
  tokens_BS = np.full((1, NUM_SLOTS), garbage, np.int32)
  tokens_BS[0, : len(output) + 1] = [0, *output]
  drafter = ngram_draft(num_draft, VOCAB_SIZE, **fields)
  state = drafter.init(None, jnp.asarray(inputs_BE), num_slots=NUM_SLOTS)
  history = types.History(
    jnp.asarray(tokens_BS),
    jnp.array([len(output) + 1], jnp.int32),
    warp.make_sampling(1, num_draft=cap),
  )
  draft, _ = compiled(num_draft, **fields)(None, state, None, history)
  tokens = draft.tokens_BG[0]
  law_GV = np.exp(draft.logq_BGV[0])
  np.testing.assert_array_equal(law_GV, np.eye(VOCAB_SIZE)[np.asarray(tokens)])
  return tokens[: int(draft.count_B[0])].tolist()


@pytest.mark.parametrize(
  ('source', 'output', 'expected'),
  [
    ([11, 12, 13, 14, 15, 1], [12], [13, 14, 15, 1]),
    ([11, 12, 13, 14, 15, 16, 17, 1], [12], [13, 14, 15, 16]),
    # The end of the source is the end of the proposal.
    ([11, 12, 13, 1], [12], [13, 1]),
    ([11, 12, 13, 1], [13], [1]),
    # A longer match wins over an earlier one.
    ([12, 20, 11, 12, 30, 1], [11, 12], [30, 1]),
    ([12, 20, 11, 12, 30, 10, 11, 12, 40, 1], [10, 11, 12], [40, 1]),
    # Nothing in the source: the output itself is looked up.
    ([50, 51, 1], [11, 12, 13, 11], [12, 13, 11]),
    ([50, 51, 1], [11, 12, 11, 13, 11], [13, 11]),  # the latest
    # An equal match in the source beats one in the output.
    ([11, 40, 41, 1], [11, 30, 11], [40, 41, 1]),
    # Of equal matches in the source the one nearest to the output's place wins.
    ([11, 20, 11, 21, 11, 22, 11, 23, 1], [60, 61, 62, 11], [22, 11, 23, 1]),
  ],
)
def test_finds(source, output, expected):
  assert lookup(source, output) == expected


@pytest.mark.parametrize(
  ('source', 'output', 'num_inputs'),
  [
    ([], [12], 0),  # no source at all
    ([], [12], 6),  # all pads
    ([], [], 6),
    ([1], [12], 1),  # one token
    ([12], [12], 1),  # it matches, and nothing follows
    ([12], [12], 8),  # only pads follow
    ([11, 12], [10, 11, 12], 2),  # shorter than the match size
    ([11, 12, 13, 1], [], 4),  # nothing was emitted: no n-gram
    ([11, 12, 13, 1], [40], 4),  # no match
    ([11, 12, 13, 1], [11, 12, 13, 1], 4),  # the match ends at the last token
    ([50, 51, 1], [11, 12, 13], 3),  # the suffix matches only itself
  ],
)
def test_finds_nothing(source, output, num_inputs):
  assert lookup(source, output, num_inputs=num_inputs) == []


@pytest.mark.parametrize('num_inputs', [4, 5, 9])
def test_padding_of_the_source_changes_nothing(num_inputs):
  assert lookup([11, 12, 13, 1], [12], num_inputs=num_inputs) == [13, 1]
  assert lookup([11, 12, 13, 1], [13], num_inputs=num_inputs) == [1]


def test_nothing_crosses_from_the_source_to_the_output():
  # 12 then 13 are neighbours only across the border of source and output.
  assert lookup([11, 12], [13, 12, 13], min_ngram=2) == []
  assert lookup([11, 12], [13, 14, 12]) == []


def test_pads_are_never_matched_or_proposed():
  # The start token is the pad's id 0, and so is a stray pad inside a source.
  assert lookup([0, 20, 21, 1], []) == []
  assert lookup([11, 0, 12, 1], [11]) == []
  assert lookup([11, 12, 0, 13, 1], [11]) == [12]


def test_what_was_not_emitted_is_not_read():
  assert lookup([50, 1], [77, 78], garbage=78) == []
  assert lookup([50, 1], [78, 77, 78], garbage=66) == [77, 78]


def test_ids_outside_the_vocabulary_are_not_proposed():
  assert lookup([11, 12, VOCAB_SIZE, 13], [11]) == [12]
  assert lookup([11, -3, 12], [11]) == []


def test_sizes_of_the_ngrams():
  source, output = [11, 12, 13, 14, 1, 12, 20], [90, 11, 12]
  assert lookup(source, output, max_ngram=2, min_ngram=2) == [13, 14, 1, 12]
  assert lookup(source, output, max_ngram=3, min_ngram=3) == []
  assert lookup([12, 13, 1], output, min_ngram=1) == [13, 1]
  assert lookup([12, 13, 1], output, min_ngram=2) == []


def test_the_cap_and_num_draft_bound_the_proposal():
  source = [11, 12, 13, 14, 15, 1]
  assert lookup(source, [11], num_draft=2) == [12, 13]
  assert lookup(source, [11], cap=1) == [12]
  assert lookup(source, [11], cap=0) == []
  assert lookup([11, 12], [11], num_draft=30) == [12]


def reference(source, output, num_draft, max_ngram=3):
  """The definition, one position at a time."""
  text = [*source, None, *output]
  best = None
  for j in range(1, len(text)):
    if text[j] is None:
      continue
    size = 0
    while (
      size < min(max_ngram, len(output), j)
      and text[j - 1 - size] is not None
      and text[j - 1 - size] == output[-1 - size]
    ):
      size += 1
    in_source = j < len(source)
    near = -abs(j - len(output) - 1) if in_source else j - 10_000
    if size and (best is None or (size, near) > best[0]):
      best = (size, near), j
  if best is None:
    return []
  following = text[best[1] : best[1] + num_draft]
  return following[: following.index(None)] if None in following else following


def test_equals_the_definition_on_random_texts():
  random = np.random.default_rng(0)
  num_found = 0
  propose = jax.jit(ngram_draft(4, VOCAB_SIZE).propose)
  sources, outputs = [], []
  for _ in range(300):
    sources.append(random.integers(1, 6, random.integers(0, 12)).tolist())
    outputs.append(random.integers(1, 6, random.integers(0, 14)).tolist())
  inputs_BE, tokens_BS = np.zeros((300, 12), np.int32), np.full((300, 15), 3, np.int32)
  for row, (source, output) in enumerate(zip(sources, outputs, strict=True)):
    inputs_BE[row, : len(source)] = source
    tokens_BS[row, : len(output) + 1] = [0, *output]
  state = ngram_draft(4, VOCAB_SIZE).init(None, jnp.asarray(inputs_BE), num_slots=15)
  length_B = jnp.array([len(output) + 1 for output in outputs], jnp.int32)
  history = types.History(jnp.asarray(tokens_BS), length_B, warp.make_sampling(300))
  draft, _ = propose(None, state, None, history)
  for row in range(300):
    expected = reference(sources[row], outputs[row], 4)
    assert draft.tokens_BG[row, : draft.count_B[row]].tolist() == expected
    num_found += bool(expected)
  assert 150 < num_found < 300


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'num_draft': 0}, 'num_draft=0'),
    ({'num_draft': 2, 'min_ngram': 0}, 'min_ngram=0'),
    ({'num_draft': 2, 'min_ngram': 3, 'max_ngram': 2}, 'max_ngram=2'),
  ],
)
def test_refuses(fields, message):
  with pytest.raises(ValueError, match=message):
    ngram_draft(vocab_size=VOCAB_SIZE, **fields)
