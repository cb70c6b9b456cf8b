"""Figure 3: the best gamma against alpha; `python -m experiments.figure3`.

Pure theory: the argmax of Theorem 3.8 for several c, and beside it that for a machine
on which verifying gamma + 1 tokens costs v = 1 + 0.1 gamma steps.
"""

import numpy as np

from experiments import common
from specjax.eval import theory

COSTS = (0.01, 0.02, 0.05, 0.10, 0.20)
# Alphas of the paper's Table 4.
ALPHAS = (0.53, 0.62, 0.65, 0.75, 0.80, 0.90)
SLOPE = 0.1
MAX_GAMMA = 64


def rising_v(gamma: int) -> float:
  return 1 + SLOPE * gamma


def measure() -> list[dict]:
  """One record for each alpha and c."""
  records = []
  for alpha in ALPHAS:
    for c in COSTS:
      gamma = theory.optimal_gamma(alpha, c, max_gamma=MAX_GAMMA)
      rising = theory.optimal_gamma(alpha, c, rising_v, max_gamma=MAX_GAMMA)
      records.append(
        {
          'alpha': alpha,
          'c': c,
          'gamma': gamma,
          'speedup': round(theory.speedup(alpha, gamma, c), 2),
          'oracle_speedup': round(theory.oracle_speedup(alpha, c), 2),
          'gamma_rising_v': rising,
          'speedup_rising_v': round(theory.speedup(alpha, rising, c, rising_v), 2),
        }
      )
  return records


def draw(folder) -> None:
  plt = common.plots()
  figure, both = plt.subplots(1, 2, figsize=(8.4, 3.6), sharey=True)
  alphas = np.linspace(0.01, 0.97, 193)
  titles = ('v = 1 (the paper)', rf'v = 1 + {SLOPE:g} $\gamma$')
  for axes, v, title in zip(both, (1.0, rising_v), titles, strict=True):
    for c, style in zip(COSTS, common.STYLES, strict=False):
      gammas = [theory.optimal_gamma(a, c, v, max_gamma=MAX_GAMMA) for a in alphas]
      axes.plot(alphas, gammas, **style, markevery=24, label=f'c = {c:.2f}')
    axes.set(xlim=(0, 1), ylim=(0, 30), xlabel=r'acceptance rate $\alpha$', title=title)
  both[0].set_ylabel(r'best $\gamma$ (drafted tokens; 0: do not speculate)')
  both[0].legend(loc='upper left')
  common.save_figure(figure, folder, 'figure3')


def main(argv: list[str] | None = None) -> None:
  options = common.parse(common.parser('figure3', __doc__), argv)
  records = measure()
  common.write_records(options.output, records)
  draw(options.output)
  common.print_table(records)


if __name__ == '__main__':
  common.run(main)
