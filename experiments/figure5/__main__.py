"""Figure 5: a timeline of decoding one text; `python -m experiments.figure5`.

What the loop did with one text, round by round, drawn with the time that each step
takes in the loop: encoders run once, then drafts and verifications take turns.
"""

from experiments import common, rounds
from specjax.config import SamplingConfig, SpeculationConfig
from specjax.pair import Pair

GAMMAS = (7, 3)
# Kind of step -> (colour, hatch): told apart in grey too.
LOOKS = {
  'target encoder': ('#404040', ''),
  'draft encoder': ('#d9d9d9', '....'),
  'draft step': ('#f0c27b', ''),
  'target step': ('#2b6ca3', ''),
}


def measure(
  subject: common.Subject, task: str, gammas, repeats: int, clock: str
) -> list[dict]:
  """One record for each gamma: the steps of one text, (kind, milliseconds)."""
  pair, gammas = subject.pair, (*gammas, 0)  # plain decoding last
  sources = [median_source(pair, subject.sources[task])]

  def prepare(method: str, gamma: int) -> common.Run:
    speculation = SpeculationConfig(method, gamma or 1)
    return common.prepare(pair, sources, SamplingConfig(), speculation, 1)

  runs = {gamma: prepare('draft_model' if gamma else 'none', gamma) for gamma in gammas}
  lookups = {(gamma, 'verify'): prepare('ngram', gamma) for gamma in gammas if gamma}
  others = {gamma: run.run for gamma, run in runs.items()}
  costs, times = rounds.measure(
    pair, {**runs, **lookups}, repeats, others=others, clock=clock
  )
  records = []
  for gamma in gammas:
    (output,) = runs[gamma].generations(pair)
    encoder = costs[0].start.median
    spans = [('target encoder', encoder)]
    target = costs[0].round.median
    if gamma:
      spans.append(('draft encoder', max(costs[gamma].start.median - encoder, 0.0)))
      target = costs[gamma, 'verify'].round.median
    for _ in range(output.num_target_calls):
      if gamma:
        draft = max(costs[gamma].round.median - target, 0.0) / gamma
        spans += [('draft step', draft)] * gamma
      spans.append(('target step', target))
    records.append(
      {
        'task': task,
        'gamma': gamma,
        'tokens': len(output.ids),
        'target_calls': output.num_target_calls,
        'draft_steps': gamma * output.num_target_calls,
        'total_ms': round(1e3 * sum(seconds for _, seconds in spans), 2),
        'measured_ms': round(1e3 * times[gamma].median, 2),
        'spans': [(kind, round(1e3 * seconds, 3)) for kind, seconds in spans],
      }
    )
  return records


def median_source(pair: Pair, sources):
  """The source whose output's length is the median of all."""
  speculation, size = SpeculationConfig('none'), len(sources)
  run = common.prepare(pair, sources, SamplingConfig(), speculation, size)
  ordered = sorted(run.generations(pair), key=lambda each: len(each.ids))
  return sources[ordered[size // 2].index]


def draw(records: list[dict], folder) -> None:
  plt = common.plots()
  figure, axes = plt.subplots(figsize=(8.4, 2.6))
  longest = max(max(each['total_ms'], each['measured_ms']) for each in records)
  for row, record in enumerate(records):
    start = 0.0
    for kind, time in record['spans']:
      colour, hatch = LOOKS[kind]
      # Edges would hide narrow steps.
      edge = min(0.4, 60 * time / longest)
      axes.barh(
        row, time, 0.6, start, color=colour, hatch=hatch, edgecolor='white',
        linewidth=edge,
      )  # fmt: skip
      start += time
    measured = record['measured_ms']
    axes.plot([measured] * 2, [row - 0.4, row + 0.4], color='#d55e00', linewidth=2)
    calls = f'target calls: {record["target_calls"]}'
    place = max(start, measured) + 0.01 * longest
    axes.text(place, row, calls, va='center', fontsize=8)
  handles = [
    plt.Rectangle((0, 0), 1, 1, facecolor=colour, hatch=hatch, edgecolor='white')
    for colour, hatch in LOOKS.values()
  ]
  handles.append(plt.Line2D([], [], color='#d55e00', linewidth=2))
  labels = [
    f'$\\gamma$ = {each["gamma"]}' if each['gamma'] else 'plain' for each in records
  ]
  axes.set_yticks(range(len(records)), labels)
  axes.invert_yaxis()
  axes.grid(visible=False, axis='y')
  axes.set_xlim(0, 1.18 * longest)
  axes.set_xlabel(f'milliseconds, {records[0]["tokens"]} tokens of one text')
  axes.legend(
    handles,
    [*LOOKS, 'the whole, measured'],
    loc='lower center',
    ncols=5,
    bbox_to_anchor=(0.5, 1.0),
  )
  common.save_figure(figure, folder, 'figure5')


def main(argv: list[str] | None = None) -> None:
  parser = rounds.parser('figure5', __doc__, count=8, repeats=15)
  parser.add_argument('--gammas', type=int, nargs='+', default=GAMMAS, metavar='INT')
  options = common.parse(parser, argv, count=1, repeats=1, gammas=(2,))
  subject = common.load_subject(options.config, options.count, draft=True)
  first = next(iter(subject.sources))
  records = measure(subject, first, options.gammas, options.repeats, options.clock)
  common.write_records(options.output, records)
  draw(records, options.output)
  names = [name for name in records[0] if name != 'spans']
  common.print_table([{name: each[name] for name in names} for each in records])


if __name__ == '__main__':
  common.run(main)
