"""Which method and gamma pay on this machine? `python -m experiments.speedup`.

Decodes texts of the embedded corpus' test split one at a time, greedily, with plain
decoding and with each method in turns, everything warm; encoders and host included.
"""

import argparse
import json
import pathlib
import random

import rich.console
import rich.table

import specjax
from specjax.data import corpus
from specjax.eval import interleave

SETTINGS = (
  ('none', 4),
  ('draft_model', 2),
  ('draft_model', 4),
  ('draft_model', 8),
  ('ngram', 4),
  ('ngram', 8),
)
RESULTS = pathlib.Path(__file__).with_name('results.jsonl')


def sources(task: str, count: int) -> list[str]:
  """`count` test sources of a task, drawn with seed 0."""
  examples = corpus.read_corpus('test')
  examples += corpus.fix_examples(examples)
  chosen = [each for each in examples if each.task == task]
  chosen = random.Random(0).sample(chosen, count)
  prefix = corpus.PREFIXES[task]
  return [prefix + each.source.removeprefix(prefix) for each in chosen]


def measure(pair, task: str, count: int, repeats: int) -> list[dict]:
  """One record for each of `SETTINGS`."""
  texts = sources(task, count)
  outputs = {}

  def run(method, gamma):
    outputs[method, gamma] = pair.generate(
      texts, method=method, num_draft=gamma, batch_size=1, truncate=True
    )
    return ()

  runs = {
    f'{method} {gamma}': lambda method=method, gamma=gamma: run(method, gamma)
    for method, gamma in SETTINGS
  }
  times, _ = interleave.interleave(runs, repeats)
  plain = outputs[SETTINGS[0]]
  records = []
  for method, gamma in SETTINGS:
    results = outputs[method, gamma]
    speedup = interleave.ratio(times['none 4'], times[f'{method} {gamma}'])
    tokens = sum(len(each.ids) for each in results)
    calls = sum(each.num_target_calls for each in results)
    records.append(
      {
        'task': task,
        'method': method,
        'gamma': gamma if method != 'none' else 0,
        'texts': count,
        'tokens_per_call': round(tokens / calls, 2),
        'speedup': round(speedup.median, 2),
        'speedup_quartiles': [round(speedup.low, 2), round(speedup.high, 2)],
        'same_text': [a.ids for a in results] == [b.ids for b in plain],
      }
    )
  return records


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--count', type=int, default=40, help='texts per task')
  parser.add_argument('--repeats', type=int, default=5)
  options = parser.parse_args()
  pair = specjax.load_pair()
  records = []
  for task in corpus.PREFIXES:
    records += measure(pair, task, options.count, options.repeats)
  RESULTS.write_text(''.join(json.dumps(each) + '\n' for each in records))
  table = rich.table.Table()
  for name in ('task', 'method', 'gamma', 'tokens_per_call', 'speedup', 'same_text'):
    table.add_column(name)
  for each in records:
    table.add_row(*(str(each[column.header]) for column in table.columns))
  rich.console.Console(width=88).print(table)


if __name__ == '__main__':
  main()
