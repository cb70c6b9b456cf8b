"""What the steps of the loop cost, timed the way the loop runs them.

A step is timed by iterating it inside one compiled loop that carries its caches,
each iteration depending on the one before: no dispatch per step, nothing for the
compiler to hoist. docs/metrics.md says what belongs to which step.
"""

import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import shapes
from specjax.core import autoregressive, loop, rng
from specjax.core.types import (
  Draft,
  Drafter,
  History,
  Model,
  Params,
  Sampling,
  Verdict,
)
from specjax.core.verify import Verifier
from specjax.core.warp import Warp
from specjax.eval.interleave import (
  Clock,
  Overhead,
  Samples,
  StepTimes,
  added,
  interleave,
  ratio,
)

_STATIC = ('target', 'drafter', 'verifier', 'warp', 'max_len')
_start = jax.jit(loop.start, static_argnames=('target', 'drafter', 'max_len'))
_init = jax.jit(
  lambda init, params, inputs_BE, num_slots: init(
    params, inputs_BE, num_slots=num_slots
  ),
  static_argnums=(0, 3),
)


@functools.partial(jax.jit, static_argnames=_STATIC)
def _run_rounds(
  params, state, row_key_B, sampling, *, target, drafter, verifier, warp, max_len
):
  """`loop.decode` less the encoders; no EOS, so that it always runs to the end."""

  def body(state):
    return loop.step(
      params,
      state,
      row_key_B,
      sampling,
      target=target,
      drafter=drafter,
      verifier=verifier,
      warp=warp,
      max_len=max_len,
      eos_id=-1,
    )

  return jax.lax.while_loop(lambda state: ~jnp.all(state.done_B), body, state)


@functools.partial(jax.jit, static_argnames=('drafter',))
def _run_proposals(draft_params, carry, key_NB, length_N, sampling, *, drafter):
  """Proposal after proposal, each continuing the one before."""

  def body(carry, x):
    draft_state, tokens_BS, _ = carry
    key_B, length = x
    length_B = jnp.broadcast_to(length, tokens_BS.shape[:1])
    history = History(tokens_BS, length_B, sampling)
    draft, draft_state = drafter.propose(draft_params, draft_state, key_B, history)
    tokens_BS = jax.lax.dynamic_update_slice(tokens_BS, draft.tokens_BG, (0, length))
    return (draft_state, tokens_BS, draft), None

  return jax.lax.scan(body, carry, (key_NB, length_N))[0]


@functools.partial(jax.jit, static_argnames=('target', 'drafter', 'verifier', 'warp'))
def _run_bare(
  params, carry, key_3NB, length_N, sampling, *, target, drafter, verifier, warp
):
  """Propose, extend, warp, verify, and nothing else: no caps, no keys, no commit."""

  def body(carry, x):
    draft_state, tokens_BS, cache, _, verdict = carry
    (draft_key_B, accept_key_B, resample_key_B), length = x
    length_B = jnp.broadcast_to(length, tokens_BS.shape[:1])
    history = History(tokens_BS, length_B, sampling)
    draft, draft_state = drafter.propose(
      params.draft, draft_state, draft_key_B, history
    )
    tokens_BS = jax.lax.dynamic_update_slice(tokens_BS, draft.tokens_BG, (0, length))
    fed_BG1 = jnp.concatenate([verdict.next_token_B[:, None], draft.tokens_BG], axis=1)
    output, cache = target.extend(params.target, cache, fed_BG1, length_B - 1)
    slot_BG1 = length_B[:, None] + jnp.arange(fed_BG1.shape[1])[None]
    logp_BG1V = warp(output.logits_BTV, sampling, slot_BG1)
    verdict = verifier(accept_key_B, resample_key_B, draft, logp_BG1V)
    return (draft_state, tokens_BS, cache, draft, verdict), None

  return jax.lax.scan(body, carry, (key_3NB, length_N))[0]


@functools.cache
def _replay(num_draft: int) -> Drafter:
  """Proposes `Params.draft`, a `Draft`, again and again, at no cost."""

  def propose(draft, state, key_B, history):
    del key_B, history
    return jax.lax.optimization_barrier(draft), state

  def advance(params, state, draft, verdict, output):
    del params, draft, verdict, output
    return state

  return Drafter(
    num_draft, lambda params, inputs_BE, *, num_slots: (), propose, advance
  )


class _Bench(NamedTuple):
  """What the timed loops have in common; each method makes (run, iterations)."""

  params: Params
  inputs_BE: Any
  row_key_B: Any
  sampling: Sampling
  target: Model
  verifier: Verifier
  warp: Warp
  max_len: int

  def start(self, drafter: Drafter, params: Params):
    return _start(
      params,
      self.inputs_BE,
      self.sampling,
      target=self.target,
      drafter=drafter,
      max_len=self.max_len,
    )

  def encode(self, init, params, num_draft: int):
    num_slots = self.max_len + num_draft + 1
    return functools.partial(_init, init, params, self.inputs_BE, num_slots), 1

  def rounds(self, drafter: Drafter, draft_params: Any):
    """Rounds of the loop itself."""
    params = Params(self.params.target, draft_params)
    run = functools.partial(
      _run_rounds,
      params,
      self.start(drafter, params),
      self.row_key_B,
      self.sampling,
      target=self.target,
      drafter=drafter,
      verifier=self.verifier,
      warp=self.warp,
      max_len=self.max_len,
    )
    return run, int(run().step)

  def given_draft(self, num_draft: int) -> Draft:
    """Some full block of drafts with a uniform law; what it holds costs nothing."""
    state = self.start(autoregressive.no_draft, Params(self.params.target))
    output, _ = jax.eval_shape(
      self.target.extend,
      self.params.target,
      state.cache,
      state.tokens_BS[:, :1],
      state.length_B - 1,
    )
    num_rows, _, num_ids = output.logits_BTV.shape
    return Draft(
      jnp.ones((num_rows, num_draft), jnp.int32),
      jnp.full((num_rows, num_draft, num_ids), -np.log(num_ids), jnp.float32),
      jnp.full(num_rows, num_draft, jnp.int32),
    )

  def verify_steps(self, num_draft: int):
    return self.rounds(_replay(num_draft), self.given_draft(num_draft))

  def blocks(self, num_draft: int):
    """(keys [N, B], lengths [N]) for blocks that follow each other."""
    count = self.max_len - 1
    split = functools.partial(jax.random.split, num=count)
    length_N = 1 + (np.arange(count, dtype=np.int32) * num_draft) % count
    return jax.vmap(split, out_axes=1)(self.row_key_B), jnp.asarray(length_N)

  def proposals(self, drafter: Drafter):
    """The drafter alone."""
    key_NB, length_N = self.blocks(drafter.num_draft)
    state = self.start(drafter, self.params)
    carry = (state.draft_state, state.tokens_BS, self.given_draft(drafter.num_draft))
    run = functools.partial(
      _run_proposals,
      self.params.draft,
      carry,
      key_NB,
      length_N,
      self.sampling,
      drafter=drafter,
    )
    return run, len(length_N)

  def bare(self, drafter: Drafter, draft_params: Any):
    """Rounds without the loop's own work."""
    params = Params(self.params.target, draft_params)
    key_NB, length_N = self.blocks(drafter.num_draft)
    state = self.start(drafter, params)
    draft = self.given_draft(drafter.num_draft)
    verdict = Verdict(draft.count_B, draft.tokens_BG[:, 0])
    run = functools.partial(
      _run_bare,
      params,
      (state.draft_state, state.tokens_BS, state.cache, draft, verdict),
      (key_NB, key_NB[::-1], jnp.roll(key_NB, 1, axis=0)),
      length_N,
      self.sampling,
      target=self.target,
      drafter=drafter,
      verifier=self.verifier,
      warp=self.warp,
    )
    return run, len(length_N)


def _bench(
  params, inputs_BE, sampling, num_draft, row_key_B, target, verifier, warp, max_len
) -> _Bench:
  if num_draft < 1:
    raise ValueError(
      f'num_draft: {num_draft}; a round without drafts is a plain step, give a'
      ' drafter that proposes at least 1 token'
    )
  num_rows = inputs_BE.shape[0]
  if row_key_B is None:
    row_key_B = rng.row_keys(0, jnp.arange(num_rows))
  sampling = sampling._replace(  # every row runs to the end
    max_new_tokens_B=jnp.full(num_rows, max_len - 1, jnp.int32),
    num_draft_B=jnp.full(num_rows, num_draft, jnp.int32),
  )
  return _Bench(params, inputs_BE, row_key_B, sampling, target, verifier, warp, max_len)


def _per_iteration(loops, repeats: int, clock: Clock) -> dict[str, Samples]:
  warm, _ = interleave({name: run for name, (run, _) in loops.items()}, repeats, clock)
  return {
    name: Samples(tuple(value / loops[name][1] for value in samples.values))
    for name, samples in warm.items()
  }


def measure_steps(
  params: Params,
  inputs_BE: shapes.Tokens_BE,
  sampling: Sampling,
  *,
  target: Model,
  drafter: Drafter,
  verifier: Verifier,
  warp: Warp,
  max_len: int,
  row_key_B: Any = None,
  repeats: int = 5,
  clock: Clock = time.perf_counter,
) -> StepTimes:
  """Times the steps of plain and of speculative decoding.

  Rows run to `max_len - 1` new tokens, whatever EOS and their budgets say: a
  step costs the same whatever is decoded.

  Args:
    params: parameters of the pair.
    inputs_BE: int32 source ids, 0 is padding; the batch that is timed.
    sampling: temperature and filters are part of a step's cost.
    target: as for `loop.decode`.
    drafter: proposes gamma >= 1 tokens.
    verifier: as for `loop.decode`.
    warp: as for `loop.decode`.
    max_len: most tokens per row, the start token included.
    row_key_B: typed keys; None for those of seed 0.
    repeats: turns, >= 1.
    clock: returns seconds; replace it in tests.

  Raises:
    ValueError: a drafter without drafts, or repeats < 1.
  """
  gamma = drafter.num_draft
  bench = _bench(
    params, inputs_BE, sampling, gamma, row_key_B, target, verifier, warp, max_len
  )
  loops = {
    'target_step': bench.rounds(autoregressive.no_draft, None),
    'verify_step': bench.verify_steps(gamma),
    'proposal': bench.proposals(drafter),
    'round': bench.rounds(drafter, params.draft),
    'target_encode': bench.encode(target.init, params.target, gamma),
    'draft_encode': bench.encode(drafter.init, params.draft, gamma),
  }
  return StepTimes(gamma, **_per_iteration(loops, repeats, clock))


def loop_overhead(
  params: Params,
  inputs_BE: shapes.Tokens_BE,
  sampling: Sampling,
  *,
  target: Model,
  drafter: Drafter,
  verifier: Verifier,
  warp: Warp,
  max_len: int,
  row_key_B: Any = None,
  repeats: int = 5,
  clock: Clock = time.perf_counter,
) -> Overhead:
  """Times a round against the same work without the loop; see `Overhead`.

  Stricter than `StepTimes.excess`: verifying is extending by gamma + 1 tokens,
  warping and the verifier; the streams of keys, the caps on the drafts and the
  commit are the loop's own. Arguments are those of `measure_steps`.
  """
  gamma = drafter.num_draft
  bench = _bench(
    params, inputs_BE, sampling, gamma, row_key_B, target, verifier, warp, max_len
  )
  loops = {
    'proposal': bench.proposals(drafter),
    'verify': bench.bare(_replay(gamma), bench.given_draft(gamma)),
    'bare': bench.bare(drafter, params.draft),
    'round': bench.rounds(drafter, params.draft),
  }
  times = _per_iteration(loops, repeats, clock)
  alone = added(times['proposal'], times['verify'])
  return Overhead(
    ratio(times['round'], alone),
    ratio(times['round'], times['bare']),
    ratio(times['bare'], alone),
  )


def measure_verify_costs(
  params: Params,
  inputs_BE: shapes.Tokens_BE,
  sampling: Sampling,
  *,
  gammas: Sequence[int],
  target: Model,
  verifier: Verifier,
  warp: Warp,
  max_len: int,
  repeats: int = 5,
  clock: Clock = time.perf_counter,
) -> tuple[float, ...]:
  """v(0), v(1), .. v(max(gammas)): measured at `gammas`, straight lines between.

  What `theory.optimal_gamma` needs to choose gamma on this machine. Needs no
  drafter; one compilation for each gamma. Other arguments as `measure_steps`.

  Args:
    gammas: integers >= 1.
  """
  if not gammas:
    raise ValueError('gammas: []; give at least one')
  bench = _bench(
    params, inputs_BE, sampling, min(gammas), None, target, verifier, warp, max_len
  )
  loops = {str(gamma): _with_cap(bench, gamma).verify_steps(gamma) for gamma in gammas}
  loops['0'] = bench.rounds(autoregressive.no_draft, None)
  times = _per_iteration(loops, repeats, clock)
  known = sorted({0, *gammas})
  v = [ratio(times[str(gamma)], times['0']).median for gamma in known]
  return tuple(np.interp(np.arange(known[-1] + 1), known, v).tolist())


def _with_cap(bench: _Bench, num_draft: int) -> _Bench:
  cap_B = jnp.full_like(bench.sampling.num_draft_B, num_draft)
  return bench._replace(sampling=bench.sampling._replace(num_draft_B=cap_B))
