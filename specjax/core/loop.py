"""The loop: draft, verify, commit, in one compiled `lax.while_loop`.

Leviathan, Kalman, Matias 2023, Algorithm 1 (arXiv 2211.17192), for batches of
encoder-decoder rows that each have their own position, seed and options.

A round of one row with G = 3, slots from left to right:

  slot            0      1      2      3      4      5      6
  emitted         <s>    Die    Zelle                            length = 3
  target cache    <s>    Die                                     slots 0..1
  fed to target                 Zelle  wird   rot    .           start = 2
  logits judge                         wird   rot    .     bonus
  verdict                              yes    no                 num_accepted = 1
  commit                               wird   grün               length = 5
  next round feeds                            grün   ...         start = 4

'rot' was rejected: the cache keeps its key and value in slot 4 until the next
round overwrites them, and no query before that attends to slot 4. Rolling back
is nothing at all.

The contract, tested one by one in tests/core/test_contract.py:

I1  On entry `tokens[:, :length]` are emitted, target slots 0..length-2 hold
    them, and the token at length-1 is pending.
I2  `extend` is fed [pending, draft_1..draft_G] at start = length-1; logits[:, 0]
    judges draft_1, logits[:, G] is the bonus law.
I3  Each step emits 1..G+1 tokens per live row.
I4  Buffers have max_len + G + 1 slots; surplus writes are dropped, never clamped.
I5  A done row emits nothing and changes nothing, and nothing of it is read by
    others (its caches may hold finite garbage).
I6  `Draft.logq` is the law that the token was drawn from, after warping.
I7  Whether token i is verified may depend only on tokens before i: counts are
    fixed before drafting and capped by the budget alone.
I8  Stale slots hold finite garbage only.
I9  EOS inside an accepted block ends the row there; whether a row stops by EOS
    or by its budget is decided by what comes first in the text.
I10 The draft's cache never lags: the first draft step of a round feeds the last
    two emitted tokens.
"""

import enum
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from specjax import shapes
from specjax.core import prompt, rng
from specjax.core.types import (
  DecodeState,
  Draft,
  Drafter,
  History,
  Model,
  Params,
  PyTree,
  Sampling,
  Trace,
  Verdict,
)
from specjax.core.verify import Verifier
from specjax.core.warp import Warp

BlockKeysOf = Callable[..., rng.BlockKeys]

START_ID = 0  # T5 starts its decoder with the pad id.
PAD_ID = 0

_STATIC_STEP = (
  'target', 'drafter', 'verifier', 'warp', 'max_len', 'eos_id', 'block_keys'
)  # fmt: skip


class Source(enum.IntEnum):
  """Where an emitted token came from: the codes of `Trace.source_BS`."""

  NONE = 0
  ACCEPTED = 1  # drafted, and accepted by the target
  CORRECTION = 2  # drawn from the residual after a rejection
  BONUS = 3  # drawn from the target after every draft was accepted
  PLAIN = 4  # nothing was proposed: an ordinary decoding step


def start(
  params: Params,
  inputs_BE: shapes.Tokens_BE,
  sampling: Sampling,
  *,
  target: Model,
  drafter: Drafter,
  max_len: int,
) -> DecodeState:
  """The state before the first round: encoders run, the start token pending."""
  num_rows = inputs_BE.shape[0]
  num_draft = drafter.num_draft
  num_slots = max_len + num_draft + 1
  zeros_BS = jnp.zeros((num_rows, num_slots), jnp.int32)
  zeros_BG = jnp.zeros((num_rows, num_draft), jnp.int32)
  with jax.named_scope('encode'):
    cache = target.init(params.target, inputs_BE, num_slots=num_slots)
    draft_state = drafter.init(params.draft, inputs_BE, num_slots=num_slots)
  return DecodeState(
    tokens_BS=zeros_BS.at[:, 0].set(START_ID),
    length_B=jnp.ones(num_rows, jnp.int32),
    done_B=sampling.max_new_tokens_B <= 0,
    cache=cache,
    draft_state=draft_state,
    trace=Trace(
      rounds_B=jnp.zeros(num_rows, jnp.int32),
      drafted_BG=zeros_BG,
      accepted_BG=zeros_BG,
      source_BS=zeros_BS,
      round_BS=zeros_BS,
      logp_BS=jnp.zeros((num_rows, num_slots), jnp.float32),
    ),
    step=jnp.int32(0),
  )


def remaining_budget(state: DecodeState, sampling: Sampling, max_len: int):
  """int32 [B]; new tokens that each row may still emit."""
  budget_B = jnp.minimum(sampling.max_new_tokens_B, max_len - 1)
  return budget_B - (state.length_B - 1)


def step(
  params: Params,
  state: DecodeState,
  row_key_B: shapes.RowKeys,
  sampling: Sampling,
  *,
  target: Model,
  drafter: Drafter,
  verifier: Verifier,
  warp: Warp,
  max_len: int,
  eos_id: int,
  block_keys: BlockKeysOf = rng.block_keys,
) -> DecodeState:
  """One round: draft G tokens, verify them in one target pass, commit."""
  keys = block_keys(row_key_B, state.length_B)
  history = History(state.tokens_BS, state.length_B, sampling)
  with jax.named_scope('draft'):
    draft, draft_state = drafter.propose(
      params.draft, state.draft_state, keys.draft_B, history
    )
    # Every round emits one token beyond the accepted ones, so a draft longer than
    # the budget less one is never useful. The past alone decides this (I7).
    cap_B = jnp.minimum(
      sampling.num_draft_B, remaining_budget(state, sampling, max_len) - 1
    )
    count_B = jnp.where(state.done_B, 0, jnp.clip(draft.count_B, 0, cap_B))
    draft = Draft(draft.tokens_BG, draft.logq_BGV, count_B)

  with jax.named_scope('verify'):
    start_B = state.length_B - 1
    pending_B1 = jnp.take_along_axis(state.tokens_BS, start_B[:, None], axis=1)
    fed_BG1 = jnp.concatenate([pending_B1, draft.tokens_BG], axis=1)
    output, cache = target.extend(params.target, state.cache, fed_BG1, start_B)
    slot_BG1 = start_B[:, None] + 1 + jnp.arange(fed_BG1.shape[1])[None]
    logp_BG1V = warp(output.logits_BTV, sampling, slot_BG1)
    verdict = verifier(keys.accept_B, keys.resample_B, draft, logp_BG1V)
    draft_state = drafter.advance(params.draft, draft_state, draft, verdict, output)

  with jax.named_scope('commit'):
    return commit(
      state,
      draft,
      verdict,
      logp_BG1V,
      cache,
      draft_state,
      remaining_B=remaining_budget(state, sampling, max_len),
      eos_id=eos_id,
    )


def commit(
  state: DecodeState,
  draft: Draft,
  verdict: Verdict,
  logp_BG1V: shapes.LogLaw_BG1V,
  cache: PyTree,
  draft_state: PyTree,
  *,
  remaining_B: shapes.Int_B,
  eos_id: int,
) -> DecodeState:
  """Writes a round's tokens: the only place where tokens are emitted.

  Accepted drafts and the next token, cut after the first EOS and at the budget;
  done rows stay as they are.
  """
  num_draft = draft.tokens_BG.shape[1]
  position_1G1 = jnp.arange(num_draft + 1)[None]
  num_B1 = verdict.num_accepted_B[:, None]
  token_BG1 = jnp.where(
    position_1G1 < num_B1,
    jnp.pad(draft.tokens_BG, ((0, 0), (0, 1))),
    verdict.next_token_B[:, None],
  )
  is_eos_BG1 = (token_BG1 == eos_id) & (position_1G1 <= num_B1)
  to_eos_B = jnp.where(
    jnp.any(is_eos_BG1, axis=1), jnp.argmax(is_eos_BG1, axis=1) + 1, num_draft + 1
  )
  emitted_B = jnp.minimum(verdict.num_accepted_B + 1, to_eos_B)
  emitted_B = jnp.where(state.done_B, 0, jnp.minimum(emitted_B, remaining_B))
  emitted_B1 = emitted_B[:, None]
  ended_B = jnp.any(is_eos_BG1 & (position_1G1 < emitted_B1), axis=1)

  next_source_B1 = jnp.where(
    draft.count_B[:, None] == 0,
    int(Source.PLAIN),
    jnp.where(num_B1 < draft.count_B[:, None], int(Source.CORRECTION), Source.BONUS),
  )
  source_BG1 = jnp.where(position_1G1 < num_B1, int(Source.ACCEPTED), next_source_B1)
  logp_BG1 = jnp.take_along_axis(logp_BG1V, token_BG1[..., None], axis=-1)[..., 0]
  live_B = ~state.done_B
  rounds_B = state.trace.rounds_B + live_B.astype(jnp.int32)

  # A gather rather than a scatter: slot s takes entry s - length of the block.
  offset_BS = jnp.arange(state.tokens_BS.shape[1])[None] - state.length_B[:, None]
  written_BS = (offset_BS >= 0) & (offset_BS < emitted_B1)
  entry_BS = jnp.clip(offset_BS, 0, num_draft)

  def write(old_BS, new_BG1):
    new_BS = jnp.take_along_axis(new_BG1, entry_BS, axis=1)
    return jnp.where(written_BS, new_BS.astype(old_BS.dtype), old_BS)

  position_1G = position_1G1[:, :num_draft]
  accepted_BG = position_1G < jnp.minimum(num_B1, emitted_B1)
  drafted_BG = (position_1G < draft.count_B[:, None]) & live_B[:, None]

  def count(old_BG, new_BG):
    # The trace may be of a longer draft (`core.rounds`).
    return old_BG + jnp.pad(new_BG, ((0, 0), (0, old_BG.shape[1] - num_draft)))

  return DecodeState(
    tokens_BS=write(state.tokens_BS, token_BG1),
    length_B=state.length_B + emitted_B,
    done_B=state.done_B | ended_B | (emitted_B >= remaining_B),
    cache=cache,
    draft_state=draft_state,
    trace=Trace(
      rounds_B=rounds_B,
      drafted_BG=count(state.trace.drafted_BG, drafted_BG),
      accepted_BG=count(state.trace.accepted_BG, accepted_BG),
      source_BS=write(state.trace.source_BS, source_BG1),
      round_BS=write(
        state.trace.round_BS, jnp.broadcast_to(rounds_B[:, None], token_BG1.shape)
      ),
      logp_BS=write(state.trace.logp_BS, logp_BG1),
    ),
    step=state.step + 1,
  )


@functools.partial(jax.jit, static_argnames=(*_STATIC_STEP, 'while_loop'))
def decode(
  params: Params,
  inputs_BE: shapes.Tokens_BE,
  row_key_B: shapes.RowKeys,
  sampling: Sampling,
  *,
  target: Model,
  drafter: Drafter,
  verifier: Verifier,
  warp: Warp,
  max_len: int,
  eos_id: int,
  block_keys: BlockKeysOf = rng.block_keys,
  prompt_BP: shapes.Tokens_BP | None = None,
  while_loop: Callable = jax.lax.while_loop,
) -> DecodeState:
  """Decodes every row; the output law is exactly the warped target's.

  Keyword arguments but the prompt are static: build functions once and reuse them,
  and new texts, keys and options never recompile.

  Args:
    params: parameters of the target and of the drafter.
    inputs_BE: int32 source ids, 0 is padding.
    row_key_B: typed threefry keys, one per row (`rng.row_keys`); consumed.
    sampling: per-row options.
    target: the model whose law is preserved.
    drafter: proposes tokens.
    verifier: `verify.token_verifier` or `verify.block_verifier`.
    warp: `warp.make_warp(...)`; the target's logits -> log-law.
    max_len: most tokens per row, the start token included.
    eos_id: ends a row; -1 for none.
    block_keys: `(row_key_B, length_B) -> BlockKeys`, the streams of a round;
      `coupling` passes others.
    prompt_BP: int32; each output starts with its row's tokens, up to the first 0,
      as if they had been emitted (`core.prompt`). None: with no tokens.
    while_loop: `lax.while_loop`, or a Python loop (then call
      `decode.__wrapped__`, which is not jitted).

  Returns:
    The final state: `tokens_BS[:, 1:length]` is the output, EOS included.

  Raises:
    TypeError: keys that are not typed threefry keys.
    ValueError: max_len < 2, or no room for the prompt.
  """
  rng.check_keys(row_key_B)
  if max_len < 2:
    raise ValueError(f'max_len: {max_len}; at least 2 are needed (start and a token)')
  state = start(
    params, inputs_BE, sampling, target=target, drafter=drafter, max_len=max_len
  )
  if prompt_BP is not None:
    state, sampling = prompt.enter(
      params,
      state,
      sampling,
      prompt_BP,
      target=target,
      drafter=drafter,
      max_len=max_len,
    )

  def body(state: DecodeState) -> DecodeState:
    return step(
      params,
      state,
      row_key_B,
      sampling,
      target=target,
      drafter=drafter,
      verifier=verifier,
      warp=warp,
      max_len=max_len,
      eos_id=eos_id,
      block_keys=block_keys,
    )

  return while_loop(lambda state: ~jnp.all(state.done_B), body, state)


_start = jax.jit(start, static_argnames=('target', 'drafter', 'max_len'))
_step = jax.jit(step, static_argnames=_STATIC_STEP)


def stream(
  params: Params,
  inputs_BE: shapes.Tokens_BE,
  row_key_B: shapes.RowKeys,
  sampling: Sampling,
  *,
  target: Model,
  drafter: Drafter,
  verifier: Verifier,
  warp: Warp,
  max_len: int,
  eos_id: int,
  block_keys: BlockKeysOf = rng.block_keys,
) -> Iterator[DecodeState]:
  """Yields the state after each round: the very step that `decode` loops over.

  Arguments and errors are those of `decode`. The final state equals `decode`'s.
  """
  rng.check_keys(row_key_B)
  state = _start(
    params, inputs_BE, sampling, target=target, drafter=drafter, max_len=max_len
  )
  while not bool(jnp.all(state.done_B)):
    state = _step(
      params,
      state,
      row_key_B,
      sampling,
      target=target,
      drafter=drafter,
      verifier=verifier,
      warp=warp,
      max_len=max_len,
      eos_id=eos_id,
      block_keys=block_keys,
    )
    yield state
