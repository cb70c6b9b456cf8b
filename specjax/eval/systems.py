"""What decodes a benchmark's case: our loops, T5X's and Hugging Face's.

A system is made from a `Case`, or says why it can not run. All compute in the case's
dtype with the same weights, decode greedily, run their encoders within the measured
time and use the processor's cores that this process may use.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import drafters
from specjax.checkpoints import hf
from specjax.checkpoints.leaves import Weights
from specjax.core import autoregressive, loop, rng, verify
from specjax.core.types import Params
from specjax.core.warp import make_sampling, make_warp
from specjax.eval import metrics
from specjax.eval.cases import Case
from specjax.models.t5 import T5Config, t5_model

PLAIN = 'plain'
HF_GENERATE, HF_ASSISTED = 'hf generate', 'hf assisted'
T5X = 't5x'
_VERIFIERS = {'token': verify.token_verifier, 'block': verify.block_verifier}
_NEEDS_HF = "pip install 'specjax[hf]' (torch and transformers)"
_NEEDS_T5X = 'put the sources of github.com/google-research/t5x on PYTHONPATH'
# What T5X's network has no field for.
_T5X_FIXED = {
  'scale_tied_logits': True,
  'relative_attention_num_buckets': 32,
  'relative_attention_max_distance': 128,
}


class System(NamedTuple):
  """Something that decodes a case.

  Attributes:
    decode: int32 inputs_BE -> its own result, a tree of arrays to wait for.
    tokens: result -> int [B, up to max_new_tokens]; the start token left out.
    calls: result -> calls of the target, each row's counted while it is live; None:
      the system does not tell.
  """

  decode: Callable[[np.ndarray], Any]
  tokens: Callable[[Any], np.ndarray]
  calls: Callable[[Any], int] | None = None


class Absent(NamedTuple):
  """Why a system does not run, and what to do about it."""

  reason: str


Maker = Callable[[Case], System | Absent]


def ours(case: Case, method: str | None = None, rule: str = 'token') -> System | Absent:
  """Our loop, compiled.

  Args:
    case: what is decoded.
    method: 'draft_model' or 'ngram'; None: plain decoding.
    rule: 'token' or 'block'.
  """
  width = case.target.config.vocab_size
  warp = make_warp(width)
  drafter = autoregressive.no_draft
  if method == 'ngram':
    drafter = drafters.ngram_draft(case.num_draft, width)
  elif method is not None:
    if case.draft is None:
      return Absent('there is no draft model; name one with --draft_model')
    model = t5_model(case.draft.config)
    drafter = drafters.model_draft(model, warp, case.num_draft)
  num_rows = case.batch_size
  row_key_B = rng.row_keys(0, jnp.arange(num_rows))
  sampling = make_sampling(num_rows, max_new_tokens=case.max_new_tokens)
  params = case.params if method == 'draft_model' else Params(case.params.target)

  def decode(inputs_BE):
    with _precision(case):
      return loop.decode(
        params,
        jnp.asarray(inputs_BE),
        row_key_B,
        sampling,
        target=t5_model(case.target.config),
        drafter=drafter,
        verifier=_VERIFIERS[rule],
        warp=warp,
        max_len=case.max_new_tokens + 1,
        eos_id=case.eos_id,
      )

  return System(
    decode,
    lambda state: np.asarray(state.tokens_BS)[:, 1 : case.max_new_tokens + 1],
    lambda state: metrics.summarize(state, case.eos_id).num_target_calls,
  )


def _precision(case: Case) -> contextlib.AbstractContextManager:
  """float32 is float32, on TPU and GPU too."""
  is_float32 = case.dtype == 'float32'
  return jax.default_matmul_precision('highest' if is_float32 else 'default')


def hf_generate(case: Case, *, assisted: bool = False) -> System | Absent:
  """Hugging Face's `generate` as it comes: eager PyTorch, with its dynamic cache.

  Args:
    case: what is decoded.
    assisted: assisted generation with the case's draft and gamma: the schedule of
      the number of drafted tokens is constant and no confidence ends a draft early,
      so that both sides draft and verify the same.
  """
  if not all(importlib.util.find_spec(each) for each in ('torch', 'transformers')):
    return Absent(_NEEDS_HF)
  if assisted and case.draft is None:
    return Absent('there is no draft model; name one with --draft_model')
  if assisted and case.batch_size > 1:
    return Absent('transformers assists one row at a time; set --batch_size 1')
  import torch

  is_gpu = jax.default_backend() == 'gpu'
  if jax.default_backend() not in ('cpu', 'gpu'):
    return Absent(f'PyTorch has no {jax.default_backend()}; run JAX on CPU or GPU')
  if is_gpu and not torch.cuda.is_available():
    return Absent('this PyTorch sees no GPU; install one that does')
  device = torch.device('cuda' if is_gpu else 'cpu')
  torch.set_num_threads(num_cores())
  options: dict[str, Any] = {
    'max_new_tokens': case.max_new_tokens,
    'do_sample': False,
    'num_beams': 1,
  }
  eos_id = None if case.eos_id < 0 else case.eos_id
  model = _torch_model(case.target, eos_id).to(device)
  if assisted:
    assert case.draft is not None
    assistant = _torch_model(case.draft, eos_id).to(device)
    assistant.generation_config.num_assistant_tokens = case.num_draft
    assistant.generation_config.num_assistant_tokens_schedule = 'constant'
    assistant.generation_config.assistant_confidence_threshold = 0.0
    options['assistant_model'] = assistant
  calls = [0]

  def count_call(*_):
    calls[0] += 1

  model.register_forward_hook(count_call)  # the encoder is called apart

  def decode(inputs_BE):
    calls[0] = 0
    inputs = torch.tensor(inputs_BE, dtype=torch.long, device=device)
    mask = (inputs > 0).long()
    with torch.inference_mode(), _quiet():
      tokens = model.generate(inputs, attention_mask=mask, **options)
    return tokens.cpu().numpy(), calls[0]  # waits for a GPU

  # A call serves all rows, as long as one of them is live.
  count = (lambda result: result[1]) if case.batch_size == 1 else None
  return System(decode, lambda result: result[0][:, 1:], count)


def _torch_model(weights: Weights, eos_id: int | None) -> Any:
  """The weights in transformers, through the folder that our conversion writes."""
  import torch
  import transformers

  with tempfile.TemporaryDirectory() as folder, _quiet():
    hf.write(f'{folder}/model', weights, dtype=weights.config.dtype)
    model = transformers.T5ForConditionalGeneration.from_pretrained(
      f'{folder}/model', dtype=getattr(torch, weights.config.dtype)
    )
  model.generation_config.eos_token_id = eos_id
  # `generate` makes its cache of decoder layers with the encoder's number.
  model.config.num_layers = model.config.num_decoder_layers
  return model.eval()


@contextlib.contextmanager
def _quiet():
  """No progress bars and advice between the lines of a table."""
  from transformers.utils import logging

  logging.disable_progress_bar()
  level = logging.get_verbosity()
  logging.set_verbosity_error()
  try:
    yield
  finally:
    logging.set_verbosity(level)
    logging.enable_progress_bar()


def t5x(case: Case) -> System | Absent:
  """T5X's `temperature_sample` over its own T5, compiled whole, at its `topk=1`.

  As `EncoderDecoderModel.predict_batch_with_aux` has it: encode, make the cache, loop.
  Only the two modules are imported, so that T5X's other dependencies (SeqIO,
  TensorFlow) are not needed.
  """
  config = case.target.config
  for field, value in _T5X_FIXED.items():
    if getattr(config, field) != value:
      return Absent(f"T5X's network has no {field} but {value}; leave {T5X!r} out")
  try:
    decoding = _import_t5x('decoding')
    network = _import_t5x('examples.t5.network')
  except ModuleNotFoundError as error:
    return Absent(f'{_NEEDS_T5X} ({error})')
  module = _t5x_module(network, config)
  # T5X has no "never": an id that is no logit's.
  eos_id = config.vocab_size if case.eos_id < 0 else case.eos_id

  @jax.jit
  def decode(params, inputs_BE):
    apply = functools.partial(module.apply, enable_dropout=False)
    encoded_BED = apply({'params': params}, inputs_BE, method=module.encode)
    blank_BT = jnp.zeros((case.batch_size, case.max_new_tokens), jnp.int32)
    _, variables = apply(
      {'params': params},
      encoded_BED,
      inputs_BE,
      jnp.ones_like(blank_BT),
      jnp.ones_like(blank_BT),
      decode=True,
      mutable=['cache'],
      method=module.decode,
    )

    def tokens_to_logits(state):
      logits_B1V, variables = apply(
        {'params': params, 'cache': state.cache},
        encoded_BED,
        inputs_BE,
        state.cur_token,
        state.cur_token,
        decode=True,
        max_decode_length=case.max_new_tokens,
        mutable=['cache'],
        method=module.decode,
      )
      return jnp.squeeze(logits_B1V, axis=1), variables['cache']

    return decoding.temperature_sample(
      inputs=blank_BT,
      cache=variables['cache'],
      tokens_to_logits=tokens_to_logits,
      eos_id=eos_id,
      decode_rng=jax.random.PRNGKey(0),
      topk=1,
    )

  def run(inputs_BE):
    # T5X adds arrays of different ranks, which a strict JAX refuses.
    any_rank = jax.numpy_rank_promotion('allow')
    with _precision(case), any_rank:
      return decode(case.params.target, jnp.asarray(inputs_BE))

  return System(run, lambda result: np.asarray(result[0])[:, 0])


def _t5x_module(network: types.ModuleType, config: T5Config) -> Any:
  names = (
    'vocab_size',
    'emb_dim',
    'num_heads',
    'head_dim',
    'mlp_dim',
    'num_encoder_layers',
    'num_decoder_layers',
    'mlp_activations',
    'logits_via_embedding',
  )
  fields = {name: getattr(config, name) for name in names}
  return network.Transformer(
    network.T5Config(**fields, dtype=config.dtype, dropout_rate=0.0)
  )


def _import_t5x(name: str) -> types.ModuleType:
  """`t5x.<name>` without what `t5x/__init__.py` imports."""
  if 't5x' in sys.modules:
    return importlib.import_module(f't5x.{name}')
  spec = importlib.util.find_spec('t5x')
  if spec is None or spec.submodule_search_locations is None:
    raise ModuleNotFoundError("No module named 't5x'")
  package = types.ModuleType('t5x')
  package.__path__ = list(spec.submodule_search_locations)
  sys.modules['t5x'] = package
  try:
    return importlib.import_module(f't5x.{name}')
  finally:
    # Whoever imports T5X later must get the whole of it.
    for each in [each for each in sys.modules if each.partition('.')[0] == 't5x']:
      del sys.modules[each]


def num_cores() -> int:
  """Cores that this process may use; XLA's CPU client takes so many threads."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


SYSTEMS: dict[str, Maker] = {
  PLAIN: ours,
  **{
    f'{method} {rule}': functools.partial(ours, method=method, rule=rule)
    for method in ('draft_model', 'ngram')
    for rule in _VERIFIERS
  },
  T5X: t5x,
  HF_GENERATE: hf_generate,
  HF_ASSISTED: functools.partial(hf_generate, assisted=True),
}
