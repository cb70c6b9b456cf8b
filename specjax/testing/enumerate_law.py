"""The exact law of the loop's output, without sampling.

Enumerates, for every emitted prefix, all drafts, all numbers of accepted tokens
and all next tokens, weighted by `core.verify.verify_law` (the arithmetic that
the compiled loop draws from), and composes rounds by dynamic programming over
prefixes. Under `jax.enable_x64(True)` the result agrees with the product of the
target's laws to rounding, if the rule is exact.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core import types, verify

Law = dict[tuple[int, ...], float]
Conditional = Callable[[tuple[int, ...]], np.ndarray]
Rounds = tuple[tuple[int, int], ...]


def target_law(
  target: Conditional, vocab_size: int, num_tokens: int, eos_id: int | None = None
) -> Law:
  """P(y) = prod_t p(y_t | y_<t) for every output of nonzero probability.

  Args:
    target: emitted tokens (a tuple) -> law of the next one, [V].
    vocab_size: V.
    num_tokens: the budget; outputs are this long or end with `eos_id`.
    eos_id: ends an output; None: all outputs have `num_tokens` tokens.

  Returns:
    Output -> probability.

  Raises:
    ValueError: a law has another shape, or is not a probability law.
  """
  done: Law = {}
  live: Law = {(): 1.0}
  for step in range(num_tokens):
    grown: Law = {}
    for prefix, mass in live.items():
      law_V = _checked_law('target', target(prefix), vocab_size, prefix)
      for token in np.flatnonzero(law_V):
        output = (*prefix, int(token))
        is_done = token == eos_id or step == num_tokens - 1
        (done if is_done else grown)[output] = mass * float(law_V[token])
    live = grown
  return done


def loop_law(
  rule: types.Rule,
  target: Conditional,
  draft: Conditional,
  *,
  vocab_size: int,
  num_draft: int,
  num_tokens: int,
  eos_id: int | None = None,
  count: Callable[[tuple[int, ...]], int] | None = None,
  order: int | None = None,
  drawn: Conditional | None = None,
) -> Law:
  """The law of the speculative loop's output under a rule.

  A round from prefix y, with drafts x_1..x_G of law prod_i q(x_i | y x_<i),
  emits x_1..x_n and t with probability P(n | x) P(t | n, x), cut after the first
  EOS and at the budget; sum over all x, n, t and all sequences of rounds.

  Args:
    rule: a verification rule; the arithmetic is done in float64 if x64 is
      enabled, else in float32.
    target: emitted tokens (a tuple) -> law of the next one, [V].
    draft: the same for the draft.
    vocab_size: V.
    num_draft: G.
    num_tokens: the budget.
    eos_id: ends an output; None: there is no EOS.
    count: emitted tokens at the start of a round -> number of drafts that are
      proposed, in [0, G]; None: always G.
    order: the laws depend on the last `order` tokens only, which saves work;
      None: on all.
    drawn: the law that drafts are really drawn from, if `draft` is only what the
      drafter says: the fault that biases without a trace.

  Returns:
    Output -> probability, for outputs of nonzero probability.

  Raises:
    ValueError: a law has another shape or is not a probability law, a count is
      out of range, or the rule's laws do not sum to 1.
  """

  @functools.cache
  def round_law(context, num_proposed):
    return _round_law(
      rule, target, draft, drawn or draft, vocab_size, num_draft, num_proposed, context
    )

  @functools.cache
  def cut_law(context, num_proposed, room):
    """A round's blocks, cut at EOS and at the budget, so that equals merge early."""
    merged: Law = {}
    for block, mass in round_law(context, num_proposed).items():
      if eos_id in block:
        block = block[: block.index(eos_id) + 1]
      block = block[:room]
      merged[block] = merged.get(block, 0.0) + mass
    return merged

  done: Law = {}
  # Rounds emit at least one token, so all mass of a prefix has arrived when the
  # shorter ones are done.
  live: list[Law] = [{} for _ in range(num_tokens)]
  live[0][()] = 1.0
  for length in range(num_tokens):
    for prefix, mass in live[length].items():
      num_proposed = num_draft if count is None else int(count(prefix))
      context = prefix if order is None else prefix[max(length - order, 0) :]
      room = min(num_tokens - length, num_draft + 1)
      for block, probability in cut_law(context, num_proposed, room).items():
        output = (*prefix, *block)
        ended = len(output) == num_tokens or output[-1] == eos_id
        into = done if ended else live[len(output)]
        into[output] = into.get(output, 0.0) + mass * probability
  return done


def adaptive_law(
  rule: types.Rule,
  target: Conditional,
  draft: Conditional,
  *,
  vocab_size: int,
  num_tokens: int,
  choose: Callable[[Rounds], int],
  round_law: Callable[..., Law] | None = None,
) -> Law:
  """The law of the output when gamma is chosen anew before each round.

  Args:
    rule: as for `loop_law`, as are the arguments not named here.
    choose: (gamma, number accepted) of each round so far -> the next gamma >= 0.
    round_law: `(prefix, rounds, gamma)` -> the law of the block that the round emits,
      for choices that are no function of the past; None: a round of the rule.

  Returns:
    Output of `num_tokens` tokens -> probability; there is no EOS.
  """

  def ordinary(prefix: tuple[int, ...], rounds: Rounds, gamma: int) -> Law:
    del rounds
    most = max(gamma, 1)
    return _round_law(rule, target, draft, draft, vocab_size, most, gamma, prefix)

  if round_law is None:
    # The law of a round needs not know how its prefix came about.
    by_prefix = functools.cache(functools.partial(ordinary, rounds=()))

    def round_law(prefix, rounds, gamma):
      return by_prefix(prefix, gamma=gamma)

  done: Law = {}
  live: list[dict[tuple[tuple[int, ...], Rounds], float]] = [
    {} for _ in range(num_tokens)
  ]
  live[0][(), ()] = 1.0
  for length in range(num_tokens):
    for (prefix, rounds), mass in live[length].items():
      gamma = choose(rounds)
      for block, probability in round_law(prefix, rounds, gamma).items():
        output = (*prefix, *block)[:num_tokens]
        if len(output) == num_tokens:
          done[output] = done.get(output, 0.0) + mass * probability
          continue
        path = (output, (*rounds, (gamma, len(block) - 1)))
        into = live[len(output)]
        into[path] = into.get(path, 0.0) + mass * probability
  return done


def expected_accepted(law_of_block: Law) -> float:
  """Mean number of accepted drafts of a round, from `block_law`."""
  return sum((len(block) - 1) * mass for block, mass in law_of_block.items())


def block_law(
  rule: types.Rule,
  target: Conditional,
  draft: Conditional,
  *,
  vocab_size: int,
  num_draft: int,
  prefix: tuple[int, ...] = (),
) -> Law:
  """The law of the block of 1..G+1 tokens that one round emits after `prefix`.

  Arguments and errors are those of `loop_law`.
  """
  return _round_law(
    rule, target, draft, draft, vocab_size, num_draft, num_draft, tuple(prefix)
  )


def max_difference(law: Law, other: Law) -> float:
  """max_y |law(y) - other(y)| over all outputs of either."""
  outputs = law.keys() | other.keys()
  return max(abs(law.get(y, 0.0) - other.get(y, 0.0)) for y in outputs)


def _round_law(
  rule, target, draft, drawn, vocab_size, num_draft, num_proposed, prefix
) -> Law:
  tokens_BG, logq_BGV, logp_BG1V, mass_B = _all_drafts(
    target, draft, drawn, vocab_size, num_draft, prefix
  )
  if not 0 <= num_proposed <= num_draft:
    raise ValueError(f'count: {num_proposed} after {prefix}: not in [0, {num_draft}]')
  proposal = types.Draft(
    jnp.asarray(tokens_BG, jnp.int32),
    jnp.asarray(logq_BGV),
    jnp.full(len(tokens_BG), num_proposed, jnp.int32),
  )
  num_law_BG1, next_law_BG1V = map(
    np.asarray, _verify_law(rule, jnp.asarray(logp_BG1V), proposal)
  )
  tolerance = 1e-9 if num_law_BG1.dtype == np.float64 else 1e-4
  for name, total in (('num', num_law_BG1), ('next', next_law_BG1V)):
    if not np.allclose(total.sum(axis=-1), 1.0, rtol=0.0, atol=tolerance):
      raise ValueError(f"the rule's {name} law does not sum to 1 after {prefix}")
  joint_BG1V = mass_B[:, None, None] * num_law_BG1[..., None] * next_law_BG1V
  law: Law = {}
  for n in range(num_proposed + 1):
    # Drafts after the n accepted ones are summed out.
    shape = (vocab_size**n, vocab_size ** (num_draft - n), vocab_size)
    mass_AV = joint_BG1V[:, n].reshape(shape).sum(axis=1)
    for accepted, next_token in zip(*np.nonzero(mass_AV), strict=True):
      head = tokens_BG[accepted * shape[1], :n]
      block = (*map(int, head), int(next_token))
      law[block] = law.get(block, 0.0) + float(mass_AV[accepted, next_token])
  return law


@functools.partial(jax.jit, static_argnums=0)
def _verify_law(rule, logp_BG1V, proposal):
  return verify.verify_law(rule, logp_BG1V, proposal)


def _all_drafts(target, draft, drawn, vocab_size, num_draft, prefix):
  """All V^G drafts in lexicographic order, their laws and probabilities."""
  shape_B = (vocab_size,) * num_draft
  tokens_BG = np.array(list(np.ndindex(*shape_B)), np.int32).reshape(-1, num_draft)
  q_BGV = np.zeros((*shape_B, num_draft, vocab_size))
  p_BG1V = np.zeros((*shape_B, num_draft + 1, vocab_size))
  drawn_BGV = np.zeros_like(q_BGV)
  for i in range(num_draft + 1):
    for head in itertools.product(range(vocab_size), repeat=i):
      context = (*prefix, *head)
      here: tuple[Any, ...] = (*head, ..., i, slice(None))
      p_BG1V[here] = _checked_law('target', target(context), vocab_size, context)
      if i < num_draft:
        q_BGV[here] = _checked_law('draft', draft(context), vocab_size, context)
        drawn_BGV[here] = _checked_law('drawn', drawn(context), vocab_size, context)
  q_BGV = q_BGV.reshape(-1, num_draft, vocab_size)
  p_BG1V = p_BG1V.reshape(-1, num_draft + 1, vocab_size)
  drawn_BGV = drawn_BGV.reshape(q_BGV.shape)
  drawn_BG = np.take_along_axis(drawn_BGV, tokens_BG[..., None], axis=-1)[..., 0]
  # A draft that can not be drawn carries no mass but may make the rule's
  # arithmetic undefined; the laws of its first id of nonzero q stand in for it.
  tokens_BG = np.where(drawn_BG > 0, tokens_BG, q_BGV.argmax(axis=-1))
  with np.errstate(divide='ignore'):
    return tokens_BG, np.log(q_BGV), np.log(p_BG1V), drawn_BG.prod(axis=1)


def _checked_law(name, law_V, vocab_size, context) -> np.ndarray:
  law_V = np.asarray(law_V, np.float64)
  if law_V.shape != (vocab_size,):
    raise ValueError(
      f'{name}{context} has shape {law_V.shape}: must be ({vocab_size},)'
    )
  if not (law_V >= 0).all() or abs(law_V.sum() - 1.0) > 1e-9:
    raise ValueError(f'{name}{context} = {law_V}: must be >= 0 and sum to 1')
  return law_V
