"""The two rules and the loop in rational arithmetic: the oracle of the oracle.

Written from the papers, and apart from `core.verify` on purpose: it shares no
line with the code that it judges. A law that is right here is *equal* to the
target's, without a tolerance.
"""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np

Law = dict[tuple[int, ...], Fraction]
Conditional = Callable[[tuple[int, ...]], Sequence[Fraction]]
# (p of G + 1 positions, q of G positions, G drafts) -> (n, P(n), law of the next).
Rule = Callable[..., Iterator[tuple[int, Fraction, Sequence[Fraction]]]]

ZERO, ONE = Fraction(0), Fraction(1)


def token_rule(p_G1V, q_GV, tokens_G):
  """Algorithm 1 of Leviathan et al. 2023: yields (n, P(n), law of the next)."""
  reached = ONE
  for n, token in enumerate(tokens_G):
    accept = min(ONE, p_G1V[n][token] / q_GV[n][token])
    if accept < 1:
      yield n, reached * (1 - accept), _normalised(_excess(ONE, p_G1V[n], q_GV[n]))
    reached *= accept
    if not reached:
      return
  yield len(tokens_G), reached, p_G1V[-1]


def block_rule(p_G1V, q_GV, tokens_G):
  """Algorithm 2 of Sun et al. 2024: yields (n, P(n), law of the next)."""
  num_draft = len(tokens_G)
  weights = [ONE]
  for i, token in enumerate(tokens_G):
    weights.append(min(ONE, weights[-1] * p_G1V[i][token] / q_GV[i][token]))
  later = ONE  # probability that every coin after position n fails
  for n in range(num_draft, -1, -1):
    if n == num_draft:
      success, law = weights[n], p_G1V[n]
    else:
      law = _excess(weights[n], p_G1V[n], q_GV[n])
      mass = sum(law)
      total = mass + 1 - weights[n]
      success = ONE if n == 0 or total == 0 else mass / total
    if success and later:
      yield n, success * later, law if n == num_draft else _normalised(law)
    later *= 1 - success


def _excess(weight, p_V, q_V):
  return [max(weight * p - q, ZERO) for p, q in zip(p_V, q_V, strict=True)]


def _normalised(law_V):
  total = sum(law_V)
  if total == 0:
    raise ValueError('a residual without mass is reached with positive probability')
  return [mass / total for mass in law_V]


def block_law(
  rule: Rule,
  target: Conditional,
  draft: Conditional,
  num_draft: int,
  prefix: tuple[int, ...] = (),
) -> Law:
  """The law of the block of 1..G+1 tokens that one round emits after `prefix`."""
  law: Law = {}

  def descend(tokens, mass, q_GV):
    context = (*prefix, *tokens)
    if len(tokens) < num_draft:
      q_V = checked('draft', draft(context), context)
      for token, share in enumerate(q_V):
        if share:
          descend((*tokens, token), mass * share, [*q_GV, q_V])
      return
    p_G1V = [
      checked('target', target((*prefix, *tokens[:i])), tokens[:i])
      for i in range(num_draft + 1)
    ]
    for n, probability, next_law in rule(p_G1V, q_GV, tokens):
      for token, share in enumerate(next_law):
        if share:
          block = (*tokens[:n], token)
          law[block] = law.get(block, ZERO) + mass * probability * share

  descend((), ONE, [])
  return law


def loop_law(
  rule: Rule,
  target: Conditional,
  draft: Conditional,
  *,
  num_draft: int,
  num_tokens: int,
  eos_id: int | None = None,
  count: Callable[[tuple[int, ...]], int] | None = None,
  order: int | None = None,
) -> Law:
  """The law of the loop's output: rounds follow each other until EOS or budget.

  Args: as for `enumerate_law.loop_law`, with laws as sequences of `Fraction`; a
    round of `count` drafts is a round of a drafter with G = count.

  Raises:
    ValueError: a law has negative entries or does not sum to exactly 1.
  """

  @functools.cache
  def cut_law(context, num_proposed, room):
    """A round's blocks, cut at EOS and at the budget, so that equals merge early."""
    merged: Law = {}
    blocks = block_law(rule, target, draft, num_proposed, context)
    for block, mass in blocks.items():
      if eos_id in block:
        block = block[: block.index(eos_id) + 1]
      block = block[:room]
      merged[block] = merged.get(block, ZERO) + mass
    return merged

  done: Law = {}
  live: list[Law] = [{} for _ in range(num_tokens)]
  live[0][()] = ONE
  for length in range(num_tokens):
    for prefix, mass in live[length].items():
      num_proposed = num_draft if count is None else count(prefix)
      context = prefix if order is None else prefix[max(length - order, 0) :]
      room = min(num_tokens - length, num_draft + 1)
      for block, share in cut_law(context, num_proposed, room).items():
        output = (*prefix, *block)
        ended = len(output) == num_tokens or output[-1] == eos_id
        into = done if ended else live[len(output)]
        into[output] = into.get(output, ZERO) + mass * share
  return done


def target_law(target: Conditional, num_tokens: int, eos_id: int | None = None) -> Law:
  """P(y) = prod_t p(y_t | y_<t) for every output of nonzero probability."""
  done: Law = {}
  live: Law = {(): ONE}
  for step in range(num_tokens):
    grown: Law = {}
    for prefix, mass in live.items():
      for token, share in enumerate(checked('target', target(prefix), prefix)):
        if share:
          ended = token == eos_id or step == num_tokens - 1
          (done if ended else grown)[(*prefix, token)] = mass * share
    live = grown
  return done


def expected_accepted(law_of_block: Law) -> Fraction:
  """Mean number of accepted drafts of a round, from `block_law`."""
  return sum(((len(y) - 1) * mass for y, mass in law_of_block.items()), ZERO)


def max_difference(law, other) -> float:
  """max_y |law(y) - other(y)|; either law may be of floats."""
  outputs = law.keys() | other.keys()
  return max(abs(float(law.get(y, 0)) - float(other.get(y, 0))) for y in outputs)


def random_law(seed: str, vocab_size: int, zeros: int = 0) -> list[Fraction]:
  """Random weights of 1..60, `zeros` of them 0, normalised."""
  source = random.Random(seed)
  weights = [source.randint(1, 60) for _ in range(vocab_size)]
  for token in source.sample(range(vocab_size), zeros):
    weights[token] = 0
  return [Fraction(weight, sum(weights)) for weight in weights]


def random_conditional(
  seed: int | str, vocab_size: int, order: int = 1, zeros: int = 0
) -> Conditional:
  """Random laws that depend on the last `order` tokens."""

  @functools.cache
  def law(context):
    return random_law(f'{seed} {context}', vocab_size, zeros)

  return lambda prefix: law(tuple(prefix[max(len(prefix) - order, 0) :]))


def as_float(conditional: Conditional):
  """The same laws as float64 arrays, for `enumerate_law`."""
  return lambda prefix: np.array([float(mass) for mass in conditional(prefix)])


def checked(name: str, law_V: Sequence[Fraction], context) -> Sequence[Fraction]:
  """The law itself, if it is one.

  Raises:
    ValueError: negative entries, or a sum that is not exactly 1.
  """
  if min(law_V) < 0 or sum(law_V) != 1:
    total = sum(law_V)
    raise ValueError(f'{name}{context}: must be >= 0 and sum to 1, sums to {total}')
  return law_V
