"""A target with int8 weights is a model of its own, half as large."""

import re
import sys

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.checkpoints.leaves import expected_shapes
from specjax.command import results
from specjax.config import PairConfig, RunConfig
from specjax.core import autoregressive, loop, rng, types, verify, warp
from specjax.drafters import model_draft
from specjax.load import load_pair
from specjax.models import quantized
from specjax.models.t5 import T5Config
from specjax.parallel.mesh import make_mesh
from specjax.testing import tiny_pair
from specjax.testing.tiny_t5 import VOCAB_SIZE, tiny_t5
from specjax.testing.width import logits_by_width

needs_qwix = "int8 weights need the library qwix: pip install 'specjax[int8]'"
qwix = pytest.importorskip('qwix', reason=needs_qwix)

MAX_LEN = 25
WARP = warp.make_warp(VOCAB_SIZE)


@pytest.fixture(scope='module')
def tiny():
  return tiny_t5(num_layers=1, emb_dim=32, mlp_dim=96)


@pytest.fixture(scope='module')
def params(tiny):
  return quantized.quantize_int8(tiny.params)


@pytest.fixture(scope='module')
def model(tiny):
  return quantized.int8_model(tiny.model)


def sources(num_rows):
  tokens_BE = np.random.default_rng(0).integers(2, VOCAB_SIZE, (num_rows, 7))
  return jnp.asarray(tokens_BE, jnp.int32)


def num_bytes(tree):
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_xxl_takes_half_the_memory():
  shapes = expected_shapes(T5Config.from_size('t5_1_1_xxl'))
  full = flax.traverse_util.unflatten_dict(
    {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()},
    sep='/',
  )
  small = jax.eval_shape(quantized.quantize_int8, full)
  assert 22.2e9 < num_bytes(full) < 22.4e9
  # Half of everything, and the other half of the embedding and the scales.
  assert 0.5 < num_bytes(small) / num_bytes(full) < 0.51


def test_only_kernels_are_quantised_and_by_half_a_step_at_most(tiny, params):
  full = flax.traverse_util.flatten_dict(tiny.params, sep='/')
  small = flax.traverse_util.flatten_dict(params, sep='/')
  assert set(full) == set(small)
  for name, leaf in full.items():
    if not name.endswith('/kernel'):
      np.testing.assert_array_equal(small[name], leaf)
      continue
    assert small[name].qvalue.dtype == jnp.int8
    assert small[name].scale.shape == (1, leaf.shape[1])
    error = np.abs(qwix.dequantize(small[name]) - leaf)
    assert (error <= np.asarray(small[name].scale) * 0.5001).all(), name


def test_the_law_is_near_the_full_one_and_exactly_that_of_its_numbers(
  tiny, model, params
):
  floats = jax.tree.map(
    lambda x: qwix.dequantize(x) if isinstance(x, qwix.QArray) else x,
    params,
    is_leaf=lambda x: isinstance(x, qwix.QArray),
  )
  tokens_BS = jnp.pad(sources(4), ((0, 0), (1, 0)))
  logits, same, full = (
    np.asarray(logits_by_width(m, p, sources(4), tokens_BS, width=4))
    for m, p in ((model, params), (tiny.model, floats), (tiny.model, tiny.params))
  )
  np.testing.assert_allclose(logits, same, atol=1e-4)
  # int8 rounding moves the logits by 2% of their spread at most.
  assert 1e-4 < np.std(logits - full) / np.std(full) < 0.02


def decode(model, params, drafter, draft_params=None):
  return loop.decode(
    types.Params(params, draft_params),
    sources(8),
    rng.row_keys(0, jnp.arange(8)),
    warp.make_sampling(8),
    target=model,
    drafter=drafter,
    verifier=verify.token_verifier,
    warp=WARP,
    max_len=MAX_LEN,
    eos_id=-1,
  )


@pytest.mark.slow
def test_speculation_preserves_the_greedy_output_of_the_int8_target(
  tiny, model, params
):
  drafter = model_draft(tiny.model, WARP, 3)
  plain = decode(model, params, autoregressive.no_draft)
  ours = decode(model, params, drafter, tiny.params)
  np.testing.assert_array_equal(
    ours.tokens_BS[:, :MAX_LEN], plain.tokens_BS[:, :MAX_LEN]
  )
  # The full target drafts well for the int8 one, so rounds did accept.
  assert int(ours.step) < int(plain.step) / 2
  assert quantized.int8_model(tiny.model) is model


def test_kernels_stay_int8_in_the_loop(model, params, optimised):
  lowered = loop.decode.lower(
    types.Params(params),
    sources(1),
    rng.row_keys(0, jnp.arange(1)),
    warp.make_sampling(1),
    target=model,
    drafter=autoregressive.no_draft,
    verifier=verify.token_verifier,
    warp=WARP,
    max_len=MAX_LEN,
    eos_id=-1,
  )
  carries = re.findall(r' = \((.*)\) while\(', lowered.compile().as_text())
  assert any('s8[32,96]' in carry for carry in carries)
  assert not any('f32[32,96]' in carry for carry in carries)


def test_a_pair_with_an_int8_target(tmp_path):
  blank = tiny_pair.blank_t5(tiny_pair.NUM_LOGITS)
  folder = tiny_pair.write_tiny_pair(tmp_path, target=blank, draft=blank)
  pair = load_pair(folder, target_weights='int8')
  full = load_pair(folder)
  assert pair.target is quantized.int8_model(full.target)
  assert pair.draft is full.draft
  assert num_bytes(pair.params.target) < num_bytes(full.params.target)
  assert num_bytes(pair.params.draft) == num_bytes(full.params.draft)


@pytest.mark.parametrize(('weights', 'law'), [('full', 'the'), ('int8', 'the int8')])
def test_a_record_says_whose_law_it_is(weights, law):
  record = results.run_record(RunConfig(pair=PairConfig(target_weights=weights)))
  assert record['law'] == f"{law} target's"
  assert record['config']['pair']['target_weights'] == weights


def test_refusals(tiny, params, tmp_path, monkeypatch):
  with pytest.raises(ValueError, match=r"target_weights: 'int4' is unknown"):
    PairConfig(target_weights='int4')
  with pytest.raises(ValueError, match=r"target_weights: 'int4' is unknown"):
    load_pair(target_weights='int4')
  with pytest.raises(ValueError, match=r'target_weights.*mesh of 2.*--mesh_data 1'):
    specjax.load_pair(target_weights='int8', mesh=make_mesh(data=2, model=1))
  with pytest.raises(ValueError, match=r'weights: .*kernel is int8 already'):
    quantized.quantize_int8(params)
  monkeypatch.setitem(sys.modules, 'qwix', None)
  with pytest.raises(
    ValueError, match=r"target_weights: .* pip install 'specjax\[int8"
  ):
    quantized.quantize_int8(tiny.params)
