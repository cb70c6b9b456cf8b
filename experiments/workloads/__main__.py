"""Which traffic gains, and what does mixing it cost? `python -m experiments.workloads`.

Every task of the pair, and all of their texts mixed, decoded in batches: a batch goes
on until its last row is done, and the rows that are done wait. Greedy.
"""

import itertools

from experiments import common, rounds
from specjax.config import SamplingConfig, SpeculationConfig
from specjax.eval import interleave

MIXED = 'mixed'
# What the tasks of the embedded pair stand for.
MEANINGS = {'ende': 'translation', 'summ': 'summary', 'fix': 'copy-heavy'}


def workloads_of(subject: common.Subject) -> dict[str, list[list[int]]]:
  """The tasks, and their texts in turns if there are several."""
  found = dict(subject.sources)
  if len(found) > 1:
    turns = itertools.zip_longest(*found.values())
    found[MIXED] = [ids for turn in turns for ids in turn if ids is not None]
  return found


def measure(
  subject: common.Subject, gamma: int, batch_size: int, repeats: int, clock: str
) -> list[dict]:
  """One record for each workload and method."""
  pair, records = subject.pair, []
  workloads = workloads_of(subject)
  bucket = max(common.bucket_of(pair, each) for each in subject.sources.values())
  methods = ['draft_model'] * (pair.draft is not None) + ['ngram']

  def prepare(sources, method):
    speculation = SpeculationConfig(method, gamma)
    return common.prepare(
      pair, sources, SamplingConfig(), speculation, batch_size, bucket
    )

  *_, everything = workloads.values()
  stretched = {
    method: prepare(everything[:batch_size], method) for method in ('none', *methods)
  }
  runs = {
    (name, method): prepare(sources, method)
    for name, sources in workloads.items()
    for method in ('none', *methods)
  }
  others = {key: run.run for key, run in runs.items()}
  costs, times = rounds.measure(pair, stretched, repeats, others=others, clock=clock)
  for name in workloads:
    plain_work = rounds.work_of(pair, runs[name, 'none'])
    for method in methods:
      work = rounds.work_of(pair, runs[name, method])
      predicted = rounds.predict(costs['none'], costs[method], plain_work, work)
      measured = rounds.speedup(
        times[name, 'none'], times[name, method], plain_work, work
      )
      records.append(
        {
          'workload': name,
          'kind': MEANINGS.get(name, name),
          'method': method,
          'gamma': gamma,
          'batch_size': batch_size,
          'texts': len(work.outputs),
          'tokens_per_call': round(common.tokens_per_call(work.outputs)[0], 2),
          'tokens_per_round': round(work.num_tokens / work.num_rounds, 2),
          'live_plain': round(plain_work.live, 2),
          'live': round(work.live, 2),
          'predicted': round(predicted.median, 2),
          'measured': round(measured.median, 2),
          'quartiles': [round(measured.low, 2), round(measured.high, 2)],
          'mixing': mixing(times, list(subject.sources), name, method),
        }
      )
  return records


def mixing(times, tasks: list[str], name: str, method: str) -> float | None:
  """Time of the mixed batches over that of the same texts, task by task."""
  if name != MIXED:
    return None
  apart = interleave.added(*(times[task, method] for task in tasks))
  return round(interleave.ratio(times[MIXED, method], apart).median, 2)


def draw(records: list[dict], folder) -> None:
  plt = common.plots()
  figure, axes = plt.subplots(figsize=(5.8, 3.2))
  names = list(dict.fromkeys(each['workload'] for each in records))
  methods = list(dict.fromkeys(each['method'] for each in records))
  looks = (('#404040', ''), ('#9ecae1', '///'))
  labels = {'draft_model': 'draft model', 'ngram': 'prompt lookup'}
  for number, (method, (colour, hatch)) in enumerate(zip(methods, looks, strict=False)):
    values = [each for each in records if each['method'] == method]
    places = [names.index(each['workload']) + 0.36 * number - 0.18 for each in values]
    measured = [each['measured'] for each in values]
    low = [each['measured'] - each['quartiles'][0] for each in values]
    high = [each['quartiles'][1] - each['measured'] for each in values]
    axes.bar(
      places, measured, 0.33, yerr=[low, high], capsize=2, color=colour, hatch=hatch,
      edgecolor='black', linewidth=0.6, label=labels[method],
    )  # fmt: skip
    axes.plot(
      places,
      [each['predicted'] for each in values],
      **{'linestyle': '', 'marker': '_', 'markersize': 20, 'color': '#d55e00'},
      label='predicted' if number == 0 else None,
    )
  axes.axhline(1, color='#606060', linewidth=1)
  kinds = {each['workload']: each['kind'] for each in records}
  axes.set_xticks(range(len(names)), [kinds[name] for name in names])
  axes.grid(visible=False, axis='x')
  axes.set_ylabel(f'speedup in batches of {records[0]["batch_size"]}')
  axes.legend(loc='lower center', bbox_to_anchor=(0.5, 1.0), ncols=3)
  common.save_figure(figure, folder, 'workloads')


def main(argv: list[str] | None = None) -> None:
  parser = rounds.parser(
    'workloads', __doc__, count=8, batch_size=4, gamma=4, repeats=7
  )
  options = common.parse(parser, argv, count=1, batch_size=1, gamma=2, repeats=1)
  subject = common.load_subject(options.config, options.count)
  records = measure(
    subject, options.gamma, options.batch_size, options.repeats, options.clock
  )
  common.write_records(options.output, records)
  draw(records, options.output)
  common.print_table(records)


if __name__ == '__main__':
  common.run(main)
