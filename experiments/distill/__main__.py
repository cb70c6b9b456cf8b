"""What raises a draft's alpha, and by how much? `python -m experiments.distill`.

Two drafts of the embedded target learn for equally many steps from the same first
weights, batches and schedule: 'cut', two encoder layers and one decoder layer of the
target's own, and 'embedded', the embedded draft itself, which was distilled before.
Runs that `results.jsonl` holds are not run again: remove it to measure anew.
"""

import argparse
import dataclasses
import json
import pathlib
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import rich.console
import rich.table

import specjax
from specjax.checkpoints import store
from specjax.data import corpus, text
from specjax.train import answers, distill, texts
from specjax.train.config import DataConfig, DistillConfig, FitConfig
from specjax.train.recipe import Recipe

HERE = pathlib.Path(__file__).parent
ASSETS = pathlib.Path(specjax.__file__).parent / 'assets'
TASKS = ('ende', 'fix')
LONGEST = 32  # ids of a source and of a target: one shape, compiled once
BASELINE = ('cross_entropy', 'fixed')
RUNS = {
  'embedded': (BASELINE, ('forward_kl', 'target'), ('kl_then_tvd', 'target')),
  'cut': (
    BASELINE,
    ('forward_kl', 'target'),
    ('kl_then_tvd', 'target'),
    ('tvd', 'target'),
    ('jsd', 'target'),
    ('reverse_kl', 'target'),
    ('cross_entropy', 'target'),
    ('forward_kl', 'fixed'),
    ('forward_kl', 'draft'),
    ('forward_kl', 'mixed'),
    ('forward_kl', 'online'),
  ),
  'cut, longer': (BASELINE, ('forward_kl', 'target')),
  'cut, longest': (BASELINE, ('forward_kl', 'target'), ('kl_then_tvd', 'target')),
}
LONGER = {'cut, longer': 4, 'cut, longest': 16}
QUICK_RUNS = {'embedded': (BASELINE, ('forward_kl', 'draft'))}


def steps_of(draft: str, steps: int) -> int:
  """Steps of a draft's runs."""
  return LONGER.get(draft, 1) * steps


class Size(NamedTuple):
  """How much is done.

  Attributes:
    steps: of each run.
    sources: training sources.
    prompts: held-out sources of each task.
    rows: of a batch.
  """

  steps: int
  sources: int
  prompts: int
  rows: int


FULL, QUICK = Size(100, 800, 32, 8), Size(2, 8, 2, 4)


def short_pairs(vocabulary, split: str, count: int, seed: int = 0) -> list[corpus.Pair]:
  """`count` examples of each task that fit, drawn by a seed."""
  examples = corpus.read_corpus(split)
  examples += corpus.fix_examples(examples)
  chosen = []
  for task in TASKS:
    pool = [each for each in examples if each.task == task]
    random.Random(seed).shuffle(pool)
    fitting = (
      pair
      for each in pool
      if len((pair := corpus.encode_example(vocabulary, each, 128)).source) <= LONGEST
      and len(pair.target) <= LONGEST
    )
    chosen += [pair for pair, _ in zip(fitting, range(count), strict=False)]
  return chosen


def materials(size: Size) -> dict[str, distill.Material]:
  """By whose texts: the corpus', and the target's answers to the same sources."""
  vocabulary = text.sentencepiece_vocabulary(ASSETS / 'vocab.model')
  target = store.load(ASSETS / 'target.safetensors')
  pairs = short_pairs(vocabulary, 'train', size.sources // len(TASKS))
  answered = answers.answer(
    target,
    vocabulary,
    [pair.source for pair in pairs],
    temperature=1.0,
    seed=0,
    num_top=1,
    max_new_tokens=LONGEST,
    batch_size=size.rows if size is QUICK else 64,
  )
  own = texts.answer_pairs([each for _, each in sorted(answered, key=lambda x: x[0])])
  held = [pair.source for pair in short_pairs(vocabulary, 'valid', size.prompts)]
  prompts = {
    task: held[i * size.prompts : (i + 1) * size.prompts]
    for i, task in enumerate(TASKS)
  }
  return {
    'corpus': distill.Material(target, vocabulary, pairs, prompts),
    'target': distill.Material(target, vocabulary, own, prompts),
  }


def first(name: str, target: store.Checkpoint) -> tuple[DistillConfig, Recipe]:
  """Shape and beginning of a draft; steps and divergence are replaced later."""
  if name.startswith('cut'):
    model = dataclasses.replace(target.config, num_decoder_layers=1)
    return DistillConfig(model, FitConfig(1)), Recipe(start='target')
  model = store.load(ASSETS / 'draft.safetensors').config
  # A third of the rate: it has been trained, and its rate had fallen to 0.
  return DistillConfig(model, FitConfig(1, learning_rate=3e-3)), Recipe()


def key(record: dict) -> tuple[str, str, str, int]:
  """What tells runs apart."""
  return tuple(record[name] for name in ('draft', 'divergence', 'data', 'steps'))


def run_all(
  size: Size,
  runs: dict[str, Sequence[tuple[str, str]]],
  folder: pathlib.Path,
  done: Sequence[dict] = (),
) -> Iterator[dict]:
  """One record for each run, but for those that were done before."""
  seen = {key(record) for record in done}
  runs = {
    draft: [
      each
      for each in settings
      if (draft, *each, steps_of(draft, size.steps)) not in seen
    ]
    for draft, settings in runs.items()
  }
  runs = {draft: settings for draft, settings in runs.items() if settings}
  if not runs:
    return
  by_texts = materials(size)
  target = by_texts['corpus'].target
  for draft, settings in runs.items():
    config, recipe = first(draft, target)
    steps = steps_of(draft, size.steps)
    config = dataclasses.replace(
      config,
      fit=dataclasses.replace(
        config.fit,
        total_steps=steps,
        warmup_steps=steps // 10,
        checkpoint_seconds=1e9,
        log_steps=steps,
      ),
      data=DataConfig(
        buckets=((LONGEST, LONGEST),), tokens_per_batch=2 * LONGEST * size.rows
      ),
    )
    params = None
    if draft == 'embedded':
      params = store.load(ASSETS / 'draft.safetensors').params
    measure = distill.make_measure(recipe, by_texts['corpus'], config.model, seed=0)
    before = measure(
      distill.first_params(config, recipe, target) if params is None else params
    )
    for divergence, data in settings:
      chosen = dataclasses.replace(
        recipe,
        divergence=divergence,
        data=data,
        measure_steps=max(1, steps // 4),
      )
      began = time.monotonic()
      place = folder / f'{draft}_{divergence}_{data}'
      material = by_texts['target' if data in ('target', 'mixed') else 'corpus']
      distill.learn(config, chosen, material, place, params=params, measure=measure)
      scores = [
        json.loads(line) for line in (place / 'scores.jsonl').read_text().splitlines()
      ]
      best = max(scores, key=lambda each: each['speedup'])
      yield {
        'draft': draft,
        'divergence': divergence,
        'data': data,
        'steps': steps,
        'alpha': {'0': round(before['all'], 4)}
        | {str(each['step']): round(each['alpha'], 4) for each in scores},
        'alpha_by_task': {task: round(scores[-1]['alphas'][task], 4) for task in TASKS},
        'best_step': best['step'],
        'c': round(best['c'], 4),
        'gamma': best['gamma'],
        'speedup': round(best['speedup'], 3),
        'seconds': round(time.monotonic() - began),
      }


def last_alpha(record: dict) -> float:
  return record['alpha'][str(record['steps'])]


def gain(record: dict, records: Sequence[dict]) -> float:
  """alpha at the last step less that of cross-entropy on the corpus."""
  (baseline,) = (
    each
    for each in records
    if (each['draft'], each['divergence'], each['data']) == (record['draft'], *BASELINE)
  )
  return last_alpha(record) - last_alpha(baseline)


def table(records: Sequence[dict]) -> rich.table.Table:
  found = rich.table.Table()
  names = ('draft', 'divergence', 'texts', 'alpha before', 'alpha', 'over CE', *TASKS,
           'gamma', 'S', 'seconds')  # fmt: skip
  for name in names:
    found.add_column(name, no_wrap=True)
  for each in records:
    found.add_row(
      each['draft'],
      each['divergence'],
      each['data'],
      f'{each["alpha"]["0"]:.3f}',
      f'{last_alpha(each):.3f}',
      f'{gain(each, records):+.3f}',
      *(f'{each["alpha_by_task"][task]:.3f}' for task in TASKS),
      str(each['gamma']),
      f'{each["speedup"]:.2f}',
      str(each['seconds']),
    )
  return found


def panels(records: Sequence[dict]) -> dict[str, list[dict]]:
  """Which runs a picture's panels show, by title."""

  def chosen(draft, condition):
    return [
      each
      for each in records
      if each['draft'] == draft
      and ((each['divergence'], each['data']) == BASELINE or condition(each))
    ]

  return {
    "divergences, on the target's texts": chosen(
      'cut', lambda each: each['data'] == 'target'
    ),
    'whose texts, with forward KL': chosen(
      'cut', lambda each: each['divergence'] == 'forward_kl'
    ),
    f'for {LONGER["cut, longest"]} times as long': chosen(
      'cut, longest', lambda each: True
    ),
    'from the embedded draft on': chosen('embedded', lambda each: True),
  }


def picture(records: Sequence[dict], path: pathlib.Path) -> None:
  """alpha by step: the divergences, the sources of texts, the embedded draft."""
  import matplotlib

  matplotlib.use('agg')
  from matplotlib import pyplot

  shown_by_title = panels(records)
  figure, axes = pyplot.subplots(
    1, len(shown_by_title), figsize=(16, 4.8), layout='constrained'
  )
  for axis, (title, shown) in zip(axes, shown_by_title.items(), strict=True):
    axis.set(title=title, xlabel='step')
    if not shown:  # a quick run
      continue
    for each in shown:
      steps = sorted(int(step) for step in each['alpha'])
      is_baseline = (each['divergence'], each['data']) == BASELINE
      by_data = title.startswith('whose')
      label = each['data'] if by_data else each['divergence'].replace('_', ' ')
      axis.plot(
        steps,
        [each['alpha'][str(step)] for step in steps],
        marker='o',
        markersize=3,
        color='black' if is_baseline else None,
        linestyle='--' if is_baseline else '-',
        label='cross entropy, corpus' if is_baseline else label,
      )
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, ncols=2, loc='upper center', bbox_to_anchor=(0.5, -0.15))
  axes[0].set_ylabel('alpha at T = 1, held out')
  figure.savefig(path, dpi=110, metadata={'Software': None})
  pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='two steps: for tests')
  parser.add_argument(
    '--steps',
    type=int,
    help='of each run, 4 and 16 times as many of the longer ones; default 100',
  )
  parser.add_argument('--output', type=pathlib.Path, default=HERE)
  options = parser.parse_args(argv)
  size, runs = (QUICK, QUICK_RUNS) if options.quick else (FULL, RUNS)
  if options.steps is not None:
    size = size._replace(steps=options.steps)
  options.output.mkdir(parents=True, exist_ok=True)
  path = options.output / 'results.jsonl'
  records = []
  if path.is_file() and not options.quick:
    records = [json.loads(line) for line in path.read_text().splitlines()]
  with tempfile.TemporaryDirectory() as folder:
    for record in run_all(size, runs, pathlib.Path(folder), records):
      records.append(record)
      path.write_text(''.join(json.dumps(each) + '\n' for each in records))
  records = [
    each for each in records if each['steps'] == steps_of(each['draft'], size.steps)
  ]
  rich.console.Console(width=130).print(table(records))
  picture(records, options.output / 'alpha.png')


if __name__ == '__main__':
  main()
