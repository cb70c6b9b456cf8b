"""Prompts: text that is already emitted when the loop starts.

Both caches are filled with it by one `extend` each, which is what I1 and I10 of
the loop's contract ask for; from there on nothing is special.

  slot            0      1      2      3
  row 0           <s>    Die    Zelle                 prompt of 2, length = 3
  row 1           <s>    Das                          prompt of 1, length = 2
  fed to both     <s>    Die                          the last token is pending
                  <s>    Das                          (slot 1 is fed again)
"""

import jax
import jax.numpy as jnp

from specjax import shapes
from specjax.core.types import DecodeState, Drafter, Model, Params, Sampling


def lengths(prompt_BP: shapes.Tokens_BP) -> shapes.Int_B:
  """int32 [B]; the number of tokens before each prompt's first pad (0)."""
  return jnp.sum(jnp.cumprod(prompt_BP != 0, axis=1, dtype=jnp.int32), axis=1)


def enter(
  params: Params,
  state: DecodeState,
  sampling: Sampling,
  prompt_BP: shapes.Tokens_BP,
  *,
  target: Model,
  drafter: Drafter,
  max_len: int,
) -> tuple[DecodeState, Sampling]:
  """Puts prompts behind the start tokens of a state that has emitted nothing.

  Args:
    params: parameters of the target and of the drafter.
    state: from `loop.start`.
    sampling: per-row options, which count new tokens from the prompt's end.
    prompt_BP: int32, 0 <= P < max_len; a row's prompt ends before its first 0, and
      may be empty.
    target: the model whose law is preserved.
    drafter: proposes tokens.
    max_len: most tokens per row, the start token and the prompt included.

  Returns:
    The state, and the options with new tokens counted from the start token, as
    the loop does. A prompt that leaves no room makes its row done.

  Raises:
    ValueError: P >= max_len.
  """
  num_prompt = prompt_BP.shape[1]
  if num_prompt >= max_len:
    raise ValueError(
      f'prompt: {num_prompt} tokens, but max_len {max_len} holds the start token and '
      f'{max_len - 1}; cut the prompt or raise max_len'
    )
  num_B = lengths(prompt_BP)
  sampling = sampling._replace(
    min_new_tokens_B=sampling.min_new_tokens_B + num_B,
    max_new_tokens_B=sampling.max_new_tokens_B + num_B,
  )
  prompt_BP = jnp.where(jnp.arange(num_prompt)[None] < num_B[:, None], prompt_BP, 0)
  tokens_BS = state.tokens_BS.at[:, 1 : num_prompt + 1].set(prompt_BP)
  length_B = state.length_B + num_B
  cache, draft_state = state.cache, state.draft_state
  # What shorter prompts leave in the slots behind them is overwritten before it is
  # read, as after any rejection.
  fed_BP = tokens_BS[:, :num_prompt]
  start_B = jnp.zeros_like(num_B)
  if num_prompt:
    with jax.named_scope('prefill'):
      _, cache = target.extend(params.target, cache, fed_BP, start_B)
      draft_state = drafter.prefill(params.draft, draft_state, fed_BP)
  state = DecodeState(
    tokens_BS=tokens_BS,
    length_B=length_B,
    done_B=jnp.minimum(sampling.max_new_tokens_B, max_len - 1) < length_B,
    cache=cache,
    draft_state=draft_state,
    trace=state.trace,
    step=state.step,
  )
  return state, sampling
