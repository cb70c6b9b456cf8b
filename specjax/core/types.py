"""Central types: NamedTuples of pure functions and arrays (see docs/design.md).

p is the target's law, q the draft's, G the number of drafted tokens (gamma).
Everything here crosses `jit`; the tuples of functions (`Model`, `Drafter`,
`Rule`) are hashable, built once, and static arguments of `jit`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from specjax import shapes

PyTree = Any


class Output(NamedTuple):
  """What `Model.extend` computes for T consecutive tokens.

  Attributes:
    logits_BTV: float32. `logits_BTV[:, t]` is the law of slot `start + t + 1`.
    hidden_BTD: the decoder's last hidden states, for drafters that use them.
  """

  logits_BTV: shapes.Logits_BTV
  hidden_BTD: Any = None


class Model(NamedTuple):
  """A model is two pure functions over an opaque cache.

  Attributes:
    init: `(params, inputs_BE, *, num_slots) -> cache`. Encodes once, projects
      the cross-attention keys and values once, and makes `num_slots` decoder
      slots with finite content. `inputs_BE` is int32, 0 marks padding.
    extend: `(params, cache, tokens_BT, start_B) -> (Output, cache)`. Writes
      slots `[start, start + T)` of each row by overwrite and attends to slots
      `<= start + t` for token t. The cache has no cursor: rolling back is a
      smaller `start`. Callers keep `start + T <= num_slots`.
  """

  init: Callable[..., PyTree]
  extend: Callable[..., tuple[Output, PyTree]]


class Sampling(NamedTuple):
  """Per-row decoding options, all arrays: a new value never recompiles.

  Attributes:
    temperature_B: float32 >= 0; 0 is greedy.
    top_k_B: int32; 0 is off.
    top_p_B: float32 in (0, 1]; 1 is off.
    min_new_tokens_B: int32; EOS has probability 0 before that many tokens.
    max_new_tokens_B: int32 in [1, max_len - 1]; the row's budget, EOS counted.
    num_draft_B: int32 in [0, G]; the row's cap on drafted tokens per round.
  """

  temperature_B: shapes.Float_B
  top_k_B: shapes.Int_B
  top_p_B: shapes.Float_B
  min_new_tokens_B: shapes.Int_B
  max_new_tokens_B: shapes.Int_B
  num_draft_B: shapes.Int_B


class History(NamedTuple):
  """What a drafter may look at: the past and nothing else.

  Attributes:
    tokens_BS: int32; `tokens_BS[:, :length]` are emitted (slot 0 is the start
      token); the rest is undefined.
    length_B: int32 >= 1; the token at `length - 1` is pending.
    sampling: the rows' options.
  """

  tokens_BS: shapes.Tokens_BS
  length_B: shapes.Int_B
  sampling: Sampling


class Draft(NamedTuple):
  """G proposed tokens and the laws that they were drawn from.

  Attributes:
    tokens_BG: int32.
    logq_BGV: float32; the law each token was drawn from, after warping.
    count_B: int32 in [0, G]; only the first `count` tokens were proposed. May
      depend on emitted tokens only, never on the drafted ones (I7).
  """

  tokens_BG: shapes.Tokens_BG
  logq_BGV: shapes.LogLaw_BGV
  count_B: shapes.Int_B


class Acceptance(NamedTuple):
  """A rule's arithmetic: no randomness, so that a test can enumerate it.

  Attributes:
    prob_BG: probability that the coin of position i succeeds; 0 from `count`.
    weight_BG1: after n < count accepted tokens, the next token is drawn from
      `max(weight_n * p_n - q_n, 0)`, normalised; after `count` from p.
  """

  prob_BG: shapes.Float_BG
  weight_BG1: shapes.Float_BG1


class Rule(NamedTuple):
  """A verification rule.

  Attributes:
    acceptance: `(logp_BG1V, draft) -> Acceptance`.
    select: `'first_rejection'` (token-wise: n = successes before the first
      failure) or `'last_acceptance'` (block: n = position of the last success).
  """

  acceptance: Callable[..., Acceptance]
  select: str


class Verdict(NamedTuple):
  """What the verifier decides for each row.

  Attributes:
    num_accepted_B: int32 in [0, count]; excludes the next token.
    next_token_B: int32; the correction (n < count) or bonus (n = count) token.
  """

  num_accepted_B: shapes.Int_B
  next_token_B: shapes.Int_B


def _unchanged(params, state, tokens_BP):
  del params, tokens_BP
  return state


class Drafter(NamedTuple):
  """Proposes tokens; any law is allowed, as long as `Draft.logq` records it.

  Attributes:
    num_draft: G, static.
    init: `(params, inputs_BE, *, num_slots) -> state`.
    propose: `(params, state, key_B, history) -> (Draft, state)`.
    advance: `(params, state, draft, verdict, output) -> state`; called once
      after verification with the target's `Output`. Most drafters return
      `state`.
    prefill: `(params, state, tokens_BP) -> state`; called once before the first
      round if a prompt is given, with slots `[0, P)`: the start token, the
      prompt, and anything after it. For drafters with a cache of tokens (I10).
  """

  num_draft: int
  init: Callable[..., PyTree]
  propose: Callable[..., tuple[Draft, PyTree]]
  advance: Callable[..., PyTree]
  prefill: Callable[..., PyTree] = _unchanged


class Params(NamedTuple):
  """Parameters of a pair; `draft` is whatever the drafter needs, or None."""

  target: PyTree
  draft: PyTree = None


class Trace(NamedTuple):
  """Per-row diagnostics. Written by `commit`, read by nobody in the loop.

  Attributes:
    rounds_B: int32; target calls while the row was live.
    drafted_BG: int32; drafts really proposed at each position of a block.
    accepted_BG: int32; drafts accepted and emitted at each position: what EOS
      or the budget cuts off is not counted.
    source_BS: int32; where each token came from, a code of `loop.Source`.
    round_BS: int32; the row's round (from 1) that emitted the token, 0 none.
    logp_BS: float32; log-probability of each emitted token under the warped
      target; 0 elsewhere.
  """

  rounds_B: shapes.Int_B
  drafted_BG: shapes.Tokens_BG
  accepted_BG: shapes.Tokens_BG
  source_BS: shapes.Tokens_BS
  round_BS: shapes.Tokens_BS
  logp_BS: shapes.Float_BS


class DecodeState(NamedTuple):
  """The loop's carry.

  Attributes:
    tokens_BS: int32; slot 0 is the start token; pads (0) after the end.
    length_B: int32; tokens emitted, the start token included.
    done_B: bool; the row has ended by EOS or by its budget.
    cache: the target's cache.
    draft_state: the drafter's state.
    trace: diagnostics.
    step: int32 scalar; rounds so far.
  """

  tokens_BS: shapes.Tokens_BS
  length_B: shapes.Int_B
  done_B: shapes.Bool_B
  cache: PyTree
  draft_state: PyTree
  trace: Trace
  step: Any
