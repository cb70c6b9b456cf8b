"""Table 1: operations and speed, `python -m experiments.table1`.

The paper's figure, the formula's, and that of the shipped loop on a pair whose alpha
is known exactly, all with free drafts (c = c_hat = 0) and v = 1.
"""

from experiments import coins, common
from specjax.eval import theory

# (alpha, gamma, operations, speed), as printed.
PAPER = (
  (0.6, 2, 1.53, 1.96),
  (0.7, 3, 1.58, 2.53),
  (0.8, 2, 1.23, 2.44),
  (0.8, 5, 1.63, 3.69),
  (0.9, 2, 1.11, 2.71),
  (0.9, 10, 1.60, 6.86),
)


def measure(num_rows: int, num_tokens: int) -> list[dict]:
  """One record for each row of the table."""
  records = []
  for alpha, gamma, operations, speed in PAPER:
    tokens, error = coins.measure_coins(alpha, gamma, num_rows, num_tokens)
    records.append(
      {
        'alpha': alpha,
        'gamma': gamma,
        'operations_paper': operations,
        'operations_formula': round(float(theory.operations(alpha, gamma)), 2),
        'operations_measured': round((gamma + 1) / tokens, 3),
        'speed_paper': speed,
        'speed_formula': round(float(theory.speedup(alpha, gamma, 0.0)), 2),
        'speed_measured': round(tokens, 3),
        'standard_error': round(error, 3),
      }
    )
  return records


def main(argv: list[str] | None = None) -> None:
  parser = common.parser('table1', __doc__, rows=64, tokens=512)
  options = common.parse(parser, argv, rows=8, tokens=64)
  records = measure(options.rows, options.tokens)
  common.write_records(options.output, records)
  common.print_table(records)


if __name__ == '__main__':
  common.run(main)
