"""Who should draft? `python -m experiments.drafters`.

The draft model, prompt lookup (in the encoder's source and the output so far) and a
bigram table on the same texts: tokens per call of the target, what a draft costs, the
speedup that both promise and the measured one. Greedy, one text at a time.
"""

from experiments import common, rounds
from specjax.config import SamplingConfig, SpeculationConfig
from specjax.pair import EMBEDDED, MAX_TABLE_IDS, Pair

LABELS = {'draft_model': 'draft model', 'ngram': 'prompt lookup', 'table': 'bigrams'}


def methods_of(pair: Pair) -> list[str]:
  """'ngram', and what else the pair has."""
  has_text = pair.name == EMBEDDED or pair.table_text is not None
  has_table = has_text and pair.target_config.vocab_size <= MAX_TABLE_IDS
  return ['draft_model'] * (pair.draft is not None) + ['ngram'] + ['table'] * has_table


def measure(
  subject: common.Subject, gamma: int, num_timed: int, repeats: int, clock: str
) -> list[dict]:
  """One record for each task and method; the first `num_timed` texts are timed."""
  pair, records = subject.pair, []
  bucket = max(common.bucket_of(pair, each) for each in subject.sources.values())
  methods = methods_of(pair)

  def prepare(sources, method, batch_size=1):
    speculation = SpeculationConfig(method, gamma)
    return common.prepare(
      pair, sources, SamplingConfig(), speculation, batch_size, bucket
    )

  first = next(iter(subject.sources.values()))
  stretched = {method: prepare(first[:1], method) for method in ('none', *methods)}
  runs = {
    (task, method): prepare(sources[:num_timed], method)
    for task, sources in subject.sources.items()
    for method in ('none', *methods)
  }
  others = {key: run.run for key, run in runs.items()}
  costs, times = rounds.measure(pair, stretched, repeats, others=others, clock=clock)
  plain, verify = costs['none'], costs['ngram']
  for task, sources in subject.sources.items():
    for method in methods:
      outputs = prepare(sources, method, batch_size=16).generations(pair)
      tokens, error = common.tokens_per_call(outputs)
      counts = common.counts(outputs)
      works = [rounds.work_of(pair, runs[task, name]) for name in ('none', method)]
      predicted = rounds.predict(plain, costs[method], *works)
      measured = rounds.speedup(times[task, 'none'], times[task, method], *works)
      records.append(
        {
          'task': task,
          'method': method,
          'gamma': gamma,
          'tokens_per_call': round(tokens, 2),
          'standard_error': round(error, 2),
          'drafted_per_call': round(
            counts.num_draft_tokens / counts.num_target_calls, 2
          ),
          'acceptance_rate': round(counts.acceptance_rate, 3),
          'c': round(rounds.c_of(plain, verify, costs[method], gamma), 3),
          'v': round(rounds.v_of(plain, verify), 2),
          'predicted': round(predicted.median, 2),
          'measured': round(measured.median, 2),
          'quartiles': [round(measured.low, 2), round(measured.high, 2)],
        }
      )
  return records


def draw(records: list[dict], folder) -> None:
  plt = common.plots()
  figure, both = plt.subplots(1, 2, figsize=(8.4, 3.2))
  tasks = list(dict.fromkeys(each['task'] for each in records))
  methods = list(dict.fromkeys(each['method'] for each in records))
  looks = (('#404040', ''), ('#9ecae1', '///'), ('#f0c27b', '...'))
  for number, (method, (colour, hatch)) in enumerate(zip(methods, looks, strict=False)):
    values = [each for each in records if each['method'] == method]
    places = [tasks.index(each['task']) + 0.27 * (number - 1) for each in values]
    bars = {'color': colour, 'hatch': hatch, 'edgecolor': 'black', 'linewidth': 0.6}
    both[0].bar(
      places,
      [each['tokens_per_call'] for each in values],
      0.24,
      yerr=[each['standard_error'] for each in values],
      capsize=2,
      label=LABELS[method],
      **bars,
    )
    both[1].bar(places, [each['measured'] for each in values], 0.24, **bars)
    both[1].plot(
      places,
      [each['predicted'] for each in values],
      **{'linestyle': '', 'marker': '_', 'markersize': 14, 'color': '#d55e00'},
      label='predicted' if number == 0 else None,
    )
  gamma = records[0]['gamma']
  both[0].set(ylim=(0, gamma + 1), ylabel=f'tokens per target call (of {gamma + 1})')
  both[1].set(ylabel='speedup, encoders included')
  for axes in both:
    axes.axhline(1, color='#606060', linewidth=1)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.grid(visible=False, axis='x')
    axes.legend(loc='lower center', bbox_to_anchor=(0.5, 1.0), ncols=3)
  common.save_figure(figure, folder, 'drafters')


def main(argv: list[str] | None = None) -> None:
  parser = rounds.parser('drafters', __doc__, count=32, timed=4, gamma=4, repeats=7)
  options = common.parse(parser, argv, count=1, timed=1, gamma=2, repeats=1)
  subject = common.load_subject(options.config, options.count)
  records = measure(
    subject, options.gamma, options.timed, options.repeats, options.clock
  )
  common.write_records(options.output, records)
  draw(records, options.output)
  common.print_table(records)


if __name__ == '__main__':
  common.run(main)
