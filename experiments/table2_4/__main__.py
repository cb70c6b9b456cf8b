"""Tables 2 and 4: expected and measured speedups; `python -m experiments.table2_4`.

For each task, temperature and gamma: alpha from the target's own text, c and v from
rounds of the loop, the speedup that they promise (EXP) and the measured one (EMP).
What lies between is measured too: EMP = EXP x x_tokens x x_start x (1 + residual),

  x_tokens  tokens per call over Eq. 1: acceptances are not independent, and the end
            of a text cuts the last block
  x_start   encoders, caches and the call, once a text, which no draft makes faster

and residual is split into what the tasks share, for whom c, v and starts were measured
once, and the rest of each.

Texts are decoded one at a time, everything in turns; the host's work is left out.
"""

import math

from experiments import common, rounds
from specjax.config import SamplingConfig, SpeculationConfig
from specjax.eval import theory

GAMMAS = (2, 4, 8)
TEMPERATURES = (0.0, 1.0)
MOST_REPEATS_ALONE = 5
# (task, draft, T, gamma, alpha, c, EXP, EMP) as printed for T5-XXL on one TPU v4.
PAPER = (
  ('EnDe', 'small', 0, 7, 0.75, 0.02, 3.2, 3.4),
  ('EnDe', 'base', 0, 7, 0.80, 0.04, 3.3, 2.8),
  ('EnDe', 'large', 0, 7, 0.82, 0.11, 2.5, 1.7),
  ('EnDe', 'small', 1, 7, 0.62, 0.02, 2.3, 2.6),
  ('EnDe', 'base', 1, 5, 0.68, 0.04, 2.4, 2.4),
  ('EnDe', 'large', 1, 3, 0.71, 0.11, 2.0, 1.4),
  ('CNN/DM', 'small', 0, 5, 0.65, 0.02, 2.4, 3.1),
  ('CNN/DM', 'base', 0, 5, 0.73, 0.04, 2.6, 3.0),
  ('CNN/DM', 'large', 0, 3, 0.74, 0.11, 2.0, 2.2),
  ('CNN/DM', 'small', 1, 5, 0.53, 0.02, 1.9, 2.3),
  ('CNN/DM', 'base', 1, 3, 0.55, 0.04, 1.8, 2.2),
  ('CNN/DM', 'large', 1, 3, 0.56, 0.11, 1.6, 1.7),
)


def paper_records() -> list[dict]:
  """The paper's rows, EXP beside what Theorem 3.8 gives from its alpha and c."""
  names = ('task', 'draft', 'temperature', 'gamma', 'alpha', 'c', 'EXP', 'EMP')
  records = [dict(zip(names, row, strict=True)) for row in PAPER]
  for each in records:
    value = theory.speedup(each['alpha'], each['gamma'], each['c'])
    each['formula'] = round(value, 2)
    each['residual'] = f'{100 * (each["EMP"] / value - 1):+.0f}%'
  return records


def measure(
  subject: common.Subject,
  gamma: int,
  temperature: float,
  repeats: int,
  clock: str,
  alone: bool,
) -> tuple[list[dict], dict]:
  """A record for each task, and one of the steps; everything is timed in turns."""
  pair = subject.pair
  # All are padded alike, so that steps cost the same.
  bucket = max(common.bucket_of(pair, each) for each in subject.sources.values())
  sampling = SamplingConfig(temperature=temperature)
  methods = {
    'none': SpeculationConfig('none'),
    'ngram': SpeculationConfig('ngram', gamma),
    'draft': SpeculationConfig('draft_model', gamma),
  }

  def prepare(sources, name):
    return common.prepare(pair, sources, sampling, methods[name], 1, bucket)

  first = next(iter(subject.sources.values()))
  stretched = {name: prepare(first[:1], name) for name in methods}
  runs = {
    (task, name): prepare(sources, name)
    for task, sources in subject.sources.items()
    for name in ('none', 'draft')
  }
  others = {key: run.run for key, run in runs.items()}
  costs, times = rounds.measure(pair, stretched, repeats, others=others, clock=clock)
  plain, ours = costs['none'], costs['draft']
  c = rounds.c_of(plain, costs['ngram'], ours, gamma)
  v = rounds.v_of(plain, costs['ngram'])
  records = []
  for task, sources in subject.sources.items():
    works = [rounds.work_of(pair, runs[task, name]) for name in ('none', 'draft')]
    text = common.prefixes(pair, sources, works[0].outputs, sampling)
    alpha = common.measure_alpha(pair, text, pair.draft, pair.params.draft)
    tokens, error = common.tokens_per_call(works[1].outputs)
    whole = rounds.predict(plain, ours, *works)
    empirical = rounds.speedup(times[task, 'none'], times[task, 'draft'], *works)
    expected = theory.speedup(alpha, gamma, c, v)
    rate = tokens / theory.expected_tokens(alpha, gamma)
    residual = rounds.ratio(empirical, whole)
    records.append(
      {
        'task': task,
        'T': temperature,
        'gamma': gamma,
        'alpha': round(alpha, 3),
        'c': round(c, 3),
        'v': round(v, 2),
        'EXP_v1': round(theory.speedup(alpha, gamma, c), 2),
        'EXP': round(expected, 2),
        'tokens': round(tokens, 2),
        'standard_error': round(error, 2),
        'x_tokens': round(rate, 2),
        'x_start': round(whole.median / (expected * rate), 2),
        'predicted': round(whole.median, 2),
        'EMP': round(empirical.median, 2),
        'EMP_quartiles': [round(empirical.low, 2), round(empirical.high, 2)],
        'residual': round(residual.median - 1, 3),
      }
    )
  split(records)
  in_rounds = {
    'T': temperature,
    'gamma': gamma,
    'plain_ms': round(1e3 * plain.round.median, 3),
    'round_ms': round(1e3 * ours.round.median, 3),
    'start_plain_ms': round(1e3 * plain.start.median, 2),
    'start_draft_ms': round(1e3 * ours.start.median, 2),
    'c': round(c, 3),
    'v': round(v, 2),
  }
  if alone:
    few = min(repeats, MOST_REPEATS_ALONE)
    in_rounds |= rounds.alone(pair, stretched['draft'], few, clock)
  return records, in_rounds


def split(records: list[dict]) -> None:
  """Adds what the residuals of records share, and what is left of each.

  c, v and starts are measured once for all records: what they miss, all miss.
  (1 + residual) = (1 + shared) x (1 + rest), where the rests' product is 1.
  """
  logs = [math.log1p(each['residual']) for each in records]
  shared = math.fsum(logs) / len(logs)
  for each, log in zip(records, logs, strict=True):
    each['shared'] = round(math.expm1(shared), 3)
    each['rest'] = round(math.expm1(log - shared), 3)


def draw(records: list[dict], folder) -> None:
  plt = common.plots()
  figure, axes = plt.subplots(figsize=(4.6, 4.2))
  top = 0.0
  for task, style in zip(
    dict.fromkeys(each['task'] for each in records), common.STYLES, strict=False
  ):
    for temperature, fill in ((0.0, style['color']), (1.0, 'white')):
      points = [e for e in records if e['task'] == task and e['T'] == temperature]
      axes.plot(
        [each['predicted'] for each in points],
        [each['EMP'] for each in points],
        **{**style, 'linestyle': ''},
        markerfacecolor=fill,
        label=f'{task}, T = {temperature:g}',
      )
      top = max([top, *(max(e['predicted'], e['EMP']) for e in points)])
  ends = [0, 1.15 * top]
  axes.plot(ends, ends, color='#606060', linewidth=1)
  axes.fill_between(
    ends, [0, 0.9 * ends[1]], [0, 1.1 * ends[1]], color='#e8e8e8', label='within 10%'
  )
  axes.set(
    xlim=ends,
    ylim=ends,
    xlabel='predicted: tokens per call, rounds, starts',
    ylabel='measured speedup',
  )
  axes.legend(loc='upper left', fontsize=8)
  common.save_figure(figure, folder, 'table2_4')


def main(argv: list[str] | None = None) -> None:
  parser = rounds.parser('table2_4', __doc__, count=6, repeats=9)
  parser.add_argument('--gammas', type=int, nargs='+', default=GAMMAS, metavar='INT')
  options = common.parse(parser, argv, count=1, repeats=1, gammas=(2,))
  common.print_table(paper_records(), 'The paper: T5-XXL, one TPU v4')
  subject = common.load_subject(options.config, options.count, draft=True)
  records, steps = [], []
  for gamma in options.gammas:
    for temperature in TEMPERATURES:
      alone = temperature == 0 and not options.quick
      found, step = measure(
        subject, gamma, temperature, options.repeats, options.clock, alone
      )
      records += found
      steps.append(step)
      common.write_records(options.output, records)
      common.write_records(options.output, steps, 'steps')
  draw(records, options.output)
  common.print_table(records, 'Here')
  common.print_table(steps, 'Steps')


if __name__ == '__main__':
  common.run(main)
