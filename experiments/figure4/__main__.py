"""Figure 4: speedup and operations against alpha; `python -m experiments.figure4`.

Free drafts (c = c_hat = 0) and v = 1: Theorems 3.8 and 3.11. Points are the shipped
loop on pairs whose alpha is known exactly.
"""

import numpy as np

from experiments import coins, common
from specjax.eval import theory

GAMMAS = (2, 3, 5, 7, 10)
ALPHAS = (0.5, 0.7, 0.9)


def measure(num_rows: int, num_tokens: int) -> list[dict]:
  """One record for each gamma and alpha."""
  records = []
  for gamma in GAMMAS:
    for alpha in ALPHAS:
      tokens, error = coins.measure_coins(alpha, gamma, num_rows, num_tokens)
      records.append(
        {
          'gamma': gamma,
          'alpha': alpha,
          'speedup_formula': round(float(theory.speedup(alpha, gamma, 0.0)), 3),
          'speedup_measured': round(tokens, 3),
          'standard_error': round(error, 3),
          'operations_formula': round(float(theory.operations(alpha, gamma)), 3),
          'operations_measured': round((gamma + 1) / tokens, 3),
        }
      )
  return records


def draw(records: list[dict], folder) -> None:
  plt = common.plots()
  figure, both = plt.subplots(1, 2, figsize=(8.4, 3.6))
  alphas = np.linspace(0, 1, 201)
  panels = (
    ('speedup', lambda alpha, gamma: theory.speedup(alpha, gamma, 0.0)),
    ('operations', theory.operations),
  )
  for axes, (name, formula) in zip(both, panels, strict=True):
    for gamma, style in zip(GAMMAS, common.STYLES, strict=False):
      axes.plot(alphas, formula(alphas, gamma), **{**style, 'marker': ''})
      points = [each for each in records if each['gamma'] == gamma]
      axes.plot(
        [each['alpha'] for each in points],
        [each[f'{name}_measured'] for each in points],
        **{**style, 'linestyle': ''},
      )
      axes.plot([], [], **style, label=rf'$\gamma={gamma}$')
    axes.set(xlim=(0, 1), ylim=(1, 11), xlabel=r'acceptance rate $\alpha$')
  both[0].set_ylabel('walltime, plain / speculative')
  both[0].set_title('Speedup (Theorem 3.8, c = 0)')
  both[1].set_ylabel('operations, speculative / plain')
  both[1].set_title(r'Arithmetic (Theorem 3.11, $\hat{c}$ = 0)')
  both[0].legend(loc='upper left')
  figure.tight_layout(w_pad=2)
  common.save_figure(figure, folder, 'figure4')


def main(argv: list[str] | None = None) -> None:
  parser = common.parser('figure4', __doc__, rows=64, tokens=256)
  options = common.parse(parser, argv, rows=8, tokens=64)
  records = measure(options.rows, options.tokens)
  common.write_records(options.output, records)
  draw(records, options.output)
  common.print_table(records)


if __name__ == '__main__':
  common.run(main)
