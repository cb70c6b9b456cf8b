"""The Python API: a pair decodes text exactly, whatever drafts and however batched."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import generation
from specjax.command import compare
from specjax.config import SamplingConfig
from specjax.core import loop
from specjax.core.types import Output
from specjax.data import text as text_lib
from specjax.load import load_pair, resize_vocab
from specjax.models.table import table_model
from specjax.testing import tiny_pair

TEXTS = ['hello hello hello', 'ab', 'a longer text than the other two', 'ab']
SHORT = SamplingConfig(max_new_tokens=16)
WARM = SamplingConfig(max_new_tokens=16, temperature=1.0)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tiny_pair.write_tiny_pair(tmp_path_factory.mktemp('pair'))


@pytest.fixture(scope='module')
def pair(folder, tmp_path_factory):
  texts = tmp_path_factory.mktemp('texts') / 'outputs.txt'
  texts.write_text('hello hello\nab ab\n')
  return load_pair(folder, table_text=texts)


@pytest.fixture(scope='module')
def plain(pair):
  return pair.generate(TEXTS, sampling=SHORT, method='none')


def same(results, others):
  """Equal in everything, the last bits of the log-probabilities excepted."""
  assert len(results) == len(others)
  for result, other in zip(results, others, strict=True):
    np.testing.assert_allclose(result.logprobs, other.logprobs, atol=1e-4)
    assert dataclasses.replace(result, logprobs=other.logprobs) == other
  return True


def refusal(call, *arguments, **options):
  """The text of the ValueError that a call raises; always one line."""
  with pytest.raises(ValueError, match=r'.') as caught:
    call(*arguments, **options)
  assert '\n' not in str(caught.value)
  return str(caught.value)


@pytest.mark.parametrize(
  ('method', 'rule'),
  [
    ('draft_model', 'token'),
    ('draft_model', 'block'),
    ('ngram', 'token'),
    ('table', 'token'),
  ],
)
def test_greedy_outputs_are_plain_decodings(pair, plain, method, rule):
  results = pair.generate(
    TEXTS, sampling=SHORT, method=method, rejection_sample_method=rule
  )
  assert [each.ids for each in results] == [each.ids for each in plain]
  assert compare.differences(pair, pair.encode(TEXTS), results, plain) == []


def test_a_generation_describes_its_tokens(pair):
  results = pair.generate(TEXTS, sampling=WARM, method='ngram')
  sources = {name for result in results for name in result.sources}
  assert {'accepted', 'correction', 'plain'} <= sources
  for index, result in enumerate(results):
    count = len(result.ids)
    assert result.index == index
    assert result.text == pair.vocabulary.decode(result.ids)
    assert len(result.logprobs) == len(result.sources) == len(result.rounds) == count
    assert all(value <= 0 for value in result.logprobs)
    assert min(result.logprobs) < -0.1
    assert result.rounds[-1] == result.num_target_calls == len(set(result.rounds))
    assert result.num_accepted == result.sources.count('accepted')
    assert len(result.drafted_per_position) == 4
    for drafted, accepted in zip(
      result.drafted_per_position, result.accepted_per_position, strict=True
    ):
      assert drafted >= accepted >= 0
    ended = result.ids[-1] == pair.eos_id
    assert result.finish_reason == ('eos' if ended else 'length')
    assert ended or count == 16
    ends = result.summary.num_eos_accepted
    assert result.num_target_calls + result.num_accepted == count + ends
    record = json.loads(json.dumps(result.to_dict()))
    assert record['ids'] == list(result.ids)
    assert record['block_efficiency'] == count / result.num_target_calls


def test_nothing_drafted_is_a_rate_of_zero(plain):
  for result in plain:
    assert (result.num_drafted, result.acceptance_rate) == (0, 0.0)
    assert set(result.sources) == {'plain'}
    assert result.block_efficiency == 1.0


def test_neighbours_batches_and_padding_change_nothing(pair):
  rows = [
    SamplingConfig(max_new_tokens=16, temperature=1.0, seed=5),
    SamplingConfig(max_new_tokens=9, temperature=0.7, top_p=0.9, seed=6),
    SamplingConfig(max_new_tokens=16, seed=7),
    SamplingConfig(max_new_tokens=12, temperature=1.5, top_k=20, min_new_tokens=12),
  ]
  together = pair.generate(TEXTS, sampling=rows, batch_size=4)
  assert len({len(result.ids) for result in together}) > 1
  for batch_size in (1, 2):
    assert same(pair.generate(TEXTS, sampling=rows, batch_size=batch_size), together)
  narrow = dataclasses.replace(pair, source_buckets=(10, 40))
  # 'ab' is padded to 10 instead of 40, in a batch of its own.
  again = narrow.generate(TEXTS, sampling=rows, batch_size=2)
  assert [each.ids for each in again] == [each.ids for each in together]


def test_a_row_equals_itself_alone(pair):
  together = pair.generate(TEXTS, sampling=WARM)
  for index, text in enumerate(TEXTS):
    *_, last = pair.stream(text, sampling=WARM, index=index)
    assert same([last.generation], [together[index]])


def test_seeds(pair):
  def outputs(seed, temperature=1.0):
    sampling = SamplingConfig(max_new_tokens=12, temperature=temperature, seed=seed)
    return [each.ids for each in pair.generate(['ab'] * 4, sampling=sampling)]

  every = {seed: outputs(seed) for seed in (0, 1, 2, 2**31, 2**32 - 1)}
  assert every[0] == outputs(0), 'the same seed, another output'
  assert len({ids for rows in every.values() for ids in rows}) == 20, (
    'the same text in several rows, or under several seeds, gave the same sample'
  )
  assert len({ids for seed in (0, 1) for ids in outputs(seed, 0.0)}) == 1
  default = pair.generate(['ab'] * 4, sampling=SamplingConfig(0.999, max_new_tokens=12))
  assert default == pair.generate(
    ['ab'] * 4, sampling=SamplingConfig(0.999, max_new_tokens=12, seed=0)
  ), 'the documented default seed is 0'


def test_twenty_calls_compile_once(pair):
  def call(i):
    sampling = SamplingConfig(
      temperature=i / 10,
      top_p=1 - i / 100,
      top_k=i,
      seed=i,
      max_new_tokens=12 + i % 5,
      min_new_tokens=i % 3,
    )
    texts = [f'text {i}' * (1 + i % 3), 'b' * (1 + i)]
    return pair.generate(texts, sampling=sampling, num_draft_cap=i % 5)

  call(0)
  compiled = loop.decode._cache_size()
  assert compiled > 0
  for i in range(1, 20):
    call(i)
  assert loop.decode._cache_size() == compiled


def test_a_cap_bounds_what_is_drafted(pair):
  results = pair.generate(TEXTS, sampling=SHORT, num_draft_cap=[0, 1, 2, 4])
  for cap, result in enumerate(results[:3]):
    assert sum(result.drafted_per_position[cap:]) == 0
  assert results[2].drafted_per_position[1] > 0
  assert results[0].num_drafted == 0


def test_chunks_join_to_the_text(pair):
  chunks = list(pair.stream(TEXTS[0], sampling=SHORT))
  (whole,) = pair.generate(TEXTS[:1], sampling=SHORT)
  assert ''.join(str(chunk) for chunk in chunks) == whole.text
  assert sum((chunk.ids for chunk in chunks), ()) == whole.ids
  assert sum((chunk.sources for chunk in chunks), ()) == whole.sources
  assert len(chunks) == whole.num_target_calls
  assert [chunk.generation for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
  assert chunks[-1].generation == whole


def test_a_chunk_never_ends_within_a_character(monkeypatch):
  vocabulary = text_lib.byte_vocabulary()
  ids = [byte + text_lib.BYTE_OFFSET for byte in 'aé€𝄞'.encode()]

  class State:
    def __init__(self, length):
      self.length, self.done_B = length, [length == len(ids)]

  def read_rows(state, indices, vocabulary):
    del indices
    part = tuple(ids[: state.length])
    empty = ('plain',) * state.length
    text = vocabulary.decode(part)
    yield generation.Generation(0, text, part, (), 'length', empty, (), 1, (), ())

  monkeypatch.setattr(generation, 'read_rows', read_rows)
  states = (State(length) for length in range(1, len(ids) + 1))
  chunks = list(generation.read_stream(states, 0, vocabulary))
  assert [chunk.text for chunk in chunks if chunk.text] == ['a', 'é', '€', '𝄞']


def test_paddings_may_differ(tmp_path, plain):
  folder = tiny_pair.write_tiny_pair(tmp_path, draft_logits=400)
  padded = load_pair(folder)
  results = padded.generate(TEXTS, sampling=SHORT)
  assert [each.ids for each in results] == [each.ids for each in plain]


def test_padding_ids_are_never_emitted(folder):
  pair = load_pair(folder)

  def favoured(model):
    def extend(params, cache, tokens_BT, start_B):
      output, cache = model.extend(params, cache, tokens_BT, start_B)
      logits_BTV = output.logits_BTV.at[..., tiny_pair.VOCAB_SIZE :].add(50.0)
      return Output(logits_BTV), cache

    return model._replace(extend=extend)

  biased = dataclasses.replace(
    pair, target=favoured(pair.target), draft=favoured(pair.draft)
  )
  options = {'sampling': WARM, 'batch_size': 4}
  results = biased.generate(TEXTS, **options)
  assert max(token for result in results for token in result.ids) < tiny_pair.VOCAB_SIZE
  assert results == pair.generate(TEXTS, **options), 'padding took probability'


def test_resizing_cuts_and_fills():
  model, params_CV = table_model(16), jnp.arange(17.0 * 16).reshape(17, 16)
  tokens_BT, start_B = jnp.ones((1, 2), jnp.int32), jnp.zeros(1, jnp.int32)

  def logits(width):
    resized = resize_vocab(model, width)
    cache = resized.init(params_CV, tokens_BT, num_slots=4)
    output, _ = resized.extend(params_CV, cache, tokens_BT, start_B)
    return np.asarray(output.logits_BTV)

  whole = logits(16)
  np.testing.assert_array_equal(logits(13), whole[..., :13])
  np.testing.assert_array_equal(logits(20)[..., :16], whole)
  assert (logits(20)[..., 16:] == -np.inf).all()
  assert resize_vocab(model, 13) is resize_vocab(model, 13)


def test_vocabularies_must_agree(tmp_path, folder):
  other = tiny_pair.write_tiny_pair(tmp_path / 'other', extra_ids=90)
  message = refusal(load_pair, folder, draft=other)
  assert '349 ids' in message
  assert "target's 359" in message
  assert '--method ngram' in message
  narrow = tiny_pair.write_tiny_pair(tmp_path / 'narrow', draft=tiny_pair.blank_t5(300))
  for draft in (narrow, narrow / 'draft.safetensors'):
    message = refusal(load_pair, folder, draft=draft)
    assert '300 logits' in message
    assert '359 ids' in message
  wide = tiny_pair.write_tiny_pair(tmp_path / 'wide', draft=tiny_pair.blank_t5(2000))
  assert '2000 logits' in refusal(load_pair, wide)
  small = tiny_pair.write_tiny_pair(tmp_path / 'small', target=tiny_pair.blank_t5(300))
  message = refusal(load_pair, small)
  assert '300 logits' in message
  assert '359 ids' in message


def test_damaged_and_missing_files(tmp_path):
  assert "'nowhere' is neither 'embedded' nor a folder" in refusal(load_pair, 'nowhere')
  folder = tiny_pair.write_tiny_pair(tmp_path / 'pair')
  path = folder / 'target.safetensors'
  data = bytearray(path.read_bytes())
  path.write_bytes(data[:-100])
  assert 'target.safetensors is damaged or cut' in refusal(load_pair, folder)
  data[-50] ^= 1
  path.write_bytes(data)
  assert 'not those that were saved' in refusal(load_pair, folder)
  path.unlink()
  assert 'target.safetensors' in refusal(load_pair, folder)
  (folder / 'pair.json').write_text('{')
  assert 'pair.json is not valid JSON' in refusal(load_pair, folder)


def test_a_pair_without_a_draft(tmp_path, plain):
  folder = tiny_pair.write_tiny_pair(tmp_path)
  (folder / 'draft.safetensors').unlink()
  pair = load_pair(folder)
  results = pair.generate(TEXTS, sampling=SHORT, method='ngram')
  assert [each.ids for each in results] == [each.ids for each in plain]
  message = refusal(pair.generate, TEXTS)
  assert "method: 'draft_model'" in message
  assert '--draft_model' in message
  assert '--table_text' in refusal(pair.generate, TEXTS, method='table')
  with_draft = load_pair(folder, draft=tiny_pair.write_tiny_pair(tmp_path / 'other'))
  assert with_draft.draft is not None


@pytest.mark.parametrize(
  ('texts', 'options', 'message'),
  [
    ([], {}, 'texts: none'),
    ('a string', {}, 'give a list of texts'),
    (['a', '  '], {}, 'source 2 is empty; give it some text'),
    ([[]], {}, 'source 1 is empty'),
    (['a' * 40], {}, 'source 1 has 41 tokens, the limit is 40; '),
    ([[5, 359]], {}, 'source 1 has the id 359, which is outside the vocabulary'),
    ([[5, 0]], {}, 'source 1 has the id 0'),
    ([3, 4], {}, 'source 1 is 3; give a string or a sequence of token ids'),
    (['a', [1.5]], {}, 'source 2 is [1.5]; give a string or'),
    ([[5, -1]], {}, 'source 1 has the id -1'),
    (['a'], {'num_draft': 0}, 'num_speculative_tokens: 0'),
    (['a'], {'num_draft': 128}, 'num_speculative_tokens: 128 is more than'),
    (['a'], {'method': 'ngrams'}, 'did you mean ngram?'),
    (['a'], {'rejection_sample_method': 'x'}, "rejection_sample_method: 'x'"),
    (['a'], {'batch_size': 0}, 'batch_size: 0'),
    (['a'], {'num_draft_cap': -1}, 'num_draft_cap: -1'),
    (['a'], {'num_draft_cap': [1, 2]}, 'num_draft_cap: 2 for 1 texts'),
    (['a'], {'sampling': [SHORT, SHORT]}, 'sampling: 2 for 1 texts'),
    (['a'], {'sampling': SamplingConfig(banned_ids=(359,))}, 'banned_ids: 359'),
    (['a'], {'sampling': SamplingConfig(banned_ids=(-1,))}, 'banned_ids: -1'),
  ],
)
def test_bad_arguments(pair, texts, options, message):
  # Before the first batch is asked for: nothing has been compiled.
  assert message in refusal(pair.generate_batches, texts, **options)


def test_long_sources_can_be_cut(pair):
  (ids,) = pair.encode(['a' * 99], truncate=True)
  assert (len(ids), ids[-1]) == (40, pair.eos_id)
  (result,) = pair.generate(['a' * 99], sampling=SHORT, truncate=True)
  assert result == pair.generate([[ord('a') + 3] * 39], sampling=SHORT)[0]


def test_banned_ids_are_not_emitted(pair, plain):
  banned = plain[0].ids[0]
  sampling = SamplingConfig(max_new_tokens=16, banned_ids=(banned,))
  results = pair.generate(TEXTS, sampling=sampling, method='ngram')
  assert all(banned not in result.ids for result in results)


def test_progress_is_told(pair):
  calls = []
  pair.generate(
    TEXTS,
    sampling=SHORT,
    batch_size=2,
    on_progress=lambda done, count: calls.append((done, count)),
  )
  assert calls == [(2, 4), (4, 4)]


def test_bfloat16_tells_rounding_from_faults(folder, plain):
  pair = load_pair(folder, dtype='bfloat16')
  assert pair.target_config.dtype == 'bfloat16'
  sources = pair.encode(TEXTS[:1])
  logits_V = compare._logits(pair, sources[0], ())
  first, second, *_, last = np.argsort(-logits_V[: tiny_pair.VOCAB_SIZE]).tolist()

  def difference(token):
    ours, theirs = (dataclasses.replace(plain[0], ids=(i,)) for i in (token, first))
    (found,) = compare.differences(pair, sources, [ours], [theirs])
    return found

  far = difference(last)
  assert not far.is_rounding
  assert far.gap == pytest.approx(logits_V[first] - logits_V[last])
  # bfloat16 has 8 bits: one unit of a number in [2**n, 2**(n+1)) is 2**(n - 7).
  largest = max(abs(logits_V[first]), abs(logits_V[last]))
  assert far.bound == 4 * 2.0 ** (np.floor(np.log2(largest)) - 7)
  near = difference(second)
  assert dataclasses.replace(near, gap=near.bound).is_rounding
  assert not dataclasses.replace(near, gap=near.bound * 1.01).is_rounding


def test_a_planted_difference_is_found(pair, plain):
  sources = pair.encode(TEXTS)
  ids = plain[2].ids
  wrong = (*ids[:5], (ids[5] + 1) % 256 + 3, *ids[6:])
  short = plain[1].ids[:-1]
  planted = list(plain)
  planted[2] = dataclasses.replace(plain[2], ids=wrong)
  planted[1] = dataclasses.replace(plain[1], ids=short)
  cut, changed = compare.differences(pair, sources, planted, plain)
  assert (cut.index, cut.position, cut.token) == (1, len(short), None)
  assert (changed.index, changed.position) == (2, 5)
  assert (changed.token, changed.plain_token) == (wrong[5], ids[5])
  logits_V = compare._logits(pair, sources[2], ids[:5])
  assert np.argmax(logits_V) == ids[5], 'not the logits that decoding saw'
  assert changed.gap == logits_V[ids[5]] - logits_V[wrong[5]] > 0
  for difference in (cut, changed):
    assert not difference.is_rounding
    assert 'a fault' in difference.describe(pair)
  assert 'text 3 differs at token 6' in changed.describe(pair)


def test_the_public_names():
  assert len(specjax.__all__) <= 30
  for name in specjax.__all__:
    assert getattr(specjax, name) is not None
  assert set(specjax.__all__) <= set(dir(specjax))
  with pytest.raises(AttributeError, match='no attribute'):
    specjax.nothing  # noqa: B018


@pytest.mark.slow
def test_shared_noise_gives_plain_decodings_samples():
  """At temperature 1, and drafts are accepted; noise of their own gives other texts."""
  embedded = load_pair()
  texts = ['fix: Selecct the formatting style.', 'ende: Click the icon to open it.']
  sampling = SamplingConfig(temperature=1.0, max_new_tokens=16, seed=3)

  def ids(**options):
    results = embedded.generate(texts, sampling=sampling, num_draft=3, **options)
    return [each.ids for each in results], sum(each.num_accepted for each in results)

  plain, _ = ids(method='none')
  for method in ('draft_model', 'ngram'):
    coupled, num_accepted = ids(method=method, coupling='gumbel')
    assert coupled == plain
    assert num_accepted > 0
  assert ids(method='draft_model')[0] != plain


@pytest.mark.parametrize(('budget', 'gamma'), [(1, 0), (3, 2), (16, 4)])
def test_a_gamma_not_given_is_what_the_budget_can_use(pair, budget, gamma):
  sampling = SamplingConfig(max_new_tokens=budget, min_new_tokens=budget)
  (result,) = pair.generate(['a b c'], sampling=sampling)
  assert len(result.drafted_per_position) == gamma
  *_, last = pair.stream('a b c', sampling=sampling)
  assert last.generation.ids == result.ids
  with pytest.raises(ValueError, match=f'{budget} is more than max_new_tokens'):
    pair.generate(['a b c'], sampling=sampling, num_draft=budget)


def test_an_unknown_keyword_is_refused_in_the_callers_name(pair):
  with pytest.raises(TypeError, match=r"^generate\(\) .* 'num_drafts'; did you mean"):
    pair.generate(['a'], num_drafts=3)


def test_a_gamma_is_not_chosen_on_a_mesh(pair):
  mesh = jax.make_mesh((1, 1), ('data', 'model'))
  on_mesh = dataclasses.replace(pair, mesh=mesh)
  message = refusal(on_mesh.generate, ['a'], num_draft='auto')
  assert "num_speculative_tokens: 'auto' runs on one device" in message
