"""At which batch does speculation stop paying? `python -m experiments.concurrency`.

A pass over n tokens takes a + b n seconds: a for weights that are read once, b for
arithmetic. One row is memory's business, many rows are arithmetic's, and then every
drafted token has to be paid for. a and b come from plain steps alone, and say what
verifying costs before any draft is verified:

  v(B) = (a + b B (G + 1)) / (a + b B),    S(B) = tokens / (v(B) + G c(B))

with c(B) from the same line for the draft. Speculation stops paying where S(B) = 1.
"""

import numpy as np

from experiments import common, rounds
from specjax.config import SamplingConfig, SpeculationConfig
from specjax.eval import theory

BATCHES = (1, 4, 16, 64)
BUDGETS = (4, 28)


def fit_line(batches, seconds) -> tuple[float, float]:
  """(a, b) >= 0 of a + b n, least squares of relative errors."""
  n, t = np.asarray(batches, float), np.asarray(seconds, float)
  if len(n) == 1:
    return 0.0, float(t[0] / n[0])
  best = None
  for columns in ((0, 1), (0,), (1,)):  # the best fit without a negative term
    design = np.stack([np.ones_like(n), n], axis=1)[:, columns] / t[:, None]
    solution, *_ = np.linalg.lstsq(design, np.ones_like(t), rcond=None)
    if np.all(solution >= 0):
      error = float(np.sum((design @ solution - 1) ** 2))
      if best is None or error < best[0] - 1e-12:
        full = np.zeros(2)
        full[list(columns)] = solution
        best = error, full
  assert best is not None  # one term alone is always positive
  return float(best[1][0]), float(best[1][1])


def measure(
  subject: common.Subject, task: str, gamma: int, batches, repeats: int, clock: str
) -> list[dict]:
  """One record for each batch size and method."""
  pair = subject.pair
  sources = subject.sources[task]
  methods = ['draft_model'] * (pair.draft is not None) + ['ngram']
  bucket = common.bucket_of(pair, sources)

  def prepare(method: str, batch_size: int) -> common.Run:
    texts = [sources[row % len(sources)] for row in range(batch_size)]
    speculation = SpeculationConfig(method, gamma)
    return common.prepare(
      pair, texts, SamplingConfig(), speculation, batch_size, bucket
    )

  records = []
  for size in batches:
    runs = {method: prepare(method, size) for method in ('none', *methods)}
    others = {method: run.run for method, run in runs.items()}
    costs, times = rounds.measure(
      pair, runs, repeats, budgets=BUDGETS, others=others, clock=clock
    )
    plain_work = rounds.work_of(pair, runs['none'])
    for method in methods:
      work = rounds.work_of(pair, runs[method])
      measured = rounds.speedup(times['none'], times[method], plain_work, work)
      predicted = rounds.predict(costs['none'], costs[method], plain_work, work)
      records.append(
        {
          'method': method,
          'gamma': gamma,
          'batch_size': size,
          'plain_ms': 1e3 * costs['none'].round.median,
          'c': rounds.c_of(costs['none'], costs['ngram'], costs[method], gamma),
          'v': rounds.v_of(costs['none'], costs['ngram']),
          'live': work.live,
          'predicted': predicted.median,
          'measured': measured.median,
          'quartiles': [round(measured.low, 2), round(measured.high, 2)],
        }
      )
  return records


def model(records: list[dict], tokens: dict[str, float]) -> dict[str, float]:
  """Adds what the lines say to the records; returns each method's last paying batch.

  Args:
    records: of `measure`; `c`, `v` become rounded.
    tokens: by method, per target call.
  """
  gamma = records[0]['gamma']
  last = {}
  for method in dict.fromkeys(each['method'] for each in records):
    mine = [each for each in records if each['method'] == method]
    sizes = [each['batch_size'] for each in mine]
    a, b = fit_line(sizes, [each['plain_ms'] for each in mine])
    draft = [max(each['c'] * each['plain_ms'], 1e-9) for each in mine]
    a_draft, b_draft = fit_line(sizes, draft) if max(draft) > 1e-6 else (0.0, 0.0)

    def cost(size, a=a, b=b, a_draft=a_draft, b_draft=b_draft):
      step = a + b * size
      return (a + b * size * (gamma + 1)) / step, (a_draft + b_draft * size) / step

    def steady(size, cost=cost, method=method):
      v, c = cost(size)
      return theory.speedup_of(tokens[method], gamma, c, v)

    paying = [size for size in range(1, 1025) if steady(size) > 1]
    last[method] = max(paying, default=0)
    for each in mine:
      v, _ = cost(each['batch_size'])
      each['tokens_per_call'] = tokens[method]
      each['v_model'] = round(v, 2)
      each['S'] = round(
        theory.speedup_of(tokens[method], gamma, each['c'], each['v']), 2
      )
      each['S_model'] = round(steady(each['batch_size']), 2)
  for each in records:
    for name, digits in (('plain_ms', 3), ('c', 3), ('v', 2), ('live', 2)):
      each[name] = round(each[name], digits)
    for name in ('tokens_per_call', 'predicted', 'measured'):
      each[name] = round(each[name], 2)
  return last


def draw(records: list[dict], folder) -> None:
  plt = common.plots()
  figure, both = plt.subplots(1, 2, figsize=(8.6, 3.4))
  methods = list(dict.fromkeys(each['method'] for each in records))
  labels = {'draft_model': 'draft model', 'ngram': 'prompt lookup'}
  for method, style in zip(methods, common.STYLES, strict=False):
    mine = [each for each in records if each['method'] == method]
    sizes = [each['batch_size'] for each in mine]
    line, points = {**style, 'marker': ''}, {**style, 'linestyle': ''}
    both[0].plot(sizes, [e['S_model'] for e in mine], **line)
    both[0].plot(sizes, [e['S'] for e in mine], **points, label=labels[method])
    both[0].plot([], [], **line, label='model')
  plain = [each for each in records if each['method'] == methods[-1]]
  sizes = [each['batch_size'] for each in plain]
  style = common.STYLES[0]
  both[1].plot(sizes, [e['v_model'] for e in plain], **{**style, 'marker': ''})
  both[1].plot(sizes, [e['v'] for e in plain], **{**style, 'linestyle': ''})
  gamma = records[0]['gamma']
  both[1].axhline(gamma + 1, color='#b0b0b0', linestyle=':')
  both[0].axhline(1, color='#606060', linewidth=1)
  both[0].set(ylabel='speedup of rounds', title='speculation pays above 1')
  both[0].legend(fontsize=8)
  title = f'v: points measured, line from plain steps (dots: {gamma + 1})'
  both[1].set(ylabel='cost of verifying / plain step', ylim=(0, gamma + 2), title=title)
  for axes in both:
    axes.set_xscale('log', base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel('batch size')
    axes.title.set_fontsize(9)
  common.save_figure(figure, folder, 'concurrency')


def main(argv: list[str] | None = None) -> None:
  parser = rounds.parser('concurrency', __doc__, gamma=4, repeats=5)
  parser.add_argument('--batches', type=int, nargs='+', default=BATCHES, metavar='INT')
  parser.add_argument('--task', help="texts of one task; default the pair's last")
  options = common.parse(parser, argv, gamma=2, repeats=1, batches=(1,))
  if min(options.batches) < 1:
    raise ValueError(f'batches: {min(options.batches)}; give 1 or more')
  subject = common.load_subject(options.config, max(options.batches))
  task = options.task or list(subject.sources)[-1]
  if task not in subject.sources:
    raise ValueError(f'task: {task}; the pair has {", ".join(subject.sources)}')
  batches = sorted(set(options.batches))
  records = measure(
    subject, task, options.gamma, batches, options.repeats, options.clock
  )
  last = model(records, tokens_of(subject, task, records))
  common.write_records(options.output, records)
  draw(records, options.output)
  common.print_table(records, task)
  for method, size in last.items():
    print(f'{method}: by the model, the largest batch that pays is {size}')


def tokens_of(subject: common.Subject, task: str, records) -> dict[str, float]:
  """Tokens per target call by method, over all texts: no matter in which batch."""
  pair, found = subject.pair, {}
  for method in dict.fromkeys(each['method'] for each in records):
    speculation = SpeculationConfig(method, records[0]['gamma'])
    run = common.prepare(
      pair, subject.sources[task], SamplingConfig(), speculation, batch_size=16
    )
    found[method], _ = common.tokens_per_call(run.generations(pair))
  return found


if __name__ == '__main__':
  common.run(main)
