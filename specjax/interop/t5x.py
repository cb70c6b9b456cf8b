"""T5X's calling convention: a T5X model whose predictions come from the loop.

In gin, where a run has `MODEL = @models.EncoderDecoderModel()`:

  from specjax.interop import t5x as specjax_t5x
  MODEL = @specjax_t5x.SpeculativeModel()
  specjax_t5x.SpeculativeModel:
    model = @models.EncoderDecoderModel()
    draft = 'draft.safetensors'
    num_draft = 4

`t5x.infer`, `t5x.eval` and `seqio.Evaluator` then decode speculatively; whatever is
not prediction is the wrapped model's. Nothing here imports T5X: the model is used
through its attributes.
"""

import functools
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp

from specjax import drafters
from specjax.checkpoints import store
from specjax.config import check_choice, suggest
from specjax.core import loop, prompt, verify
from specjax.core.types import Params, PyTree, Sampling
from specjax.core.warp import make_sampling, make_warp
from specjax.models.t5 import T5Config, t5_model

# What `t5x.decoding.temperature_sample` takes, with its defaults: greedy.
SAMPLING = {
  'temperature': 1.0,
  'topk': 1,
  'topp': 0.0,
  'max_decode_steps': None,
  'max_decode_steps_hard_limit': None,
  'rescale_log_probs': True,
}
# Below it T5X is greedy.
MIN_TEMPERATURE = 1e-4
VERIFIERS = {'token': verify.token_verifier, 'block': verify.block_verifier}

_NETWORK = (
  'vocab_size',
  'emb_dim',
  'num_heads',
  'head_dim',
  'mlp_dim',
  'num_encoder_layers',
  'num_decoder_layers',
)


class SpeculativeModel:
  """A twin of T5X's `EncoderDecoderModel` that predicts by speculative decoding.

  The law of predictions is that of `t5x.decoding.temperature_sample` with the same
  parameters, except that ids beyond the output vocabulary (the embedding's padding)
  are never emitted, and that rows have random streams of their own. `decode_fn` of
  the wrapped model is not used, so that its parameters go into `decoder_params`.

  Example (in Python):
    model = SpeculativeModel(t5x_model, draft='draft.safetensors')
    decodes, aux = model.predict_batch_with_aux(params, batch)
  """

  def __init__(
    self,
    model: Any,
    draft: str | Path | store.Checkpoint | None = None,
    *,
    num_draft: int = 4,
    rejection_sample_method: str = 'token',
    decoder_params: Mapping[str, Any] | None = None,
    prompt_lookup_max: int = 3,
    prompt_lookup_min: int = 1,
  ):
    """Wraps a model.

    Args:
      model: an `EncoderDecoderModel` whose module is `t5x.examples.t5`'s
        `Transformer`.
      draft: a T5 of the same vocabulary, as a safetensors file or as
        `store.Checkpoint`. None: prompt lookup, which needs no parameters.
      num_draft: G >= 1, tokens drafted per call of the target.
      rejection_sample_method: 'token' or 'block'; both are exact.
      decoder_params: defaults for `predict_batch_with_aux`'s; the names, and what
        holds where neither says anything, are `temperature_sample`'s (greedy).
      prompt_lookup_max: longest n-gram of prompt lookup.
      prompt_lookup_min: shortest.

    Raises:
      ValueError: the module is another network, the draft has fewer logits than the
        vocabulary ids, or an option is out of range.
    """
    check_choice('rejection_sample_method', rejection_sample_method, VERIFIERS)
    self._model = model
    self._decoder_params = dict(decoder_params or {})
    _check_decoder_params(self._decoder_params)
    self._verifier = VERIFIERS[rejection_sample_method]
    self._config = t5_config(model.module)
    size = min(model.output_vocabulary.vocab_size, self._config.vocab_size)
    self._warp = make_warp(size)
    if draft is None:
      self._draft_params = None
      self._drafter = drafters.ngram_draft(
        num_draft, self._config.vocab_size, prompt_lookup_max, prompt_lookup_min
      )
      return
    if not isinstance(draft, store.Checkpoint):
      draft = store.load(Path(draft).expanduser(), dtype=self._config.dtype)
    width = draft.config.vocab_size
    if width != self._config.vocab_size:
      raise ValueError(
        f'draft: it has {width} logits, the target {self._config.vocab_size}; choose a '
        'draft of the same vocabulary and padding, or None for prompt lookup'
      )
    self._draft_params = draft.params
    self._drafter = drafters.model_draft(t5_model(draft.config), self._warp, num_draft)

  def __getattr__(self, name: str) -> Any:
    # Copies ask for special names before there is a model.
    if name.startswith('__') or name == '_model':
      raise AttributeError(name)
    return getattr(self._model, name)

  def predict_batch(
    self,
    params: PyTree,
    batch: Mapping[str, jax.Array],
    rng: jax.Array | None = None,
  ) -> jax.Array:
    """The predictions of `predict_batch_with_aux`."""
    return self.predict_batch_with_aux(params, batch, rng)[0]

  def predict_batch_with_aux(
    self,
    params: PyTree,
    batch: Mapping[str, jax.Array],
    rng: jax.Array | None = None,
    decoder_params: MutableMapping[str, Any] | None = None,
    return_all_decodes: bool | None = None,
    num_decodes: int | None = None,
    prompt_with_targets: bool = False,
  ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
    """Predicts a batch, as `EncoderDecoderModel.predict_batch_with_aux` does.

    Args:
      params: the target's parameters under T5X's names.
      batch: `encoder_input_tokens` int32 [B, E] and `decoder_input_tokens` int32
        [B, T], which gives the length of predictions, and the prompts.
      rng: a key; None: a fixed one.
      decoder_params: the parameters of `temperature_sample` by its names:
        `temperature` (a number or [B]), `topk`, `topp`, `max_decode_steps`,
        `max_decode_steps_hard_limit`, `rescale_log_probs`, and `decode_rng` and
        `eos_id`. `topk=1` is greedy; ties go to the lowest id.
      return_all_decodes: all N decodes of a row, not the likeliest alone.
      num_decodes: N, independent decodes per row.
      prompt_with_targets: predictions begin with the row's decoder inputs up to the
        first 0 (after the start token) or end token.

    Returns:
      Decodes int32 [B, T], or [B, N, T] in the order of increasing scores, and
      `{'scores': float32 [B] or [B, N]}`: the sum over the emitted tokens, the end
      token included and the prompt not, of the target's log-probabilities; those
      of the law that was sampled from, or of the network's softmax if
      `rescale_log_probs` is False.

    Raises:
      ValueError: a parameter that is unknown or not supported.
    """
    defaults = getattr(self._model, '_default_decoder_params', None)
    if return_all_decodes is None:
      return_all_decodes = getattr(defaults, 'return_all_decodes', False)
    if num_decodes is None:
      num_decodes = getattr(defaults, 'num_decodes', 1)
    options = {**SAMPLING, **self._decoder_params, **(decoder_params or {})}
    _check_decoder_params(options)
    if rng is not None and options.get('decode_rng') is not None:
      raise ValueError("rng beside decoder_params['decode_rng']; give one of the two")
    key = options.get('decode_rng') if rng is None else rng
    eos_id = options.get('eos_id', self._model.output_vocabulary.eos_id or 1)

    inputs_BE = jnp.asarray(batch['encoder_input_tokens'], jnp.int32)
    given_BT = jnp.asarray(batch['decoder_input_tokens'], jnp.int32)
    num_rows, num_tokens = given_BT.shape
    prompt_BP = given_BT[:, 1:]
    if prompt_with_targets:
      is_end_BP = prompt_BP == self._model.output_vocabulary.eos_id
      prompt_BP = jnp.where(is_end_BP, 0, prompt_BP)
    else:
      prompt_BP = jnp.zeros_like(prompt_BP[:, :0])

    repeat = functools.partial(jnp.repeat, repeats=num_decodes, axis=0)
    target = t5_model(self._config)
    params = Params(flax.core.unfreeze(params), self._draft_params)
    state = loop.decode(
      params,
      repeat(inputs_BE),
      row_keys(key, num_rows * num_decodes),
      _sampling(options, num_rows, num_decodes, num_tokens),
      target=target,
      drafter=self._drafter,
      verifier=self._verifier,
      warp=self._warp,
      max_len=num_tokens + 1,
      eos_id=int(eos_id),
      prompt_BP=repeat(prompt_BP),
    )
    decodes_RT = state.tokens_BS[:, 1 : num_tokens + 1]
    if options['rescale_log_probs']:
      score_R = jnp.sum(state.trace.logp_BS, axis=1)
    else:
      score_R = _unscaled_scores(target, params, state, repeat(prompt_BP), num_tokens)

    score_BN = score_R.reshape(num_rows, num_decodes)
    order_BN = jnp.argsort(score_BN, axis=1)
    score_BN = jnp.take_along_axis(score_BN, order_BN, axis=1)
    decodes_BNT = jnp.take_along_axis(
      decodes_RT.reshape(num_rows, num_decodes, num_tokens), order_BN[..., None], axis=1
    )
    if return_all_decodes:
      return decodes_BNT, {'scores': score_BN}
    return decodes_BNT[:, -1], {'scores': score_BN[:, -1]}


def t5_config(module: Any) -> T5Config:
  """The configuration of a `t5x.examples.t5.network.Transformer`.

  Raises:
    ValueError: the module is another network.
  """
  network: Any = getattr(module, 'config', None)
  missing = [name for name in _NETWORK if not hasattr(network, name)]
  if missing or getattr(module, 'scan_layers', False):
    reason = f'it lacks {", ".join(missing)}' if missing else 'it scans its layers'
    raise ValueError(
      f'model: its module {type(module).__name__} is no t5x.examples.t5 Transformer '
      f'({reason}); give a model of that network'
    )
  return T5Config(
    **{name: getattr(network, name) for name in _NETWORK},
    mlp_activations=tuple(network.mlp_activations),
    logits_via_embedding=bool(network.logits_via_embedding),
    dtype=jnp.dtype(network.dtype).name,
  )


def row_keys(key: jax.Array | None, num_rows: int) -> jax.Array:
  """A threefry key per row from T5X's one key, of any implementation, typed or raw."""
  if key is None:
    key = jax.random.key(0, impl='threefry2x32')
  bits = jax.random.bits(key, (2,), jnp.uint32)
  key = jax.random.wrap_key_data(bits, impl='threefry2x32')
  return jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(num_rows))


def _check_decoder_params(options: Mapping[str, Any]) -> None:
  known = [*SAMPLING, 'decode_rng', 'eos_id']
  for name, value in options.items():
    if name in ('state_callback_fn', 'logit_callback_fn', 'initial_index'):
      if value is not None:
        raise ValueError(
          f'decoder_params: {name} is not supported by speculative decoding; leave it '
          'out, or use the T5X model itself'
        )
    elif name not in known:
      raise ValueError(f'decoder_params: {name!r} is unknown; {suggest(name, known)}')
  topk, topp = (options.get(name, SAMPLING[name]) for name in ('topk', 'topp'))
  if _is_number(topk) and _is_number(topp) and topk and topp:
    raise ValueError(
      f'decoder_params: topk {topk} beside topp {topp}; set one of them to 0'
    )


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float)


def _sampling(
  options: Mapping[str, Any], num_rows: int, num_decodes: int, num_tokens: int
) -> Sampling:
  """T5X's parameters as ours, a row for each decode."""
  steps, limit = options['max_decode_steps'], options['max_decode_steps_hard_limit']
  if steps is not None and limit is not None and limit > 0:
    steps = jnp.minimum(steps, limit)
  if _is_number(steps) and steps > num_tokens:
    raise ValueError(
      f'decoder_params: max_decode_steps {steps} is more than the {num_tokens} '
      'decoder_input_tokens; give at most that, or longer targets'
    )
  temperature = jnp.asarray(options['temperature'], jnp.float32)
  temperature = jnp.broadcast_to(temperature, (num_rows,)).repeat(num_decodes)
  topk, topp = options['topk'], jnp.asarray(options['topp'], jnp.float32)
  greedy = temperature <= MIN_TEMPERATURE
  if _is_number(topk) and topk == 1:
    greedy = jnp.ones_like(greedy)
  return make_sampling(
    num_rows * num_decodes,
    temperature=jnp.where(greedy, 0.0, temperature),
    top_k=topk,
    top_p=jnp.where(topp > 0, topp, 1.0),
    max_new_tokens=num_tokens if steps is None else steps,
  )


@functools.partial(jax.jit, static_argnames=('target', 'num_tokens'))
def _unscaled_scores(target, params, state, prompt_BP, num_tokens):
  """Log-probabilities under the network's own softmax: one teacher-forced pass."""
  fed_BT = state.tokens_BS[:, :num_tokens]
  emitted_BT = state.tokens_BS[:, 1 : num_tokens + 1]
  start_B = jnp.zeros_like(state.length_B)
  output, _ = target.extend(params.target, state.cache, fed_BT, start_B)
  logp_BTV = jax.nn.log_softmax(output.logits_BTV, axis=-1)
  logp_BT = jnp.take_along_axis(logp_BTV, emitted_BT[..., None], axis=-1)[..., 0]
  slot_1T = jnp.arange(1, num_tokens + 1)[None]
  is_new_BT = slot_1T > prompt.lengths(prompt_BP)[:, None]
  is_new_BT &= slot_1T < state.length_B[:, None]
  return jnp.sum(jnp.where(is_new_BT, logp_BT, 0.0), axis=1)
