"""Table 5: alpha under lenience, which is lossy; `python -m experiments.table5`.

LOSSY: with lenience l < 1 the output no longer has the target's law; no token is
likelier than p(x) / l, and nothing more is promised (appendix A.5). Only here, and
only with `--lossy_lenience`, is anything of the kind reachable; without it the exact
l = 1 alone is measured.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from experiments import common
from specjax.config import SamplingConfig, SpeculationConfig
from specjax.core import types, verify
from specjax.core.warp import make_warp
from specjax.eval import theory, variants

# T5-small, EnDe, T = 1: lenience -> (alpha, speedup as printed), c = 0.015.
PAPER = {1.0: (0.62, 2.5), 0.5: (0.71, 3.1), 0.3: (0.76, 3.6), 0.1: (0.84, 5.0)}
PAPER_C, PAPER_TASK = 0.015, 'ende'


@functools.cache
def lossy_verifier(lenience: float) -> verify.Verifier:
  """Algorithm 1 with l q for q, in the ratio and in the residual. Lossy for l < 1."""

  def verifier(accept_key_B, resample_key_B, draft, logp_BG1V):
    scaled = draft._replace(logq_BGV=draft.logq_BGV + math.log(lenience))
    return verify.token_verifier(accept_key_B, resample_key_B, scaled, logp_BG1V)

  return verifier


@functools.partial(jax.jit, static_argnames=('target', 'draft', 'warp'))
def _laws(params, inputs_BE, tokens_BS, sampling, *, target, draft, warp):
  num_slots = tokens_BS.shape[1]
  start_B = jnp.zeros(tokens_BS.shape[0], jnp.int32)
  slot_BS = jnp.broadcast_to(jnp.arange(1, num_slots + 1)[None], tokens_BS.shape)

  def law(model, model_params):
    cache = model.init(model_params, inputs_BE, num_slots=num_slots)
    output, _ = model.extend(model_params, cache, tokens_BS, start_B)
    return jnp.exp(warp(output.logits_BTV, sampling, slot_BS))

  return law(target, params.target), law(draft, params.draft)


def measure(pair, task, sources, leniences, gamma: int) -> list[dict]:
  """One record for each lenience, at T = 1."""
  sampling = SamplingConfig(temperature=1.0)
  plain = common.prepare(pair, sources, sampling, SpeculationConfig('none'), 16)
  outputs = plain.generations(pair)
  inputs_BE, tokens_BS, length_B, rows = common.prefixes(
    pair, sources, outputs, sampling
  )
  with pair.precision():
    p_BSV, q_BSV = _laws(
      types.Params(pair.params.target, pair.params.draft),
      inputs_BE,
      tokens_BS,
      rows,
      target=pair.target,
      draft=pair.draft,
      warp=make_warp(pair.vocabulary.size, pair.eos_id, ()),
    )
  judged_BS = jnp.arange(tokens_BS.shape[1])[None] < length_B[:, None] - 1
  p_NV, q_NV = p_BSV[judged_BS], q_BSV[judged_BS]
  records = []
  for lenience in leniences:
    alpha = float(jnp.minimum(p_NV / lenience, q_NV).sum(-1).mean())
    distance = 0.0
    for p_V, q_V in zip(np.asarray(p_NV), np.asarray(q_NV), strict=True):
      law_V = variants.lenient_law(p_V, q_V, lenience)
      distance += abs(law_V - p_V).sum() / 2 / len(p_NV)
    lenient = common.prepare(
      pair,
      sources,
      sampling,
      SpeculationConfig('draft_model', gamma),
      16,
      verifier=verify.token_verifier if lenience == 1 else lossy_verifier(lenience),
    )
    tokens, error = common.tokens_per_call(lenient.generations(pair))
    paper = PAPER if task == PAPER_TASK else {}
    alpha_paper, speed_paper = paper.get(lenience, (None, None))
    formula = None
    if alpha_paper is not None:
      best = theory.optimal_gamma(alpha_paper, PAPER_C)
      formula = round(theory.speedup(alpha_paper, best, PAPER_C), 2)
    records.append(
      {
        'task': task,
        'lossy_lenience': lenience,
        'law': 'exact' if lenience == 1.0 else 'LOSSY',
        'alpha': round(alpha, 3),
        'tv_from_target': round(distance, 3),
        'tokens_eq1': round(theory.expected_tokens(min(alpha, 1.0), gamma), 2),
        'tokens': round(tokens, 2),
        'standard_error': round(error, 2),
        'alpha_paper': alpha_paper,
        'speed_paper': speed_paper,
        'speed_paper_formula': formula,
      }
    )
  return records


def draw(records: list[dict], folder) -> None:
  plt = common.plots()
  figure, both = plt.subplots(1, 2, figsize=(8.4, 3.4), sharex=True)
  figure.suptitle('LOSSY for l < 1: outputs do not have the target law')
  tasks = list(dict.fromkeys(each['task'] for each in records))
  for task, style in zip(tasks, common.STYLES, strict=False):
    points = [each for each in records if each['task'] == task]
    leniences = [each['lossy_lenience'] for each in points]
    both[0].plot(leniences, [e['alpha'] for e in points], **style, label=task)
    both[1].plot(leniences, [e['tv_from_target'] for e in points], **style)
  both[0].plot(
    list(PAPER), [alpha for alpha, _ in PAPER.values()], **common.STYLES[-2],
    label='paper: T5-small, EnDe',
  )  # fmt: skip
  both[0].set(ylim=(0, 1), ylabel=r'$\alpha_l$', title='accepted')
  both[1].set(ylim=(0, None), ylabel='total variation', title='distance of a token law')
  both[0].set_xlim(1.05, 0)
  both[0].legend(loc='lower right', fontsize=8)
  for axes in both:
    axes.set_xlabel('lenience l (1 is exact)')
  figure.tight_layout()
  common.save_figure(figure, folder, 'table5_lossy')


def main(argv: list[str] | None = None) -> None:
  parser = common.pair_parser('table5', __doc__, count=16, gamma=7)
  parser.add_argument(
    '--lossy_lenience',
    type=float,
    nargs='+',
    default=[1.0],
    metavar='L',
    help='in (0, 1]; below 1 the output does not have the target law',
  )
  options = common.parse(parser, argv, count=1, gamma=2, lossy_lenience=(1.0, 0.5))
  for lenience in options.lossy_lenience:
    if not 0 < lenience <= 1:
      raise ValueError(f'lossy_lenience: {lenience:g}; give numbers in (0, 1]')
  subject = common.load_subject(options.config, options.count, draft=True)
  records = []
  for task, sources in subject.sources.items():
    records += measure(
      subject.pair, task, sources, options.lossy_lenience, options.gamma
    )
  common.write_records(options.output, records)
  if min(options.lossy_lenience) < 1:
    draw(records, options.output)
  common.print_table(records, 'LOSSY where lossy_lenience < 1')
  if options.lossy_lenience == [1.0]:
    print('Exact only. LOSSY rows: --lossy_lenience 1 0.5 0.3 0.1')


if __name__ == '__main__':
  common.run(main)
