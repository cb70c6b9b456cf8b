"""A pair from any two checkpoints: formats mixed, vocabularies found, paddings."""

import dataclasses
import itertools
import json
import re
import shutil

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import run
from specjax.checkpoints import convert, files, formats, hf, leaves
from specjax.command import session
from specjax.config import SamplingConfig
from specjax.core.types import Output
from specjax.core.warp import make_sampling
from specjax.data import vocabulary
from specjax.load import ASSETS, load_pair, resize_vocab
from specjax.models.t5 import Transformer, t5_model
from specjax.testing import chi_square, tiny_pair

SHORT = SamplingConfig(max_new_tokens=8)
BYTE_TOKENIZER = {'tokenizer_class': 'ByT5Tokenizer', 'extra_ids': 100}


def refusal(*arguments, **options):
  with pytest.raises(ValueError, match=r'.') as caught:
    load_pair(*arguments, **options)
  assert '\n' not in str(caught.value)
  return str(caught.value)


def random_t5(seed, num_logits, **overrides):
  """Random, without compiling anything; its laws are neither flat nor sure."""
  blank = tiny_pair.blank_t5(num_logits)
  config = dataclasses.replace(blank.config, **overrides)
  random = np.random.default_rng(seed)
  flat = {
    name: random.normal(1.0 if 'scale' in name else 0.0, 0.4, shape).astype(np.float32)
    for name, shape in leaves.expected_shapes(config).items()
  }
  params = flax.traverse_util.unflatten_dict(flat, sep='/')
  return blank._replace(config=config, params=params)


@pytest.fixture(scope='module')
def pair_folder(tmp_path_factory):
  return tiny_pair.write_tiny_pair(
    tmp_path_factory.mktemp('pair'), target=random_t5(0, 384), draft=random_t5(1, 384)
  )


@pytest.fixture(scope='module')
def hf_folders(pair_folder, tmp_path_factory):
  """The pair's target and draft as Hugging Face folders of a ByT5."""
  place = tmp_path_factory.mktemp('hugging face')
  for name in ('target', 'draft'):
    convert.convert(pair_folder / f'{name}.safetensors', place / name, to='hf')
    (place / name / 'tokenizer_config.json').write_text(json.dumps(BYTE_TOKENIZER))
  return place


def test_formats_mix(pair_folder, hf_folders, tmp_path):
  """A target of one format, a draft of another: the same functions and parameters."""
  shutil.copy(pair_folder / 'draft.safetensors', tmp_path / 'mine.safetensors')
  expected = load_pair(pair_folder)
  for target, draft in (
    (hf_folders / 'target', hf_folders / 'draft'),
    (hf_folders / 'target' / hf.SINGLE, tmp_path / 'mine.safetensors'),
    (hf_folders / 'target', pair_folder),
    (pair_folder, hf_folders / 'draft'),
  ):
    pair = load_pair(target, draft=draft)
    assert pair.target is expected.target
    assert pair.draft is expected.draft
    assert pair.vocabulary.size == expected.vocabulary.size == 359
    assert jax.tree.structure(pair.params) == jax.tree.structure(expected.params)
    jax.tree.map(np.testing.assert_array_equal, pair.params, expected.params)
  half = load_pair(hf_folders / 'target', dtype='bfloat16')
  assert {leaf.dtype for leaf in jax.tree.leaves(half.params)} == {
    jnp.dtype('bfloat16')
  }
  assert (half.target_config.dtype, half.draft) == ('bfloat16', None)


def test_one_command(pair_folder, hf_folders, tmp_path, capsys):
  plain = tmp_path / 'plain'
  shutil.copytree(hf_folders / 'target', plain)
  (plain / 'tokenizer_config.json').unlink()
  arguments = ['--model', str(plain), '--draft_model', str(hf_folders / 'draft')]
  arguments += [
    '--prompt',
    'ab',
    '--max_new_tokens',
    '8',
    '--gamma',
    '2',
    '--no-compare',
  ]
  assert run.main(arguments) == 2
  assert '--vocabulary' in capsys.readouterr().err
  # The draft comes with the bytes and other sentinels than are asked for.
  assert run.main([*arguments, '--vocabulary', 'bytes']) == 2
  assert "359 ids, the target's 384" in capsys.readouterr().err
  shutil.rmtree(tmp_path / 'plain')
  shutil.copytree(hf_folders / 'target', plain)
  assert run.main([*arguments, '--vocabulary', 'bytes']) == 0
  shown = capsys.readouterr().out
  (result,) = load_pair(pair_folder).generate(
    ['ab'], sampling=SHORT, num_draft=2, batch_size=8
  )
  assert shown == session._one_line(result.text) + '\n'
  assert result.num_drafted > 0


def test_vocabularies_are_found(tmp_path):
  model = ASSETS / 'vocab.model'
  for name in vocabulary.NAMES:
    folder = tmp_path / name
    folder.mkdir()
    shutil.copy(model, folder / name)
    assert vocabulary.find(str(folder)).size == 4096 + 100
    (folder / 'tokenizer_config.json').write_text('{"extra_ids": 28}')
    assert vocabulary.find(str(folder)).size == 4096 + 28
  # T5X: beside all steps, or in one.
  step = tmp_path / 'spiece.model' / 'checkpoint_1000'
  step.mkdir()
  assert vocabulary.find(str(step)).size == 4096 + 28
  bare = tmp_path / 'bare'
  bare.mkdir()
  assert vocabulary.find(str(bare)) is None
  assert vocabulary.find(str(bare), model).size == 4196
  assert vocabulary.find(str(bare), 'bytes').size == 384
  # ByT5's files, of either kind.
  for name in ('config.json', 'tokenizer_config.json'):
    (bare / name).write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    assert vocabulary.find(str(bare)).size == 384
    (bare / name).unlink()
  (bare / 'tokenizer_config.json').write_text('{')
  with pytest.raises(ValueError, match=r'tokenizer_config\.json is not valid JSON'):
    vocabulary.find(str(bare))


def test_sentinels_within_the_model_are_not_added_again(tmp_path, monkeypatch):
  """mT5's SentencePiece model has its 100 sentinels inside."""
  shutil.copy(ASSETS / 'vocab.model', tmp_path)
  original = vocabulary.text.sentencepiece_vocabulary

  def with_sentinels(path, extra_ids):
    words = original(path, extra_ids)
    return words._replace(
      piece=lambda token: '▁<extra_id_0>' if token == 4095 else words.piece(token)
    )

  monkeypatch.setattr(vocabulary.text, 'sentencepiece_vocabulary', with_sentinels)
  assert vocabulary.find(str(tmp_path)).size == 4096


def blank(folder, num_logits, tokenizer=BYTE_TOKENIZER):
  config = tiny_pair.blank_t5(num_logits).config
  hf.write(
    folder,
    leaves.Weights(
      config,
      {
        name: leaves.array_leaf(np.zeros(shape, np.float32))
        for name, shape in leaves.expected_shapes(config).items()
      },
      {},
    ),
  )
  if tokenizer:
    (folder / 'tokenizer_config.json').write_text(json.dumps(tokenizer))
  return folder


def test_paddings_may_differ_and_vocabularies_may_not(tmp_path, hf_folders):
  target = hf_folders / 'target'
  for num_logits in (359, 400):
    pair = load_pair(target, draft=blank(tmp_path / f'{num_logits}', num_logits))
    assert pair.draft_config.vocab_size == num_logits
    assert pair.vocabulary.size == 359
  narrow = refusal(target, draft=blank(tmp_path / 'narrow', 300, None))
  assert '300 logits' in narrow
  assert '359 ids' in narrow
  wide = refusal(target, draft=blank(tmp_path / 'wide', 32128, None))
  assert '32128 logits' in wide
  assert '359 ids' in wide
  other = {**BYTE_TOKENIZER, 'extra_ids': 90}
  message = refusal(target, draft=blank(tmp_path / 'other', 384, other))
  assert '349 ids' in message
  assert "target's 359" in message
  words = refusal(target, vocabulary=ASSETS / 'vocab.model')
  assert re.search(
    r'^vocabulary: .*vocab.model has 4196 ids, but .* has 384 logits', words
  )
  assert 'leave the option out if that lies beside it' in words
  large = blank(tmp_path / 'large', 32128)
  assert "32128 logits, the target's vocabulary 359 ids; name its" in refusal(large)


def test_what_is_not_there(tmp_path, hf_folders):
  assert "'nowhere' is neither 'embedded' nor" in refusal('nowhere')
  (tmp_path / 'empty').mkdir()
  message = refusal(tmp_path / 'empty')
  for looked_for in ('target.safetensors', 'config.json', 'checkpoint_N', 'Orbax'):
    assert looked_for in message
  message = refusal(hf_folders / 'target', draft=tmp_path / 'absent')
  assert message.startswith('draft_model: ')
  assert "absent' is neither 'embedded' nor" in message
  bare = blank(tmp_path / 'bare', 384, None)
  message = refusal(bare)
  assert 'spiece.model' in message
  assert '--vocabulary' in message
  assert 'no file' in refusal(bare, vocabulary=tmp_path / 'absent.model')


def test_t5s_own_ids(tmp_path):
  """32000 pieces and 100 sentinels are 32100 ids; 28 logits mean nothing."""
  words = vocabulary.text.sentencepiece_vocabulary(ASSETS / 'vocab.model', 100)
  assert words.piece(words.size - 1) == '<extra_id_0>'
  assert words.piece(words.size) == '⁇'
  everything = [*range(2, words.size + 28)]
  assert '<extra_id_99>' in words.decode(everything)


@pytest.fixture(scope='module')
def unequal(tmp_path_factory):
  """12 real ids: a target of 16 logits, a draft of 20, as Hugging Face folders."""
  place = tmp_path_factory.mktemp('unequal')
  opened = []
  for name, seed, width in (('target', 0, 16), ('draft', 1, 20)):
    random = random_t5(seed, width)
    weights = {
      key: leaves.array_leaf(value)
      for key, value in flax.traverse_util.flatten_dict(random.params, sep='/').items()
    }
    hf.write(place / name, leaves.Weights(random.config, weights, {}))
    weights = formats.open_weights(place / name)
    assert weights.config == random.config
    opened.append((weights.config, leaves.restore(weights)))
  return opened


def test_law_with_unequal_and_favoured_paddings(unequal):
  """Padding with +50 in both models: never emitted, and p is renormalised."""
  (config, params), (draft_config, draft_params) = unequal
  real, num_rows = 12, 6000

  def favoured(model):
    def extend(params, cache, tokens_BT, start_B):
      output, cache = model.extend(params, cache, tokens_BT, start_B)
      return Output(output.logits_BTV.at[..., real:].add(50.0)), cache

    return model._replace(extend=extend)

  warp = specjax.make_warp(real, 1)
  draft = resize_vocab(favoured(t5_model(draft_config)), config.vocab_size)
  source_1E = jnp.array([[3, 4, 5, 1]], jnp.int32)
  state = specjax.decode(
    specjax.Params(params, draft_params),
    jnp.repeat(source_1E, num_rows, axis=0),
    specjax.row_keys(0, jnp.arange(num_rows)),
    make_sampling(num_rows, temperature=1.0, max_new_tokens=3),
    target=favoured(t5_model(config)),
    drafter=specjax.model_draft(draft, warp, 2),
    verifier=specjax.token_verifier,
    warp=warp,
    max_len=4,
    eos_id=1,
  )
  tokens_B3 = np.asarray(state.tokens_BS[:, 1:4])
  assert tokens_B3.max() < real

  prefixes = np.array([*itertools.product([0], range(real), range(real))], np.int32)
  logits = jax.jit(Transformer(config).apply)(
    {'params': params}, jnp.repeat(source_1E, len(prefixes), axis=0), prefixes
  )
  p = np.asarray(jax.nn.softmax(logits[..., :real], axis=-1), np.float64)
  law = {}
  for (_, a, b), p_3 in zip(prefixes, p, strict=True):
    for c in range(real):
      key = (a, 0, 0) if a == 1 else (a, b, 0) if b == 1 else (a, b, c)
      law[key] = law.get(key, 0.0) + p_3[0, a] * p_3[1, b] * p_3[2, c]
  counts = dict.fromkeys(law, 0)
  for row in tokens_B3.tolist():
    counts[tuple(row)] += 1
  total = sum(law.values())
  result = chi_square.assert_law(
    [counts[key] for key in law], [value / total for value in law.values()]
  )
  assert result.df > 100


def test_buckets(tmp_path, hf_folders, monkeypatch):
  """The same by `gs://`: no path of a disk is made of an address."""

  def kvstore(path):
    bucket, _, rest = path.removeprefix('gs://').partition('/')
    assert bucket == 'bucket', path
    return {'driver': 'file', 'path': f'{hf_folders / rest}/'}

  shutil.copy(ASSETS / 'vocab.model', hf_folders)
  monkeypatch.setattr(files, 'kvstore', kvstore)
  pair = load_pair('gs://bucket/target/', draft='gs://bucket/draft')
  assert pair.vocabulary.size == 359
  expected = formats.open_weights('gs://bucket/target')
  found = flax.traverse_util.flatten_dict(pair.params.target, sep='/')
  assert {*found} == {*expected.leaves}
  words = vocabulary.find('gs://bucket/target', 'gs://bucket/vocab.model')
  assert words.size == 4096 + 100
  assert words.decode(words.encode('Click the icon.')) == 'Click the icon.'
  with pytest.raises(ValueError, match=r'nothing is at gs://bucket/absent'):
    load_pair('gs://bucket/absent')
