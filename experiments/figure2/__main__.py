"""Figure 2: tokens per target call against alpha; `python -m experiments.figure2`.

Lines are Eq. 1, points the shipped loop on pairs whose alpha is known exactly.
"""

import numpy as np

from experiments import coins, common
from specjax.eval import theory

GAMMAS = (1, 3, 5, 7, 10)
ALPHAS = (0.2, 0.4, 0.6, 0.8, 0.9)


def measure(num_rows: int, num_tokens: int, gammas=GAMMAS, alphas=ALPHAS) -> list[dict]:
  """One record for each gamma and alpha."""
  records = []
  for gamma in gammas:
    for alpha in alphas:
      tokens, error = coins.measure_coins(alpha, gamma, num_rows, num_tokens)
      records.append(
        {
          'gamma': gamma,
          'alpha': alpha,
          'tokens_formula': round(float(theory.expected_tokens(alpha, gamma)), 3),
          'tokens_measured': round(tokens, 3),
          'standard_error': round(error, 3),
        }
      )
  return records


def draw(records: list[dict], folder) -> None:
  plt = common.plots()
  figure, axes = plt.subplots(figsize=(5.6, 3.8))
  alphas = np.linspace(0, 0.999, 400)
  axes.plot(
    alphas, 1 / (1 - alphas), color='#b0b0b0', linewidth=2.5, label=r'$\gamma=\infty$'
  )
  gammas = sorted({each['gamma'] for each in records}, reverse=True)
  for gamma, style in zip(gammas, common.STYLES, strict=False):
    line = {**style, 'marker': ''}
    axes.plot(alphas, theory.expected_tokens(alphas, gamma), **line)
    points = [each for each in records if each['gamma'] == gamma]
    axes.plot(
      [each['alpha'] for each in points],
      [each['tokens_measured'] for each in points],
      **{**style, 'linestyle': ''},
    )
    axes.plot([], [], **style, label=rf'$\gamma={gamma}$')
  axes.set(
    xlim=(0, 1),
    ylim=(1, 11),
    xlabel=r'acceptance rate $\alpha$',
    ylabel='tokens per target call',
    title='Eq. 1 (lines) and the loop (points)',
  )
  axes.legend(loc='upper left')
  common.save_figure(figure, folder, 'figure2')


def main(argv: list[str] | None = None) -> None:
  parser = common.parser('figure2', __doc__, rows=64, tokens=256)
  options = common.parse(parser, argv, rows=8, tokens=64)
  records = measure(options.rows, options.tokens)
  common.write_records(options.output, records)
  draw(records, options.output)
  common.print_table(records)


if __name__ == '__main__':
  common.run(main)
