"""The cached T5 equals one teacher-forced pass, however it is cut into calls."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.t5 import T5Config, Transformer, t5_model

LENGTH = 140
NUM_SLOTS = 150
OFFSETS = (1, 5, 17, 130)  # 130 is past the largest bucket's distance
WIDTH = 6

TINY = T5Config(
  vocab_size=60,
  emb_dim=16,
  num_heads=2,
  head_dim=8,
  mlp_dim=24,
  num_encoder_layers=2,
  num_decoder_layers=3,
)


@functools.cache
def make_params(config, seed=0):
  """Random parameters, none of them 1 or alike, with biases that matter."""
  tokens_BT = jnp.ones((1, 2), jnp.int32)
  params = jax.jit(Transformer(config).init)(
    jax.random.key(seed), tokens_BT, tokens_BT
  )['params']

  def vary(path, leaf):
    name = path[-1].key
    if name == 'scale':
      return leaf * jnp.linspace(0.5, 1.5, leaf.size)
    return leaf * (4.0 if name == 'rel_embedding' else 1.0)

  return jax.tree.map_with_path(vary, params)


def random_tokens(seed, batch, length, vocab_size=TINY.vocab_size):
  rng = np.random.default_rng(seed)
  return rng.integers(2, vocab_size, (batch, length)).astype(np.int32)


def padded_sources(lengths, width):
  tokens_BE = random_tokens(1, len(lengths), width)
  for row, length in enumerate(lengths):
    tokens_BE[row, length:] = 0
  return tokens_BE


@functools.cache
def functions(config):
  model = t5_model(config)
  return (
    jax.jit(Transformer(config).apply),
    jax.jit(model.init, static_argnames='num_slots'),
    jax.jit(model.extend),
  )


@functools.cache
def teacher_forced():
  """Sources, tokens, and the logits of one uncached pass over the tokens."""
  inputs_BE = padded_sources((7, 2, 5, 9), 9)
  tokens_BT = random_tokens(2, len(OFFSETS), LENGTH)
  apply, _, _ = functions(TINY)
  logits_BTV = apply({'params': make_params(TINY)}, inputs_BE, tokens_BT)
  return inputs_BE, tokens_BT, np.asarray(logits_BTV)


def spoil(cache, start_B, seed=3):
  """Fills slots from `start` on with large finite garbage, per row."""
  rng = np.random.default_rng(seed)

  def fill(leaf):
    garbage = rng.normal(scale=1e3, size=leaf.shape).astype(np.float32)
    start = np.asarray(start_B).reshape((-1, 1, 1, 1)[-leaf.ndim :])
    keep = np.arange(leaf.shape[-2])[:, None] < start
    return jnp.where(keep, leaf, garbage)

  return cache._replace(slots=jax.tree.map(fill, cache.slots))


def assert_close(actual, expected):
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('batch', [1, 3])
@pytest.mark.parametrize('widths', [(140,), (1, 1, 7, 1, 130), (60, 3, 77)])
def test_any_split_equals_one_pass(batch, widths):
  inputs_BE, tokens_BT, expected_BTV = teacher_forced()
  _, init, extend = functions(TINY)
  params = make_params(TINY)
  cache = init(params, inputs_BE[:batch], num_slots=NUM_SLOTS)
  cache = spoil(cache, np.zeros(batch))
  start, chunks = 0, []
  for width in widths:
    start_B = jnp.full((batch,), start, jnp.int32)
    output, cache = extend(
      params, cache, tokens_BT[:batch, start : start + width], start_B
    )
    chunks.append(output.logits_BTV)
    start += width
  assert_close(np.concatenate(chunks, axis=1), expected_BTV[:batch])


def at_offsets(rows, offsets, garbage_seed):
  """Logits of WIDTH tokens written at the offsets over a spoilt cache."""
  inputs_BE, tokens_BT, _ = teacher_forced()
  inputs_BE, tokens_BT = inputs_BE[rows], tokens_BT[rows]
  _, init, extend = functions(TINY)
  params = make_params(TINY)
  cache = init(params, inputs_BE, num_slots=NUM_SLOTS)
  zero_B = jnp.zeros((len(rows),), jnp.int32)
  _, cache = extend(params, cache, tokens_BT, zero_B)
  cache = spoil(cache, offsets, garbage_seed)
  new_BT = np.stack(
    [
      row[offset : offset + WIDTH]
      for row, offset in zip(tokens_BT, offsets, strict=True)
    ]
  )
  output, cache = extend(params, cache, new_BT, jnp.asarray(offsets, jnp.int32))
  return np.asarray(output.logits_BTV), cache


def test_rows_at_different_offsets():
  _, _, expected_BTV = teacher_forced()
  actual_BTV, _ = at_offsets([0, 1, 2, 3], OFFSETS, 3)
  for row, offset in enumerate(OFFSETS):
    assert_close(actual_BTV[row], expected_BTV[row, offset : offset + WIDTH])


@pytest.mark.parametrize('offset', OFFSETS)
def test_one_row_at_each_offset(offset):
  _, _, expected_BTV = teacher_forced()
  actual_BTV, _ = at_offsets([2], [offset], 3)
  assert_close(actual_BTV[0], expected_BTV[2, offset : offset + WIDTH])


def test_garbage_in_unused_slots_changes_no_bit_and_stays():
  one_BTV, cache = at_offsets([0, 1, 2, 3], OFFSETS, 3)
  other_BTV, _ = at_offsets([0, 1, 2, 3], OFFSETS, 4)
  np.testing.assert_array_equal(one_BTV, other_BTV)
  # Only [start, start + WIDTH) was written: the garbage behind is still there.
  key_BHSK = np.asarray(cache.slots[0].key)
  for row, offset in enumerate(OFFSETS):
    assert np.abs(key_BHSK[row, :, : offset + WIDTH]).max() < 100
    assert np.abs(key_BHSK[row, :, offset + WIDTH :]).max() > 1000


def test_writing_again_overwrites():
  """Rejected tokens leave nothing behind when their slots are written anew."""
  inputs_BE, tokens_BT, expected_BTV = teacher_forced()
  _, init, extend = functions(TINY)
  params = make_params(TINY)
  cache = init(params, inputs_BE, num_slots=NUM_SLOTS)
  zero_B = jnp.zeros((len(OFFSETS),), jnp.int32)
  _, cache = extend(params, cache, random_tokens(9, len(OFFSETS), LENGTH), zero_B)
  output, _ = extend(params, cache, tokens_BT, zero_B)
  assert_close(output.logits_BTV, expected_BTV)


@pytest.mark.parametrize('width', [9, 16])
def test_padded_batch_equals_single_rows(width):
  """Sources of 2, 5 and 9 tokens: alone and unpadded, or together and padded."""
  lengths = (2, 5, 9)
  inputs_BE = padded_sources(lengths, 16)[:, :width]
  tokens_BT = random_tokens(5, 3, 4)
  apply, init, extend = functions(TINY)
  params = make_params(TINY)
  together_BTV = apply({'params': params}, inputs_BE, tokens_BT)
  cache = init(params, inputs_BE, num_slots=8)
  zero_B = jnp.zeros((3,), jnp.int32)
  cached, _ = extend(params, cache, tokens_BT, zero_B)
  for row, length in enumerate(lengths):
    alone_BTV = apply(
      {'params': params}, inputs_BE[row : row + 1, :length], tokens_BT[row : row + 1]
    )
    assert_close(together_BTV[row], alone_BTV[0])
    assert_close(cached.logits_BTV[row], alone_BTV[0])


def test_source_of_padding_only_is_finite():
  apply, _, _ = functions(TINY)
  inputs_BE = np.zeros((1, 9), np.int32)
  logits_BTV = apply({'params': make_params(TINY)}, inputs_BE, random_tokens(5, 1, 4))
  assert np.isfinite(logits_BTV).all()


def test_cross_attention_has_no_position():
  """Encoder states in another order give the same logits: no bias there."""
  inputs_BE, tokens_BT, _ = teacher_forced()
  _, init, extend = functions(TINY)
  params = make_params(TINY)
  cache = init(params, inputs_BE, num_slots=NUM_SLOTS)
  order = np.random.default_rng(0).permutation(inputs_BE.shape[1])
  shuffled = cache._replace(
    sources=jax.tree.map(lambda leaf_BHEK: leaf_BHEK[:, :, order], cache.sources),
    source_bias=cache.source_bias[..., order],
  )
  zero_B = jnp.zeros((len(OFFSETS),), jnp.int32)
  expected, _ = extend(params, cache, tokens_BT, zero_B)
  actual, _ = extend(params, shuffled, tokens_BT, zero_B)
  assert_close(actual.logits_BTV, expected.logits_BTV)


def test_causality_by_gradients():
  """The logits of slot t depend on token s exactly when s <= t."""
  length = 6
  inputs_BE = np.full((1, 4), 50, np.int32)
  tokens_BT = np.arange(10, 10 + length, dtype=np.int32)[None]
  weights_V = np.random.default_rng(0).normal(size=TINY.vocab_size)
  params = make_params(TINY)
  model = t5_model(TINY)

  def scores(embedding_VD, cached):
    changed = {**params, 'token_embedder': {'embedding': embedding_VD}}
    if cached:
      cache = model.init(changed, inputs_BE, num_slots=length + 2)
      output, _ = model.extend(changed, cache, tokens_BT, jnp.zeros((1,), jnp.int32))
      logits_BTV = output.logits_BTV
    else:
      logits_BTV = Transformer(TINY).apply({'params': changed}, inputs_BE, tokens_BT)
    return logits_BTV[0] @ weights_V.astype(np.float32)

  embedding_VD = params['token_embedder']['embedding']
  for cached in (False, True):
    jacobian = jax.jit(jax.jacrev(functools.partial(scores, cached=cached)))
    jacobian_TVD = np.asarray(jacobian(embedding_VD))
    influence_TT = np.abs(jacobian_TVD[:, tokens_BT[0]]).max(-1)
    np.testing.assert_array_equal(influence_TT > 1e-6, np.tri(length, dtype=bool))
    assert (influence_TT[~np.tri(length, dtype=bool)] == 0).all()


def scale_wo(params, factor):
  def visit(path, leaf):
    names = [key.key for key in path]
    return leaf * factor if 'wo' in names else leaf

  return jax.tree.map_with_path(visit, params)


BFLOAT16 = T5Config.from_dict({**TINY.to_dict(), 'dtype': 'bfloat16'})


@pytest.mark.parametrize('factor', [1.0, 1e4])
def test_bfloat16_body_is_finite_with_float32_logits(factor):
  params = scale_wo(make_params(TINY), factor)
  inputs_BE, tokens_BT, _ = teacher_forced()
  _, init, extend = functions(BFLOAT16)
  cache = init(params, inputs_BE, num_slots=NUM_SLOTS)
  zero_B = jnp.zeros((len(OFFSETS),), jnp.int32)
  output, cache = extend(params, cache, tokens_BT, zero_B)
  assert output.logits_BTV.dtype == jnp.float32
  assert output.hidden_BTD.dtype == jnp.bfloat16
  assert cache.slots[0].key.dtype == jnp.bfloat16
  assert np.isfinite(output.logits_BTV).all()
  if factor == 1:
    _, init32, extend32 = functions(TINY)
    cache = init32(params, inputs_BE, num_slots=NUM_SLOTS)
    exact, _ = extend32(params, cache, tokens_BT, zero_B)
    error = np.abs(output.logits_BTV - exact.logits_BTV).mean()
    assert error < 0.05 * np.std(exact.logits_BTV)


def equations(jaxpr):
  for equation in jaxpr.eqns:
    yield equation
    for value in equation.params.values():
      if hasattr(value, 'jaxpr'):
        yield from equations(value.jaxpr)


def test_softmax_norm_and_logits_are_float32_in_a_bfloat16_body():
  params = make_params(TINY)
  inputs_BE, tokens_BT, _ = teacher_forced()
  jaxpr = jax.make_jaxpr(Transformer(BFLOAT16).apply)(
    {'params': params}, inputs_BE, tokens_BT
  )
  dtypes: dict = {}
  for equation in equations(jaxpr.jaxpr):
    for variable in equation.invars:
      dtypes.setdefault(equation.primitive.name, set()).add(str(variable.aval.dtype))
  assert dtypes['exp'] == {'float32'}  # softmax
  assert dtypes['rsqrt'] == {'float32'}  # norm
  assert dtypes['reduce_max'] == {'float32'}
  assert dtypes['dot_general'] == {'bfloat16', 'float32'}  # float32: the head
  head = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == 'dot_general'][-1]
  assert head.outvars[0].aval.shape[-1] == TINY.vocab_size
  assert str(head.outvars[0].aval.dtype) == 'float32'


def test_tied_head_of_few_tokens_equals_that_of_many():
  """The head changes its orientation with the number of tokens."""
  config = T5Config.from_dict({**TINY.to_dict(), 'logits_via_embedding': True})
  params = make_params(config)
  inputs_BE, tokens_BT, _ = teacher_forced()
  apply, init, extend = functions(config)
  expected_BTV = apply({'params': params}, inputs_BE, tokens_BT)
  cache = init(params, inputs_BE, num_slots=NUM_SLOTS)
  zero_B = jnp.zeros((len(OFFSETS),), jnp.int32)
  output, _ = extend(params, cache, tokens_BT[:, :WIDTH], zero_B)
  assert_close(output.logits_BTV, expected_BTV[:, :WIDTH])


def test_same_configuration_is_the_same_model():
  again = T5Config.from_dict(TINY.to_dict())
  assert t5_model(again) is t5_model(TINY)
  other = T5Config.from_dict({**TINY.to_dict(), 'num_decoder_layers': 1})
  assert t5_model(other) is not t5_model(TINY)


def test_new_offsets_and_tokens_do_not_compile_again():
  inputs_BE, _, _ = teacher_forced()
  model = t5_model(TINY)
  params = make_params(TINY)
  cache = model.init(params, inputs_BE, num_slots=20)
  num_traces = 0

  def counted(*args):
    nonlocal num_traces
    num_traces += 1
    return model.extend(*args)

  extend = jax.jit(counted)
  for start in range(3):
    start_B = jnp.asarray([start, 2, 0, 5 * start], jnp.int32)
    _, cache = extend(params, cache, random_tokens(start, 4, 2), start_B)
  assert num_traces == 1


def test_one_token_step_copies_neither_cache_nor_weights():
  """No copy or transpose of a large array in the compiled loop of one row."""
  model = t5_model(TINY)
  params = make_params(TINY)
  cache = jax.eval_shape(
    functools.partial(model.init, num_slots=NUM_SLOTS),
    params,
    jax.ShapeDtypeStruct((1, 9), jnp.int32),
  )

  def loop(params, cache, num_steps):
    def body(step, cache):
      tokens_BT = jnp.full((1, 1), 5, jnp.int32) + step % 7
      _, cache = model.extend(params, cache, tokens_BT, step[None])
      return cache

    return jax.lax.fori_loop(0, num_steps, body, cache)

  compiled = jax.jit(loop, donate_argnums=1).lower(params, cache, 9).compile()
  text = compiled.as_text()
  (body_name,) = re.findall(r' while\(.*?body=(%[\w.-]+)', text)
  body = text[text.index(f'\n{body_name} (') :].split('\n}', 1)[0]
  assert 'dynamic-update-slice' in body
  copied = re.findall(r'= f32\[([\d,]+)\]\S* (?:copy|transpose)\(', body)
  sizes = [np.prod([int(n) for n in dims.split(',')]) for dims in copied]
  cache_size = TINY.num_heads * NUM_SLOTS * TINY.head_dim
  assert all(size < cache_size / 4 for size in sizes)
