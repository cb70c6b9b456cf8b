"""What a worker of the experiment measures, section by section.

A section is a function of a `Bench` and of the sections before it that returns
numbers; everything runs on weights drawn on the device. Times are those of compiled
loops over whole outputs, never of single dispatches.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.xxl_one_gpu.pair import (
  Bench,
  Size,
  bytes_per_token,
  num_bytes,
  random_params,
  timed,
)
from specjax.core import autoregressive, loop, rng, verify, warp
from specjax.core.types import Draft, History, Params
from specjax.drafters import model_draft
from specjax.eval import theory
from specjax.models.quantized import int8_model, quantize_int8
from specjax.models.t5 import t5_model
from specjax.testing import suite
from specjax.testing.drafters import constant_draft

ALPHAS = (0.5, 0.7, 0.8, 0.9)
Found = dict[str, dict[str, Any]]


@functools.partial(jax.jit, static_argnames=('drafter', 'rounds'))
def _run_proposals(params, carry, row_key_B, sampling, *, drafter, rounds):
  """The drafter alone, each proposal continuing the one before."""

  def body(index, carry):
    draft_state, tokens_BS, _ = carry
    length = 1 + index * drafter.num_draft % (tokens_BS.shape[1] - drafter.num_draft)
    length_B = jnp.broadcast_to(length, tokens_BS.shape[:1]).astype(jnp.int32)
    history = History(tokens_BS, length_B, sampling)
    draft, draft_state = drafter.propose(params, draft_state, row_key_B, history)
    tokens_BS = jax.lax.dynamic_update_slice(tokens_BS, draft.tokens_BG, (0, length))
    return draft_state, tokens_BS, draft

  return jax.lax.fori_loop(0, rounds, body, carry)


_init = jax.jit(
  lambda model, params, inputs_BE, num_slots: model.init(
    params, inputs_BE, num_slots=num_slots
  ),
  static_argnums=(0, 3),
)


def bandwidth(run: Bench, found: Found) -> dict[str, Any]:
  """Reads and writes arrays of several sizes; bytes both ways, the best counts."""
  del found
  add = jax.jit(lambda x: x + 1, donate_argnums=0)
  rates = {}
  for nbytes in run.size.buffers:
    x = add(jnp.zeros(nbytes // 4, jnp.uint32)).block_until_ready()
    times = []
    for _ in range(run.size.repeats):
      start = time.perf_counter()
      for _ in range(10):
        x = add(x)
      x.block_until_ready()
      times.append((time.perf_counter() - start) / 10)
    rates[str(nbytes)] = 2 * nbytes / min(times)
  return {'bytes_per_second': max(rates.values()), 'by_size': rates}


def build(run: Bench, found: Found) -> dict[str, Any]:
  del found
  run.build()
  target, draft = (num_bytes(params) for params in run.params)
  return {'target_bytes': target, 'draft_bytes': draft}


def plain(run: Bench, found: Found) -> dict[str, Any]:
  """A step of autoregressive decoding, against reading its bytes once."""
  size, params = run.size, run.params.target
  rounds = run.rounds(autoregressive.no_draft)
  fields = timed(functools.partial(rounds, 0.0), size.tokens, size.repeats)
  read = bytes_per_token(size.target, params, run.cache(run.target, params))
  fields['bytes'] = read
  if 'bandwidth' in found:
    fields['floor_ms'] = 1e3 * read / found['bandwidth']['bytes_per_second']
    fields['over_floor'] = fields['ms'] / fields['floor_ms']
  return fields


def draft(run: Bench, found: Found) -> dict[str, Any]:
  """One step of the draft, gamma of which make a proposal."""
  size = run.size
  drafter = model_draft(run.draft, run.warp, size.gamma)
  rounds, num_ids = size.tokens // size.gamma, size.draft.vocab_size
  empty = Draft(
    jnp.zeros((1, size.gamma), jnp.int32),
    jnp.zeros((1, size.gamma, num_ids), jnp.float32),
    jnp.zeros(1, jnp.int32),
  )
  tokens_BS = jnp.zeros((1, size.num_slots), jnp.int32)
  carry = (run.cache(run.draft, run.params.draft), tokens_BS, empty)
  proposals = functools.partial(
    _run_proposals,
    run.params.draft,
    carry,
    run.row_key_B,
    run.sampling,
    drafter=drafter,
    rounds=rounds,
  )
  fields: dict[str, Any] = timed(proposals, rounds * size.gamma, size.repeats)
  return {**fields, 'c': fields['ms'] / found['plain']['ms']}


def verification(gamma: int, run: Bench, found: Found) -> dict[str, Any]:
  """A round whose gamma drafts are given: extend by gamma + 1, warp, verify, commit."""
  drafter = constant_draft(gamma, run.size.target.vocab_size, 0)
  rounds = functools.partial(run.rounds(drafter), 0.0)  # one token a round
  fields = timed(rounds, run.size.tokens, run.size.repeats)
  return {**fields, 'gamma': gamma, 'v': fields['ms'] / found['plain']['ms']}


def whole_loop(run: Bench, found: Found) -> dict[str, Any]:
  """Speculative decoding at given acceptance rates, against the prediction."""
  size, gamma, plain_ms = run.size, run.size.gamma, found['plain']['ms']
  drafter = model_draft(run.draft, run.warp, gamma)
  rounds = run.rounds(drafter, run.cache(run.draft, run.params.draft))
  compile_seconds, by_alpha = 0.0, {}
  for alpha in ALPHAS:
    # Other outputs accept other numbers of drafts: each repeat has a key of its own.
    times, calls = [], []
    first = timed(functools.partial(rounds, alpha), 1, 1)
    compile_seconds = max(compile_seconds, first['compile_seconds'])
    for seed in range(size.repeats):
      key_B = jax.block_until_ready(rng.row_keys(seed, jnp.arange(1)))
      start = time.perf_counter()
      state = jax.block_until_ready(rounds(alpha, key_B))
      times.append(time.perf_counter() - start)
      calls.append(int(state.step))
    ms = 1e3 * sum(times) / (size.repeats * size.tokens)
    tokens_per_call = size.repeats * size.tokens / sum(calls)
    fields = {
      'ms': ms,
      'round_ms': 1e3 * sum(times) / sum(calls),
      'tokens_per_call': tokens_per_call,
      'speedup': plain_ms / ms,
    }
    v = found.get(f'verify_{gamma}', {}).get('v')
    if v and 'draft' in found:
      c = found['draft']['c']
      fields['predicted'] = theory.speedup(alpha, gamma, c, v)
      fields['predicted_from_tokens'] = theory.speedup_of(tokens_per_call, gamma, c, v)
    by_alpha[str(alpha)] = fields
  numbers = {'timing_only': True, 'gamma': gamma, 'alpha': by_alpha}
  return {**numbers, 'compile_seconds': compile_seconds}


def best_gamma(run: Bench, found: Found) -> dict[str, Any]:
  """What c and v promise: the best gamma of each acceptance rate."""
  del run
  v = {part['gamma']: part['v'] for part in found.values() if 'v' in part}
  known = [0, *sorted(v)]
  v_of = np.interp(range(known[-1] + 1), known, [1.0, *(v[g] for g in known[1:])])
  c, by_alpha = found['draft']['c'], {}
  for alpha in ALPHAS:
    gamma = theory.optimal_gamma(alpha, c, v_of)
    predicted = theory.speedup(alpha, gamma, c, v_of)
    by_alpha[str(alpha)] = {'gamma': gamma, 'predicted': predicted}
  return {'alpha': by_alpha}


def encoder(run: Bench, found: Found) -> dict[str, Any]:
  """Encoding a source and projecting its keys and values, once for each text."""
  del found
  fields = {}
  for name, model, params in (
    ('target', run.target, run.params.target),
    ('draft', run.draft, run.params.draft),
  ):
    init = functools.partial(_init, model, params, run.inputs_BE, run.size.num_slots)
    fields |= {f'{name}_{k}': x for k, x in timed(init, 1, run.size.repeats).items()}
  return fields


def tables(run: Bench, found: Found) -> dict[str, Any]:
  """The law of sampled outputs of the compiled loop against the enumerated one."""
  del found
  parts = [suite.main_sample(rule, run.size.samples, 0) for rule in suite.RULES]
  rules = {
    rule: {'p_value': part.p_value, 'tv_bound': part.tv_bound, 'passed': part.passed}
    for rule, part in zip(suite.RULES, parts, strict=True)
  }
  passed = all(part.passed for part in parts)
  return {'samples': run.size.samples, 'passed': passed, 'rules': rules}


def identity(run: Bench, found: Found) -> dict[str, Any]:
  """Greedy outputs in float32, plain and speculative; the draft: the target, shaken."""
  del found
  size, config = run.size, run.size.identity
  target, noise = random_params(config, 0), random_params(config, 1)
  shaken = jax.tree.map(lambda x, y: x + 0.1 * y * (x != 1), target, noise)
  model, num_rows = t5_model(config), 4
  inputs_BE = jax.random.randint(
    jax.random.key(2), (num_rows, min(size.source, 64)), 2, config.vocab_size
  )
  static = {'target': model, 'warp': run.warp, 'max_len': size.tokens + 1, 'eos_id': -1}
  rows = (
    inputs_BE,
    rng.row_keys(0, jnp.arange(num_rows)),
    warp.make_sampling(num_rows),
  )
  with jax.default_matmul_precision('highest'):
    alone = autoregressive.decode(Params(target), *rows, **static)
    drafter = model_draft(model, run.warp, size.gamma)
    verifier = {'drafter': drafter, 'verifier': verify.token_verifier}
    ours = loop.decode(Params(target, shaken), *rows, **verifier, **static)
  tokens = [np.asarray(s.tokens_BS)[:, 1 : size.tokens + 1] for s in (alone, ours)]
  accepted = int(jnp.sum(ours.trace.accepted_BG))
  drafted = int(jnp.sum(ours.trace.drafted_BG))
  return {
    'equal_rows': int((tokens[0] == tokens[1]).all(axis=1).sum()),
    'rows': num_rows,
    'tokens': int(tokens[0].size),
    'accepted': accepted,
    'drafted': drafted,
  }


def int8(run: Bench, found: Found) -> dict[str, Any]:
  """A plain step of the target with int8 weights, through qwix."""
  full = random_params(run.size.target, 0)
  run.params, run.target = Params(quantize_int8(full)), int8_model(run.target)
  del full
  return {**plain(run, found), 'target_bytes': num_bytes(run.params.target)}


def sections(worker: str, size: Size) -> dict[str, Callable]:
  """The sections of a worker by name, the most important first."""
  first, *others = (
    (f'verify_{gamma}', functools.partial(verification, gamma)) for gamma in size.gammas
  )
  loops = {'build': build, 'plain': plain, 'draft': draft}
  if worker == 'main':
    loops = {'bandwidth': bandwidth, **loops, **dict([first])}
    last = {'encoder': encoder, **dict(others), 'best_gamma': best_gamma}
    return {**loops, 'loop': whole_loop, **last}
  if worker == 'exactness':
    return {'tables': tables, 'identity': identity}
  if worker == 'int8':
    return {'int8': int8}
  return {**loops, 'loop': whole_loop}
