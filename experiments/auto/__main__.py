"""Does gamma "auto" find what pays? `python -m experiments.auto`.

Every workload decoded plainly, with each gamma that auto chooses from, and with auto,
by whole calls of `Pair.generate` in turns, everything warm: encoders, host, auto's
looks and its waits for the device are inside. Greedy. Auto is timed twice: after as
many other texts of the workload, and as a first call, which has seen nothing.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments import common, rounds
from experiments.workloads.__main__ import MEANINGS, workloads_of
from specjax.eval import interleave, tuning
from specjax.eval.interleave import Samples
from specjax.generation import Generation

PLAIN, AUTO, FIRST = 0, 'auto', 'first call'
LABELS = {'draft_model': 'draft model', 'ngram': 'prompt lookup'}


def choose_workloads(
  subject: common.Subject, names: Sequence[str] | None
) -> dict[str, list[list[int]]]:
  """Those named, or all.

  Raises:
    ValueError: a name is unknown.
  """
  found = workloads_of(subject)
  if unknown := sorted(set(names or ()) - set(found)):
    raise ValueError(
      f'workloads: {", ".join(unknown)}; give some of {", ".join(found)}'
    )
  return {name: found[name] for name in names or found}


def measure(
  subject: common.Subject,
  workloads: dict[str, list[list[int]]],
  max_gamma: int,
  batch_sizes: list[int],
  repeats: int,
  clock: str,
) -> Iterator[dict]:
  """One record for each workload, method and batch size."""
  pair = subject.pair
  methods = ['draft_model'] * (pair.draft is not None) + ['ngram']
  for name, texts in workloads.items():
    sources, others = texts[::2], texts[1::2] or texts
    for batch_size in batch_sizes:
      for method in methods:
        chosen: list[tuning.Choice] = []

        def generate(gamma: int | str, sources=sources, batch_size=batch_size,
                     method=method, chosen=chosen):  # fmt: skip
          return pair.generate(
            sources,
            method=method if gamma else 'none',
            num_draft=gamma or 1,
            max_draft=max_gamma,
            batch_size=batch_size,
            on_choice=chosen.append,
          )

        calls: dict[int | str, Callable[[], list[Generation]]] = {
          gamma: functools.partial(generate, gamma)
          for gamma in tuning.ladder(max_gamma)
        }
        for sources_seen in (sources, others):
          settle(pair, functools.partial(generate, AUTO, sources_seen))
        pair.memory.seen.clear()
        generate(AUTO, others)
        calls[AUTO] = remembering(pair, functools.partial(generate, AUTO))
        pair.memory.seen.clear()
        calls[FIRST] = remembering(pair, functools.partial(generate, AUTO))
        outputs = {
          gamma: [each.ids for each in call()] for gamma, call in calls.items()
        }
        if any(each != outputs[PLAIN] for each in outputs.values()):
          raise ValueError(f'{name}: outputs differ in {pair.name}; decode in float32')
        chosen.clear()
        times, _ = interleave.interleave(calls, repeats, rounds.CLOCKS[clock])
        yield {
          'workload': name,
          'kind': MEANINGS.get(name, name),
          'method': method,
          'batch_size': batch_size,
          'texts': len(sources),
          **compare(times),
          'last_choice': chosen[-1].gamma,
        }


def settle(pair, call) -> None:
  """Calls until no more costs are measured, which also compiles: later choices may be
  of gammas that the first call had not met."""
  while True:
    known = dict(pair.memory.costs)
    call()
    if pair.memory.costs == known:
      return


def remembering(pair, call: Callable[[], Any]) -> Callable[[], Any]:
  """A call that begins each time with what the pair has seen up to now."""
  seen = dict(pair.memory.seen)

  def run():
    pair.memory.seen.clear()
    pair.memory.seen.update(seen)
    return call()

  return run


def compare(times: dict[int | str, Samples]) -> dict:
  """Speedups over plain decoding, and auto's time beside that of the best."""
  speedups = {
    gamma: interleave.ratio(times[PLAIN], each) for gamma, each in times.items()
  }
  fixed = [gamma for gamma in times if gamma not in (AUTO, FIRST)]
  best = max(fixed, key=lambda gamma: speedups[gamma].median)
  auto = speedups[AUTO]
  over_best = {
    key: interleave.ratio(times[key], times[best]).median for key in (AUTO, FIRST)
  }
  return {
    'fixed': {str(gamma): round(speedups[gamma].median, 3) for gamma in fixed},
    'auto': round(auto.median, 3),
    'quartiles': [round(auto.low, 3), round(auto.high, 3)],
    'best_gamma': best,
    'time_over_best': round(over_best[AUTO], 3),
    'time_over_plain': round(1 / auto.median, 3),
    'first_over_best': round(over_best[FIRST], 3),
    'first_over_plain': round(1 / speedups[FIRST].median, 3),
  }


def draw(records: list[dict], folder) -> None:
  plt = common.plots()
  panels = list(dict.fromkeys((each['method'], each['batch_size']) for each in records))
  figure, axes = plt.subplots(
    1, len(panels), figsize=(3.1 * len(panels), 3.2), sharey=True, squeeze=False
  )
  for axis, (method, batch_size) in zip(axes[0], panels, strict=True):
    shown = [
      each
      for each in records
      if (each['method'], each['batch_size']) == (method, batch_size)
    ]
    for place, each in enumerate(shown):
      for gamma, value in each['fixed'].items():
        axis.annotate(gamma, (place, value), ha='center', va='center', color='#606060')
      axis.plot(
        [place], [each['auto']], marker='o', markersize=15, markerfacecolor='none',
        color='#d55e00', linestyle='', label='auto' if not place else None,
      )  # fmt: skip
    axis.axhline(1, color='#606060', linewidth=1)
    axis.set_xticks(range(len(shown)), [each['kind'] for each in shown], rotation=20)
    axis.set_xlim(-0.5, len(shown) - 0.5)
    values = [x for each in records for x in (each['auto'], *each['fixed'].values())]
    axis.set_ylim(min(values) - 0.1, max(values) + 0.1)
    axis.grid(visible=False, axis='x')
    axis.set_title(f'{LABELS[method]}, batch {batch_size}', fontsize=10)
  axes[0][0].set_ylabel('speedup; numbers are fixed gammas')
  axes[0][0].legend(loc='upper left')
  common.save_figure(figure, folder, 'auto')


def main(argv: list[str] | None = None) -> None:
  parser = rounds.parser('auto', __doc__, count=64, max_gamma=8, repeats=3)
  parser.add_argument('--batch_sizes', type=int, nargs='+', default=[1, 8])
  parser.add_argument('--workloads', nargs='+', help='tasks, mixed; all if not given')
  options = common.parse(parser, argv, count=1, max_gamma=2, repeats=1, batch_sizes=[1])
  subject = common.load_subject(options.config, 2 * options.count)
  records = []
  for record in measure(
    subject,
    choose_workloads(subject, options.workloads),
    options.max_gamma,
    options.batch_sizes,
    options.repeats,
    options.clock,
  ):
    records.append(record)
    common.write_records(options.output, records)
  draw(records, options.output)
  common.print_table(records)


if __name__ == '__main__':
  common.run(main)
