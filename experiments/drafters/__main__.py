"""Who should draft? `python -m experiments.drafters`.

The draft model, prompt lookup and a bigram table on the same texts: tokens per call
of the target, cost c of a draft step, and the speedup that steps timed alone predict.
"""

from experiments import common
from specjax.config import SamplingConfig, SpeculationConfig
from specjax.eval import theory

METHODS = ('draft_model', 'ngram', 'table')
LABELS = {'draft_model': 'draft model', 'ngram': 'prompt lookup', 'table': 'bigrams'}


def measure(subject: common.Subject, gamma: int, repeats: int) -> list[dict]:
  """One record for each task and method."""
  pair, records, costs = subject.pair, [], {}
  for task, sources in subject.sources.items():
    for method in METHODS:
      if method == 'draft_model' and pair.draft is None:
        continue
      speculation = SpeculationConfig(method, gamma)
      run = common.prepare(pair, sources, SamplingConfig(), speculation, batch_size=16)
      outputs = run.generations(pair)
      if method not in costs:  # a step costs the same whatever is decoded
        single = common.prepare(
          pair, sources[:1], SamplingConfig(), speculation, batch_size=1
        )
        costs[method] = common.measure_steps(pair, single, repeats=repeats)
      steps, counts = costs[method], common.counts(outputs)
      tokens, error = common.tokens_per_call(outputs)
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
          'c': round(steps.c, 3),
          'v': round(steps.v, 2),
          'speedup_v1': round(theory.speedup_of(tokens, gamma, steps.c), 2),
          'speedup_v': round(theory.speedup_of(tokens, gamma, steps.c, steps.v), 2),
        }
      )
  return records


def draw(records: list[dict], folder) -> None:
  plt = common.plots()
  figure, axes = plt.subplots(figsize=(5.6, 3.2))
  tasks = list(dict.fromkeys(each['task'] for each in records))
  methods = list(dict.fromkeys(each['method'] for each in records))
  looks = (('#404040', ''), ('#9ecae1', '///'), ('#f0c27b', '...'))
  for number, (method, (colour, hatch)) in enumerate(zip(methods, looks, strict=False)):
    values = [each for each in records if each['method'] == method]
    axes.bar(
      [tasks.index(each['task']) + 0.27 * (number - 1) for each in values],
      [each['tokens_per_call'] for each in values],
      0.24,
      yerr=[each['standard_error'] for each in values],
      color=colour,
      hatch=hatch,
      edgecolor='black',
      linewidth=0.6,
      capsize=2,
      label=LABELS[method],
    )
  gamma = records[0]['gamma']
  axes.axhline(1, color='#606060', linewidth=1)
  axes.set_xticks(range(len(tasks)), tasks)
  axes.grid(visible=False, axis='x')
  axes.set(ylim=(0, gamma + 1), ylabel=f'tokens per target call (of {gamma + 1})')
  axes.legend(loc='lower center', bbox_to_anchor=(0.5, 1.0), ncols=3)
  common.save_figure(figure, folder, 'drafters')


def main(argv: list[str] | None = None) -> None:
  parser = common.pair_parser('drafters', __doc__, count=32, gamma=4, repeats=3)
  options = parser.parse_args(argv)
  subject = common.load_subject(options.config, options.count)
  records = measure(subject, options.gamma, options.repeats)
  common.write_records(options.output, records)
  draw(records, options.output)
  common.print_table(records)


if __name__ == '__main__':
  common.run(main)
