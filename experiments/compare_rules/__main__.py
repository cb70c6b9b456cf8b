"""Token against block verification; `python -m experiments.compare_rules`.

Tokens per target call of both rules on the same texts and seeds. Both are exact;
block verification (Sun et al. 2024, arXiv 2403.10444) is never worse in expectation
and equal where nothing is random (T = 0) and at gamma = 1.
"""

import math

from experiments import common
from specjax.config import RULES, SamplingConfig, SpeculationConfig

GAMMAS = (1, 4, 8)
TEMPERATURES = (0.0, 0.5, 1.0)


def measure(pair, sources, seeds: int, gammas=GAMMAS) -> list[dict]:
  """One record for each gamma and temperature, all tasks together."""
  records = []
  for gamma in gammas:
    for temperature in TEMPERATURES:
      found = {}
      for rule in RULES:
        speculation = SpeculationConfig('draft_model', gamma, rule)
        outputs = []
        for seed in range(seeds if temperature else 1):
          sampling = SamplingConfig(temperature=temperature, seed=seed)
          run = common.prepare(pair, sources, sampling, speculation, batch_size=32)
          outputs += run.generations(pair)
        found[rule] = common.tokens_per_call(outputs)
      (token, token_error), (block, block_error) = found['token'], found['block']
      ratio = block / token
      error = ratio * math.hypot(token_error / token, block_error / block)
      records.append(
        {
          'gamma': gamma,
          'T': temperature,
          'token': round(token, 3),
          'block': round(block, 3),
          'gain': round(ratio - 1, 4),
          'standard_error': round(error if temperature else 0.0, 4),
        }
      )
  return records


def draw(records: list[dict], folder) -> None:
  plt = common.plots()
  figure, axes = plt.subplots(figsize=(5.2, 3.4))
  gammas = dict.fromkeys(each['gamma'] for each in records)
  for place, (gamma, style) in enumerate(zip(gammas, common.STYLES, strict=False)):
    points = [each for each in records if each['gamma'] == gamma]
    axes.errorbar(
      [each['T'] + 0.015 * place for each in points],  # bars side by side
      [100 * each['gain'] for each in points],
      [100 * each['standard_error'] for each in points],
      **style,
      capsize=3,
      label=rf'$\gamma={gamma}$',
    )
  axes.axhline(0, color='#606060', linewidth=1)
  axes.set(
    xlabel='temperature',
    ylabel='block / token verification - 1 (%)',
    title='Tokens per target call (bars: standard error)',
  )
  axes.legend(loc='upper left')
  common.save_figure(figure, folder, 'compare_rules')


def main(argv: list[str] | None = None) -> None:
  parser = common.pair_parser('compare_rules', __doc__, count=32, seeds=3)
  parser.add_argument('--gammas', type=int, nargs='+', default=GAMMAS, metavar='INT')
  options = common.parse(parser, argv, count=1, seeds=1, gammas=(2,))
  subject = common.load_subject(options.config, options.count, draft=True)
  sources = [ids for each in subject.sources.values() for ids in each]
  records = measure(subject.pair, sources, options.seeds, options.gammas)
  common.write_records(options.output, records)
  draw(records, options.output)
  common.print_table(records)


if __name__ == '__main__':
  common.run(main)
