"""Tables 2 and 4: expected and measured speedups; `python -m experiments.table2_4`.

For each task, temperature and gamma: alpha from the target's own text, c and v from
steps timed alone, then what each refinement of the theory predicts and what is
measured, everything in turns. Texts are decoded one at a time on the device; the
host's work is left out.
"""

from experiments import common
from specjax.config import SamplingConfig, SpeculationConfig
from specjax.eval import bench, theory

GAMMAS = (2, 4, 8)
TEMPERATURES = (0.0, 1.0)
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
  subject: common.Subject, gamma: int, temperature: float, repeats: int
) -> list[dict]:
  """One record for each task; all are padded alike, so that steps cost the same."""
  pair = subject.pair
  bucket = max(common.bucket_of(pair, each) for each in subject.sources.values())
  sampling = SamplingConfig(temperature=temperature)
  options = {
    'plain': SpeculationConfig('none'),
    'draft': SpeculationConfig('draft_model', gamma),
  }
  runs = {
    (task, name): common.prepare(pair, sources, sampling, each, 1, bucket)
    for task, sources in subject.sources.items()
    for name, each in options.items()
  }
  times, _ = bench.interleave({key: run.run for key, run in runs.items()}, repeats)
  first = next(iter(subject.sources))
  steps = common.measure_steps(pair, runs[first, 'draft'], repeats=repeats)
  records = []
  for task, sources in subject.sources.items():
    plain, draft = (runs[task, name].generations(pair) for name in options)
    text = common.prefixes(pair, sources, plain, sampling)
    alpha = common.measure_alpha(pair, text, pair.draft, pair.params.draft)
    num_plain, num_draft = (sum(len(e.ids) for e in each) for each in (plain, draft))
    calls = sum(each.num_target_calls for each in draft)
    tokens = num_draft / calls
    # Whole texts, encoders included. Sampled texts differ in length, so that times
    # are per token.
    encode = len(sources) * steps.target_encode.median
    encode_both = encode + len(sources) * steps.draft_encode.median
    plain_time = (encode + num_plain * steps.target_step.median) / num_plain
    draft_time = (encode_both + calls * steps.round.median) / num_draft
    whole = plain_time / draft_time
    ratio = bench.ratio(times[task, 'plain'], times[task, 'draft'])
    measured = ratio.median * num_draft / num_plain
    records.append(
      {
        'task': task,
        'T': temperature,
        'gamma': gamma,
        'alpha': round(alpha, 3),
        'c': round(steps.c, 3),
        'v': round(steps.v, 2),
        'excess': round(steps.excess, 2),
        'tokens_eq1': round(theory.expected_tokens(alpha, gamma), 2),
        'tokens': round(tokens, 2),
        'S_3.8': round(theory.speedup(alpha, gamma, steps.c), 2),
        'S_v': round(theory.speedup(alpha, gamma, steps.c, steps.v), 2),
        'S_tokens': round(theory.speedup_of(tokens, gamma, steps.c, steps.v), 2),
        'S_whole': round(whole, 2),
        'S_measured': round(measured, 2),
        'spread': round((ratio.high - ratio.low) / ratio.median, 2),
        'residual': round(measured / whole - 1, 3),
      }
    )
  return records


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
        [each['S_whole'] for each in points],
        [each['S_measured'] for each in points],
        **{**style, 'linestyle': ''},
        markerfacecolor=fill,
        label=f'{task}, T = {temperature:g}',
      )
      top = max([top, *(max(e['S_whole'], e['S_measured']) for e in points)])
  ends = [0, 1.15 * top]
  axes.plot(ends, ends, color='#606060', linewidth=1)
  axes.fill_between(
    ends, [0, 0.9 * ends[1]], [0, 1.1 * ends[1]], color='#e8e8e8', label='within 10%'
  )
  axes.set(
    xlim=ends,
    ylim=ends,
    xlabel='predicted speedup (steps timed alone)',
    ylabel='measured speedup',
  )
  axes.legend(loc='upper left', fontsize=8)
  common.save_figure(figure, folder, 'table2_4')


def main(argv: list[str] | None = None) -> None:
  parser = common.pair_parser('table2_4', __doc__, count=4, repeats=5)
  parser.add_argument('--gammas', type=int, nargs='+', default=GAMMAS, metavar='INT')
  options = parser.parse_args(argv)
  common.print_table(paper_records(), 'The paper: T5-XXL, one TPU v4')
  subject = common.load_subject(options.config, options.count)
  if subject.pair.draft is None:
    raise ValueError(f'config: {options.config} has no draft model; name one')
  records = []
  for gamma in options.gammas:
    for temperature in TEMPERATURES:
      records += measure(subject, gamma, temperature, options.repeats)
  common.write_records(options.output, records)
  draw(records, options.output)
  common.print_table(records, 'Here')


if __name__ == '__main__':
  common.run(main)
