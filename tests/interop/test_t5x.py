"""The twin of T5X's model, beside a stand-in for one (no T5X needed).

What T5X itself computes is compared in `test_t5x_parity.py`.
"""

import copy
import functools
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints import store
from specjax.interop import t5x
from specjax.testing.tiny_t5 import VOCAB_SIZE, tiny_t5

NUM_TOKENS = 8
EOS = 8  # what the second row says early
INPUTS_BE = np.array([[4, 5, 6, 7, 1], [8, 9, 1, 0, 0], [3, 1, 0, 0, 0]], np.int32)
# Shifted right; the second has an end token, which is no prompt.
GIVEN_BT = np.array(
  [[0, 5, 9, 0, 0, 0, 0, 0], [0, 7, EOS, 0, 0, 0, 0, 0], [0, 0, 6, 0, 0, 0, 0, 0]],
  np.int32,
)
BATCH = {'encoder_input_tokens': INPUTS_BE, 'decoder_input_tokens': GIVEN_BT}


def stand_in(config, **attributes):
  return types.SimpleNamespace(
    module=types.SimpleNamespace(config=config),
    output_vocabulary=types.SimpleNamespace(vocab_size=VOCAB_SIZE, eos_id=EOS),
    **attributes,
  )


@functools.cache
def networks():
  return tiny_t5(seed=2, num_layers=1), tiny_t5(seed=1, num_layers=1)


@functools.cache
def twin():
  target, draft = networks()
  checkpoint = store.Checkpoint(draft.config, draft.params, {})
  return t5x.SpeculativeModel(
    stand_in(target.config, score_batch='its own'), checkpoint, num_draft=3
  )


def predict(**options):
  return twin().predict_batch_with_aux(networks()[0].params, BATCH, **options)


@functools.cache
def oracle_extend():
  oracle = networks()[0].oracle

  @jax.jit
  def extend(params, inputs_BE, fed_BT):
    cache = oracle.init(params, inputs_BE, num_slots=NUM_TOKENS)
    return oracle.extend(params, cache, fed_BT, jnp.zeros(3, jnp.int32))[0]

  return extend


@functools.cache
def laws(decodes):
  """The oracle's log-softmax [B, T, V] of the tokens that follow `decodes`."""
  target, _ = networks()
  decodes_BT = np.array(decodes)
  fed_BT = np.pad(decodes_BT, ((0, 0), (1, 0)))[:, :-1]
  output = oracle_extend()(target.params, jnp.asarray(INPUTS_BE), jnp.asarray(fed_BT))
  return np.asarray(jax.nn.log_softmax(output.logits_BTV))


def oracle(decodes_BT):
  return laws(tuple(map(tuple, np.asarray(decodes_BT).tolist())))


def length(row):
  return int(np.argmax(row == EOS)) + 1 if (row == EOS).any() else len(row)


def test_signature_is_t5xs():
  assert list(inspect.signature(twin().predict_batch_with_aux).parameters) == [
    'params',
    'batch',
    'rng',
    'decoder_params',
    'return_all_decodes',
    'num_decodes',
    'prompt_with_targets',
  ]
  assert [*inspect.signature(twin().predict_batch).parameters] == [
    'params', 'batch', 'rng'
  ]  # fmt: skip


@pytest.mark.parametrize('prompted', [False, True])
def test_greedy_tokens_and_scores(prompted):
  # Four equal decodes share the next test's compilation.
  options = {'prompt_with_targets': True} if prompted else {'num_decodes': 4}
  decodes, aux = predict(**options)
  assert decodes.shape == (3, NUM_TOKENS)
  np.testing.assert_array_equal(aux['scores'], 0)
  logp_BTV = oracle(decodes)
  best_BT = logp_BTV[..., :VOCAB_SIZE].argmax(axis=-1)
  prompts = [(5, 9), (7,), ()] if prompted else [(), (), ()]
  expected = []
  for i, (row, text) in enumerate(zip(np.asarray(decodes), prompts, strict=True)):
    assert tuple(row[: len(text)]) == text
    end = length(row)
    assert (row[end:] == 0).all()
    np.testing.assert_array_equal(row[len(text) : end], best_BT[i, len(text) : end])
    expected.append(sum(logp_BTV[i, t, row[t]] for t in range(len(text), end)))
  assert length(np.asarray(decodes)[1]) < NUM_TOKENS
  if prompted:
    raw = {'rescale_log_probs': False}
    again, aux = predict(**options, decoder_params=raw)
    np.testing.assert_array_equal(again, decodes)
    np.testing.assert_allclose(aux['scores'], expected, atol=1e-4)
    assert raw == {'rescale_log_probs': False}


def test_samples_and_their_scores():
  options = {'temperature': 1.0, 'topk': 0}
  decodes, aux = predict(
    decoder_params=options, rng=jax.random.key(1), num_decodes=4,
    return_all_decodes=True,
  )  # fmt: skip
  assert decodes.shape == (3, 4, NUM_TOKENS)
  assert aux['scores'].shape == (3, 4)
  assert (np.diff(aux['scores'], axis=1) >= 0).all()
  assert len({tuple(row) for row in np.asarray(decodes).reshape(12, -1)}) > 8
  for decode in range(4):
    rows = np.asarray(decodes[:, decode])
    logp_BTV = oracle(rows)[..., :VOCAB_SIZE]
    logp_BTV = logp_BTV - np.log(np.exp(logp_BTV).sum(axis=-1, keepdims=True))
    expected = [
      sum(logp_BTV[i, t, row[t]] for t in range(length(row)))
      for i, row in enumerate(rows)
    ]
    np.testing.assert_allclose(aux['scores'][:, decode], expected, atol=1e-4)
  # The likeliest alone; and by the parameter instead of the argument.
  best, best_aux = predict(
    decoder_params={**options, 'decode_rng': jax.random.key(1)}, num_decodes=4
  )
  np.testing.assert_array_equal(best, decodes[:, -1])
  np.testing.assert_array_equal(best_aux['scores'], aux['scores'][:, -1])
  other, _ = predict(decoder_params=options, rng=jax.random.key(2), num_decodes=4)
  assert (np.asarray(other) != np.asarray(best)).any()


def test_max_decode_steps_count_from_the_prompt():
  whole, _ = predict(prompt_with_targets=True)
  expected = np.array(whole)
  for row, most in enumerate([3, 2, 1]):
    expected[row, most:] = 0
  assert (expected != np.asarray(whole)).any()
  for options in (
    {'max_decode_steps': 1},
    {'max_decode_steps': 8, 'max_decode_steps_hard_limit': 1},
  ):
    decodes, _ = predict(decoder_params=options, prompt_with_targets=True)
    np.testing.assert_array_equal(decodes, expected)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'decoder_params': {'top_k': 3}}, r"'top_k' is unknown; did you mean topk"),
    ({'decoder_params': {'alpha': 0.6}}, "decoder_params: 'alpha' is unknown"),
    ({'decoder_params': {'logit_callback_fn': len}}, 'logit_callback_fn is not supp'),
    ({'decoder_params': {'topp': 0.9}}, 'topk 1 beside topp 0.9; set one of them to 0'),
    ({'decoder_params': {'max_decode_steps': 9}}, 'max_decode_steps 9 is more than th'),
    (
      {'rng': jax.random.key(0), 'decoder_params': {'decode_rng': jax.random.key(0)}},
      'rng beside decoder_params',
    ),
  ],
)
def test_bad_parameters(options, message):
  with pytest.raises(ValueError, match=message):
    predict(**options)


def test_bad_models():
  target, draft = networks()
  flax_model = types.SimpleNamespace(hidden=3)
  with pytest.raises(ValueError, match=r'lacks vocab_size, emb_dim, .*that network'):
    t5x.SpeculativeModel(stand_in(flax_model))
  scanned = stand_in(target.config)
  scanned.module.scan_layers = True
  with pytest.raises(ValueError, match='it scans its layers'):
    t5x.SpeculativeModel(scanned)
  narrow = store.Checkpoint(
    tiny_t5(num_layers=1, vocab_size=12).config, draft.params, {}
  )
  with pytest.raises(ValueError, match='draft: it has 12 logits, the target 16'):
    t5x.SpeculativeModel(stand_in(target.config), narrow)
  with pytest.raises(ValueError, match="rejection_sample_method: 'tok' is unknown"):
    t5x.SpeculativeModel(stand_in(target.config), rejection_sample_method='tok')
  with pytest.raises(ValueError, match="'temprature' is unknown; did you mean temp"):
    t5x.SpeculativeModel(stand_in(target.config), decoder_params={'temprature': 1})


def test_the_rest_is_the_models():
  assert twin().score_batch == 'its own'
  assert twin().output_vocabulary.eos_id == EOS
  assert copy.copy(twin()).score_batch == 'its own'
  with pytest.raises(AttributeError):
    _ = twin().loss_fn


def test_row_keys_take_any_key():
  keys = {
    'threefry': jax.random.key(3, impl='threefry2x32'),
    'rbg': jax.random.key(3, impl='rbg'),
    'none': None,
  }
  rows = {}
  for name, key in keys.items():
    key_B = t5x.row_keys(key, 5)
    assert str(jax.random.key_impl(key_B)) == 'threefry2x32'
    rows[name] = np.asarray(jax.random.key_data(key_B))
    assert len(np.unique(rows[name], axis=0)) == 5
  assert (rows['threefry'] != rows['rbg']).any()
