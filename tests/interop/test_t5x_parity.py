"""T5X itself, on the same parameters: logits, tokens, scores, laws, an evaluation.

Runs wherever T5X can be imported; see `stubs.NEEDED`.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import stubs

from specjax.checkpoints import store
from specjax.interop import t5x as interop
from specjax.models.t5 import T5Config, Transformer, t5_model
from specjax.testing.chi_square import chi_square

pytestmark = [pytest.mark.t5x, pytest.mark.filterwarnings('ignore')]

NUM_LOGITS = 20
NUM_TOKENS = 16
EOS = 13  # what these random networks say early enough
VERSIONS = {
  '1.0': {'mlp_activations': ('relu',), 'logits_via_embedding': True},
  '1.1': {'mlp_activations': ('gelu', 'linear'), 'logits_via_embedding': False},
}
# Ragged; the last is one token.
INPUTS_BE = np.array(
  [[4, 5, 6, 7, 8, 1], [8, 9, 3, 1, 0, 0], [13, 2, 11, 5, 1, 0], [3, 0, 0, 0, 0, 0]],
  np.int32,
)


@pytest.fixture(autouse=True)
def t5xs_style():
  """T5X relies on broadcasting between ranks."""
  with jax.numpy_rank_promotion('allow'):
    yield


def t5x_module(**overrides):
  network = stubs.import_t5x('examples.t5.network')
  fields = {
    'vocab_size': NUM_LOGITS,
    'emb_dim': 24,
    'num_heads': 3,
    'head_dim': 4,
    'mlp_dim': 40,
    'num_encoder_layers': 2,
    'num_decoder_layers': 3,
    'dropout_rate': 0.0,
    **VERSIONS['1.1'],
    **overrides,
  }
  return network.Transformer(config=network.T5Config(**fields))


def random_params(module, seed=0, gain=1.0):
  tokens = jnp.ones((1, 2), jnp.int32)
  init = functools.partial(module.init, enable_dropout=False)
  params = jax.jit(init)(jax.random.key(seed), tokens, tokens, tokens)['params']
  # Biases of attention that matter, and laws that are not nearly uniform.
  for stack in ('encoder', 'decoder'):
    relpos = params[stack]['relpos_bias']
    relpos['rel_embedding'] = 4 * relpos['rel_embedding']
  if 'logits_dense' in params['decoder']:
    head = params['decoder']['logits_dense']
    head['kernel'] = gain * head['kernel']
  return params


@functools.cache
def t5x_model(vocab_size=NUM_LOGITS, **decode_options):
  models = stubs.import_t5x('models')
  decoding = stubs.import_t5x('decoding')
  seqio = pytest.importorskip('seqio', reason=stubs.NEEDED)
  vocabulary = seqio.PassThroughVocabulary(vocab_size, eos_id=EOS)
  return models.EncoderDecoderModel(
    t5x_module(),
    vocabulary,
    vocabulary,
    optimizer_def=None,
    decode_fn=functools.partial(decoding.temperature_sample, **decode_options),
  )


@functools.cache
def target_params():
  return random_params(t5x_module(), seed=1, gain=4.0)


@functools.cache
def twin(vocab_size=NUM_LOGITS, method='model', **options):
  draft = None
  if method == 'model':
    module = t5x_module(num_encoder_layers=1, num_decoder_layers=1)
    draft = store.Checkpoint(
      interop.t5_config(module), random_params(module, seed=2, gain=4.0), {}
    )
  return interop.SpeculativeModel(
    t5x_model(vocab_size), draft, num_draft=3, decoder_params=options
  )


def predict(model, batch, **options):
  # Decoder parameters of T5X must be Python numbers or traced arrays throughout.
  run = functools.partial(model.predict_batch_with_aux, **options)
  return jax.device_get(jax.jit(run)(target_params(), batch, jax.random.key(5)))


def batch(prompt_BT=None, rows=slice(None)):
  given_BT = np.zeros((len(INPUTS_BE), NUM_TOKENS), np.int32)
  if prompt_BT is not None:
    given_BT[:, 1 : prompt_BT.shape[1] + 1] = prompt_BT
  return {
    'encoder_input_tokens': INPUTS_BE[rows],
    'decoder_input_tokens': given_BT[rows],
  }


@pytest.mark.parametrize('version', VERSIONS)
def test_logits_at_every_relative_offset(version):
  """160 decoder positions and 150 of the encoder: past the largest bucket (128)."""
  module = t5x_module(**VERSIONS[version])
  params = random_params(module)
  config = interop.t5_config(module)
  assert config == T5Config.from_dict(config.to_dict())
  r = np.random.default_rng(0)
  inputs_BE = r.integers(2, NUM_LOGITS, (3, 150))
  for row, length in enumerate([150, 149, 40]):
    inputs_BE[row, length:] = 0
  fed_BT = r.integers(2, NUM_LOGITS, (3, 160))
  fed_BT[:, 0] = 0
  inputs_BE, fed_BT = jnp.asarray(inputs_BE), jnp.asarray(fed_BT)
  apply = functools.partial(module.apply, enable_dropout=False)
  theirs = jax.jit(apply)({'params': params}, inputs_BE, fed_BT, jnp.ones_like(fed_BT))
  own = Transformer(config)
  shapes = jax.eval_shape(own.init, jax.random.key(0), inputs_BE, fed_BT)['params']
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
  ours = jax.jit(own.apply)({'params': params}, inputs_BE, fed_BT)
  assert np.abs(theirs).max() > 1
  np.testing.assert_allclose(ours, theirs, atol=1e-5)

  # From the cache, each row at another offset.
  model = t5_model(config)
  cache = model.init(params, inputs_BE, num_slots=160)
  extend = jax.jit(model.extend)
  _, cache = extend(params, cache, fed_BT, jnp.zeros(3, jnp.int32))
  start_B = jnp.array([130, 17, 5])
  slots_BT = start_B[:, None] + jnp.arange(4)
  tokens_BT = jnp.take_along_axis(fed_BT, slots_BT, axis=1)
  output, _ = extend(params, cache, tokens_BT, start_B)
  expected = jnp.take_along_axis(theirs, slots_BT[..., None], axis=1)
  np.testing.assert_allclose(output.logits_BTV, expected, atol=1e-5)


# End tokens are taken off, as T5X does.
PROMPT_BT = np.array(
  [[5, 9, 3, EOS], [7, 0, 0, 0], [6, 6, EOS, 0], [0, 0, 0, 0]], np.int32
)


@pytest.mark.parametrize(
  ('temperature', 'prompted', 'method'),
  [(0.0, False, 'model'), (1.0, True, 'model'), (0.0, True, 'ngram')],
)
def test_greedy_tokens_and_scores(temperature, prompted, method):
  """Temperature 0, and top-1 at temperature 1 (T5X's default), rescaled or not."""
  prompt_BT = PROMPT_BT if prompted else None
  options = {'prompt_with_targets': prompted}
  for rescale in (True, False):
    sampling = {'temperature': temperature, 'rescale_log_probs': rescale}
    theirs, their_aux = predict(t5x_model(**sampling), batch(prompt_BT), **options)
    ours, our_aux = predict(
      twin(method=method, **sampling), batch(prompt_BT), **options
    )
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)
    assert list(our_aux) == list(their_aux) == ['scores']
    assert our_aux['scores'].shape == their_aux['scores'].shape
    np.testing.assert_allclose(our_aux['scores'], their_aux['scores'], atol=1e-4)
    if not rescale:
      assert (our_aux['scores'] < 0).all()
      assert our_aux['scores'].min() < -1
  assert len(np.unique(ours, axis=0)) == len(ours)
  assert (ours == EOS).any()
  assert (ours[:, -1] > 0).any()


def test_return_all_decodes_and_max_decode_steps():
  sampling = {'temperature': 0.0, 'max_decode_steps': 5, 'rescale_log_probs': False}
  options = {
    'num_decodes': 3,
    'return_all_decodes': True,
    'prompt_with_targets': True,
  }
  theirs, their_aux = predict(t5x_model(**sampling), batch(PROMPT_BT), **options)
  ours, our_aux = predict(twin(**sampling), batch(PROMPT_BT), **options)
  assert ours.shape == theirs.shape == (4, 3, NUM_TOKENS)
  np.testing.assert_array_equal(ours, theirs)
  np.testing.assert_allclose(our_aux['scores'], their_aux['scores'], atol=1e-4)


@pytest.mark.parametrize(
  'sampling',
  [
    {'temperature': 0.7, 'topk': 0},
    {'temperature': 1.0, 'topk': 4},
    {'temperature': 1.3, 'topk': 0, 'topp': 0.7},
  ],
  ids=['temperature', 'top-k', 'top-p'],
)
def test_sampled_laws(sampling):
  """Pairs of first tokens against T5X's law of them, and T5X's own sample too."""
  decoding = stubs.import_t5x('decoding')
  num_rows = 20_000
  source = {
    'encoder_input_tokens': np.tile(INPUTS_BE[:1], (num_rows, 1)),
    'decoder_input_tokens': np.zeros((num_rows, 2), np.int32),
  }
  apply = functools.partial(t5x_module().apply, enable_dropout=False)

  def law(prefix):
    fed = jnp.array([[0, *prefix]])
    logits = apply({'params': target_params()}, INPUTS_BE[:1], fed, jnp.ones_like(fed))[
      0, -1
    ]
    x = logits[None] / sampling['temperature']
    if sampling['topk']:
      x = decoding.binary_search.topk_mask(x, sampling['topk'], -1e7)
    if sampling.get('topp'):
      x = decoding.binary_search.topp_mask(x, sampling['topp'], -1e7)
    return np.asarray(jax.nn.softmax(x[0]), np.float64)

  cells = {}
  first_V = law(())
  for token, mass in enumerate(first_V):
    if token == EOS:
      cells[token, 0] = mass
    elif mass > 1e-12:
      for second, rest in enumerate(law((token,))):
        cells[token, second] = mass * rest
  law_K = np.array([*cells.values(), 0.0])
  law_K[law_K < 1e-12] = 0
  law_K /= law_K.sum()
  index = {cell: k for k, cell in enumerate(cells)}
  p_values = {}
  for name, model in {
    'ours': twin(**sampling),
    'theirs': t5x_model(**sampling),
  }.items():
    decodes, _ = predict(model, source)
    counts_K = np.zeros(len(law_K))
    for row in decodes.tolist():
      counts_K[index.get(tuple(row), -1)] += 1
    p_values[name] = chi_square(counts_K, law_K).p_value
  assert min(p_values.values()) > 1e-5, p_values
  # The same test tells apart a law at another temperature.
  wrong_K = law_K**1.3 / (law_K**1.3).sum()
  assert scipy.stats.chisquare(
    counts_K[wrong_K > 1e-3], num_rows * wrong_K[wrong_K > 1e-3] /
    wrong_K[wrong_K > 1e-3].sum() * counts_K[wrong_K > 1e-3].sum() / num_rows,
  ).pvalue < 1e-5  # fmt: skip


def test_padding_ids_are_never_emitted():
  """T5's embedding has 32128 rows, its vocabulary 32100 ids; here 20 and 12."""
  theirs, _ = predict(t5x_model(temperature=0.0), batch())
  assert (theirs >= 12).any()
  ours, _ = predict(twin(vocab_size=12, temperature=0.0), batch())
  assert (ours < 12).all()
  sampled, _ = predict(twin(vocab_size=12, topk=0), batch(), num_decodes=50)
  assert (sampled < 12).all()


def test_scores_are_score_batchs():
  """T5X's own scoring of what the twin emitted."""
  options = {'topk': 0, 'rescale_log_probs': False}
  decodes, aux = predict(twin(**options), batch(), num_decodes=2)
  weights_BT = np.cumsum(np.cumsum(decodes == EOS, axis=1), axis=1) <= 1
  scored = twin(**options).score_batch(
    target_params(),
    {
      'encoder_input_tokens': INPUTS_BE,
      'decoder_input_tokens': np.pad(decodes, ((0, 0), (1, 0)))[:, :-1],
      'decoder_target_tokens': np.where(weights_BT, decodes, 0),
      'decoder_loss_weights': weights_BT.astype(np.float32),
    },
  )
  np.testing.assert_allclose(aux['scores'], scored, atol=1e-4)


def test_an_evaluation_with_seqio():
  """With T5X's `get_infer_fn`; the references are T5X's own predictions."""
  seqio = pytest.importorskip('seqio', reason=stubs.NEEDED)
  import tensorflow as tf

  vocabulary = t5x_model().output_vocabulary
  expected, _ = predict(t5x_model(temperature=0.0), batch())
  rows = [
    {'inputs': source[source > 0], 'targets': target[: _end(target)]}
    for source, target in zip(INPUTS_BE, expected, strict=True)
  ]
  signature = {name: tf.TensorSpec([None], tf.int32) for name in ('inputs', 'targets')}

  def dataset(split, shuffle_files=False, seed=None):
    return tf.data.Dataset.from_generator(lambda: rows, output_signature=signature)

  def exact(targets, predictions):
    seen.extend(zip(targets, predictions, strict=True))
    return {'exact': np.mean([list(t) == list(p) for t, p in seen])}

  seen = []
  name = 'in_memory'
  if name in seqio.TaskRegistry.names():
    seqio.TaskRegistry.remove(name)
  seqio.TaskRegistry.add(
    name,
    source=seqio.FunctionDataSource(
      dataset, splits=('test',), num_input_examples={'test': len(rows)}
    ),
    preprocessors=[],
    output_features={
      key: seqio.Feature(vocabulary, add_eos=False, dtype=tf.int32)
      for key in ('inputs', 'targets')
    },
    metric_fns=[exact],
  )
  evaluator = seqio.Evaluator(
    name,
    twin(temperature=0.0).FEATURE_CONVERTER_CLS(pack=False),
    eval_split='test',
    sequence_length={'inputs': 6, 'targets': NUM_TOKENS},
  )
  everywhere = types.SimpleNamespace(params=None, flax_mutables=None)
  infer_fn = stubs.import_t5x('utils').get_infer_fn(
    infer_step=twin(temperature=0.0).predict_batch,
    batch_size=2,
    train_state_axes=everywhere,
    partitioner=stubs.import_t5x('partitioning').PjitPartitioner(num_partitions=1),
  )
  state = types.SimpleNamespace(params=target_params(), flax_mutables=None)
  predict_fn = functools.partial(infer_fn, train_state=state)
  all_metrics, _ = evaluator.evaluate(compute_metrics=True, predict_fn=predict_fn)
  assert all_metrics.result()[name]['exact'] == 1.0
  assert len(seen) == len(rows)
  assert len({len(target) for target, _ in seen}) > 2


def _end(tokens):
  """The length of an output, its end token included."""
  return int(np.argmax(tokens == EOS)) + 1 if EOS in tokens else len(tokens)


GIN = """
from __gin__ import dynamic_registration
import seqio
from t5x import models
from t5x.examples.t5 import network
from specjax.interop import t5x as specjax_t5x

specjax_t5x.SpeculativeModel:
  model = @models.EncoderDecoderModel()
  num_draft = 2
  decoder_params = {'temperature': 0.0, 'rescale_log_probs': False}
models.EncoderDecoderModel:
  module = @network.Transformer()
  input_vocabulary = @seqio.PassThroughVocabulary()
  output_vocabulary = @seqio.PassThroughVocabulary()
  optimizer_def = None
seqio.PassThroughVocabulary.size = 32100
network.Transformer.config = @network.T5Config()
network.T5Config:
  vocab_size = 32128
  dtype = 'bfloat16'
  mlp_activations = ('gelu', 'linear')
"""


def test_from_gin():
  stubs.import_t5x('models')
  gin = pytest.importorskip('gin', reason=stubs.NEEDED)
  with gin.unlock_config():
    gin.parse_config(GIN)
    model = gin.get_configurable(interop.SpeculativeModel)()
  gin.clear_config()
  assert interop.t5_config(model.module) == T5Config.from_size(
    't5_1_0_small', mlp_activations=('gelu', 'linear'), logits_via_embedding=False,
    dtype='bfloat16',
  )  # fmt: skip
  assert model.output_vocabulary.vocab_size == 32100
