"""The embedded pair: sampled text against plain sampling of the same target.

Its law can not be enumerated. Equality under shared noise is the sharp test; a
two-sample test with independent noise says less, but of the shipped rules. It
compares the first three tokens and the log p of gamma + 2 tokens, at a temperature
where drafts are often rejected. Which mutants it sees is the last test here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import specjax
from specjax.config import SpeculationConfig
from specjax.core import coupling, loop, rng, verify, warp
from specjax.drafters import model_draft
from specjax.testing import mutants

pytestmark = pytest.mark.usefixtures('optimised')  # what users run is sampled

LEVEL = 1e-6
TEXTS = (
  'ende: Click the button.',
  'ende: Enter the name of the file.',
  'ende: The dialog is open.',
  'ende: Select all cells of the table.',
)
NUM_DRAFT = 4
OPTIONS = {'temperature': 1.5, 'top_k': 8, 'max_new_tokens': NUM_DRAFT + 2}
CLEAN = mutants.Setup(None, None, verify.token_verifier)
MUTANTS = {
  mutant.name: mutant.mutate(CLEAN).verifier
  for mutant in mutants.MUTANTS
  if mutant.name
  in (
    'accept always',
    'bonus from the last q',
    'bonus from the law before',
    'correction drawn from p',
    'no stop at the first rejection',
    'one coin for all positions',
    'rejected token kept',
    'residual |p - q|',
    'lenience 0.9',
    'block rule, residual without its weight',
  )
}
SURVIVORS = {'lenience 0.9', 'block rule, residual without its weight'}
UNWARPED = 'drafts of the top 8, full law recorded'
RULES = ('token', 'block')
VERIFIERS = {'token': verify.token_verifier, 'block': verify.block_verifier, **MUTANTS}


@functools.cache
def pair():
  return specjax.load_pair()


def arguments(texts, seed, method, **options):
  """What `loop.decode` takes: positional and static arguments."""
  ids = pair().encode(texts)
  longest = max(map(len, ids))
  inputs_BE = np.array([row + [0] * (longest - len(row)) for row in ids], np.int32)
  params, static = pair().decoder(
    SpeculationConfig(method, NUM_DRAFT, 'block'),
    max_new_tokens=options['max_new_tokens'],
  )
  key_B = rng.row_keys(seed, jnp.arange(len(texts)))
  sampling = warp.make_sampling(len(texts), **options)
  return (params, jnp.asarray(inputs_BE), key_B, sampling), static


def test_sampled_text_is_plain_decoding_s_under_shared_noise():
  options = {'temperature': 1.0, 'max_new_tokens': 24}
  args, static = arguments(TEXTS * 4, 0, 'none', **options)
  expected = loop.decode(*args, **static)
  args, static = arguments(TEXTS * 4, 0, 'draft_model', **options)
  static |= {
    'drafter': model_draft(
      pair().draft, static['warp'], NUM_DRAFT, keys=coupling.slot_keys
    ),
    'verifier': coupling.gumbel_verifier,
    'block_keys': coupling.slot_block_keys(NUM_DRAFT),
  }
  state = loop.decode(*args, **static)
  np.testing.assert_array_equal(state.length_B, expected.length_B)
  np.testing.assert_array_equal(state.tokens_BS[:, :25], expected.tokens_BS[:, :25])
  # Sampled: the same source gives different texts; drafts are accepted.
  assert len(np.unique(np.asarray(state.tokens_BS)[::4], axis=0)) > 1
  accepted = np.asarray(state.trace.accepted_BG).sum()
  drafted = np.asarray(state.trace.drafted_BG).sum()
  assert accepted > 0.2 * drafted > 0


def plain_samples(num_rows):
  args, static = arguments(TEXTS[3:] * num_rows, 2, 'none', **OPTIONS)
  return jax.device_get(loop.decode(*args, **static))


@functools.partial(jax.jit, static_argnames=('drafter', 'names'))
def _decode(index, args, names, drafter=None):
  _, static = arguments(TEXTS[3:], 0, 'draft_model', **OPTIONS)

  def verifier(*verifier_args):
    verifiers = [VERIFIERS[name] for name in names]
    return jax.lax.switch(index, verifiers, *verifier_args)

  static |= {'verifier': verifier, 'drafter': drafter or static['drafter']}
  return loop.decode.__wrapped__(*args, **static)


def speculative_samples(name, num_rows, drafter=None):
  """By one compiled program for both rules, and one for all mutants."""
  args, _ = arguments(TEXTS[3:] * num_rows, 1, 'draft_model', **OPTIONS)
  names = tuple(MUTANTS if name in MUTANTS else RULES)
  return jax.device_get(_decode(names.index(name), args, names, drafter))


def unwarped_draft():
  """A drafter that says that it drew from all ids."""
  _, static = arguments(TEXTS[3:], 0, 'draft_model', **OPTIONS)

  def all_ids(logits_BTV, sampling, slot_BT):
    sampling = sampling._replace(top_k_B=jnp.zeros_like(sampling.top_k_B))
    return static['warp'](logits_BTV, sampling, slot_BT)

  def draw(key_B, logq_BV):
    least_B1 = jax.lax.top_k(logq_BV, OPTIONS['top_k'])[0][:, -1:]
    return rng.categorical(key_B, jnp.where(logq_BV >= least_B1, logq_BV, -jnp.inf))

  return model_draft(pair().draft, all_ids, NUM_DRAFT, draw=draw)


def homogeneity_p_value(ours, theirs, min_count=10):
  """Chi-square; cells of fewer observations are pooled."""
  _, cell = np.unique(np.concatenate([ours, theirs]), return_inverse=True)
  counts = np.stack(
    [np.bincount(half, minlength=cell.max() + 1) for half in np.split(cell, 2)]
  )
  large = counts.sum(axis=0) >= min_count
  rest = counts[:, ~large].sum(axis=1, keepdims=True)
  counts = np.concatenate([counts[:, large], rest], axis=1)
  counts = counts[:, counts.sum(axis=0) > 0]
  assert counts.shape[1] >= 10, 'too few cells: nothing was compared'
  return stats.chi2_contingency(counts).pvalue


def p_values(state, plain):
  """Of the law of the first three tokens, and of that of the log p of a text."""

  def three_tokens(state):
    return state.tokens_BS[:, 1:4].astype(np.int64) @ [10**8, 10**4, 1]

  def log_p(state):  # rounded, since wide and narrow passes differ by 1e-6
    return np.maximum(state.trace.logp_BS, -50.0).sum(axis=1).round(3)

  return (
    homogeneity_p_value(three_tokens(state), three_tokens(plain)),
    stats.ks_2samp(log_p(state), log_p(plain)).pvalue,
  )


@pytest.fixture(scope='module')
def plain():
  return plain_samples(512)


@pytest.mark.parametrize('rule', RULES)
def test_text_has_the_law_of_plain_decoding(plain, rule):
  state = speculative_samples(rule, 512)
  assert min(p_values(state, plain)) > LEVEL
  drafted, accepted = (x.sum() for x in state.trace[1:3])
  assert 0.3 < accepted / drafted < 0.7


@pytest.mark.parametrize('name', ['correction drawn from p', 'bonus from the last q'])
@pytest.mark.slow
def test_mutants_have_another_law(plain, name):
  assert min(p_values(speculative_samples(name, 512), plain)) < LEVEL


@pytest.mark.slow
def test_power_at_1024_samples():
  plain = plain_samples(1024)
  found = {name: p_values(speculative_samples(name, 1024), plain) for name in VERIFIERS}
  state = speculative_samples('token', 1024, unwarped_draft())
  found[UNWARPED] = p_values(state, plain)
  for name, (tokens, log_p) in found.items():
    print(f'{name:40} tokens {np.log10(tokens):7.1f}, log p {np.log10(log_p):7.1f}')
  killed = {name for name, both in found.items() if min(both) < LEVEL}
  assert killed == {*MUTANTS, UNWARPED} - SURVIVORS
