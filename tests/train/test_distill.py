"""Distillation: answers are the target's own, and the loss is the definition."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints import store
from specjax.core import autoregressive, rng, types
from specjax.core import warp as warps
from specjax.data import text
from specjax.models import t5
from specjax.train import answers as answering
from specjax.train import train

MODEL = t5.T5Config(
  vocab_size=32,
  emb_dim=16,
  num_heads=2,
  head_dim=8,
  mlp_dim=32,
  num_encoder_layers=1,
  num_decoder_layers=1,
)
VOCABULARY = text.Vocabulary(30, lambda line: [1], lambda ids: '', str)
SOURCES = [[5, 6, 1], [7, 8, 9, 10, 1], [9] * 20 + [1], [11, 1]]


@pytest.fixture(scope='module')
def checkpoint():
  return store.Checkpoint(MODEL, train.init_params(MODEL, 0), {})


@pytest.fixture(scope='module')
def answers(checkpoint):
  found = answering.answer(
    checkpoint,
    VOCABULARY,
    SOURCES,
    temperature=1.0,
    seed=3,
    num_top=4,
    max_new_tokens=9,
    batch_size=2,
  )
  return [each for _, each in sorted(found, key=lambda pair: pair[0])]


def test_answers_are_what_plain_decoding_gives(checkpoint, answers):
  state = autoregressive.decode(
    types.Params(checkpoint.params),
    jnp.asarray(text.pad(SOURCES, 32)),
    rng.row_keys(3, np.arange(4)),
    warps.make_sampling(4, temperature=1.0),
    target=t5.t5_model(MODEL),
    warp=warps.make_warp(30, 1, (0,)),
    max_len=10,
    eos_id=1,
  )
  for row, (source, each) in enumerate(zip(SOURCES, answers, strict=True)):
    np.testing.assert_array_equal(each.source, source)
    length = int(state.length_B[row])
    np.testing.assert_array_equal(each.target, state.tokens_BS[row, 1:length])
    assert each.target.max() < VOCABULARY.size


def test_kept_laws_are_the_targets(checkpoint, answers):
  targets_BT = text.pad([each.target for each in answers], 9)
  logits = jax.jit(train.teacher_forcing(MODEL))
  logits_BTV = logits(checkpoint.params, text.pad(SOURCES, 32), targets_BT)
  logp_BTV = np.asarray(jax.nn.log_softmax(logits_BTV))
  for row, each in enumerate(answers):
    logp_TV = logp_BTV[row, : len(each.target)]
    order_TK = np.argsort(-logp_TV, axis=-1)[:, :4]
    np.testing.assert_array_equal(each.top_ids_TK, order_TK)
    np.testing.assert_allclose(
      each.top_logp_TK, np.take_along_axis(logp_TV, order_TK, -1), atol=2e-3
    )


def test_answers_survive_the_file(tmp_path, answers):
  answering.save_answers(tmp_path / 'answers.npz', answers)
  loaded = answering.load_answers(tmp_path / 'answers.npz')
  assert len(loaded) == len(answers)
  for one, other in zip(loaded, answers, strict=True):
    for field, expected in zip(one, other, strict=True):
      np.testing.assert_array_equal(field, expected)
      assert field.dtype == expected.dtype


def test_batches_repeat_the_answers_in_new_orders(answers):
  stream = answering.endless_batches(answers, ((8, 10), (32, 10)), 36, seed=0)
  first = list(itertools.islice(stream, 3))
  sources = [tuple(row[row > 0]) for batch in first for row in batch.sources_BE]
  assert sorted(filter(None, sources)) == sorted(tuple(source) for source in SOURCES)
  later = answering.endless_batches(answers, ((8, 10), (32, 10)), 36, seed=0, start=2)
  for one, other in zip(first[2], next(later), strict=True):
    np.testing.assert_array_equal(one, other)


def test_loss_is_the_cross_entropy_to_law_and_likeliest_id(answers):
  params = train.init_params(MODEL, 1)
  (batch,) = answering.answer_batches(answers[:1], ((8, 10),), 36, '0')
  each = answers[0]
  logits = jax.jit(train.teacher_forcing(MODEL))
  logits_BTV = logits(params, batch.sources_BE, batch.targets_BT)
  logq_TV = np.asarray(jax.nn.log_softmax(logits_BTV))[0, : len(each.target)]
  logq_TK = np.take_along_axis(logq_TV, each.top_ids_TK.astype(int), -1)
  p_TK = np.exp(each.top_logp_TK.astype(np.float32))
  p_TK /= p_TK.sum(-1, keepdims=True)
  soft, hard = -(p_TK * logq_TK).sum(-1).mean(), -logq_TK[:, 0].mean()
  for weight in (0.25, 1.0):
    loss = jax.jit(answering.distillation(MODEL, weight))(params, batch)
    np.testing.assert_allclose(loss, (1 - weight) * soft + weight * hard, rtol=1e-4)


def test_agreement_of_a_model_with_itself_is_one(checkpoint, answers):
  evaluate = answering.make_agreement(MODEL, {'ende': answers})
  assert evaluate(checkpoint.params).startswith('ende: alpha 1.000 (T=0), 0.')
  other = evaluate(train.init_params(MODEL, 1))
  assert float(other.split()[2]) < 0.9
