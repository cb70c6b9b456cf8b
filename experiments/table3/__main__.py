"""Table 3: alpha of several drafts; `python -m experiments.table3`.

Each alpha is the mean of sum_x min(p(x), q(x)) over the prefixes of text that the
target itself produced at that temperature. Tables are counted on the outputs of the
same task.
"""

import jax.numpy as jnp

from experiments import common
from specjax import drafters
from specjax.config import SamplingConfig, SpeculationConfig
from specjax.data import corpus
from specjax.data.text import read_lines
from specjax.drafters.table import bigram_model, unigram_model
from specjax.pair import EMBEDDED, MAX_TABLE_IDS

# T5-XXL: task -> draft -> (T = 0, T = 1); our `ende` and `summ` resemble the two.
PAPER = {
  'ende': {'unigram': (0.08, 0.07), 'bigram': (0.20, 0.19), 'draft': (0.75, 0.62)},
  'summ': {'unigram': (0.13, 0.08), 'bigram': (0.23, 0.16), 'draft': (0.65, 0.53)},
}


def table_sequences(subject: common.Subject, task: str) -> list[list[int]]:
  """Outputs that tables are counted on; none if the configuration names none."""
  pair = subject.pair
  if pair.table_text is not None:
    texts = read_lines(pair.table_text)
  elif pair.name == EMBEDDED and task in corpus.PREFIXES:
    examples = corpus.read_corpus('train')
    examples += corpus.fix_examples(examples)
    texts = [each.target for each in examples if each.task == task]
  else:
    return []
  return [pair.vocabulary.encode(text) for text in texts]


def table_drafts(subject: common.Subject, task: str) -> dict:
  """name -> (model, parameters) of the tables that there is text for."""
  num_ids = subject.pair.target_config.vocab_size
  sequences = table_sequences(subject, task)
  if not sequences:
    return {}
  unigram_V = drafters.fit_unigram(sequences, num_ids)
  drafts = {'unigram': (unigram_model, jnp.asarray(unigram_V))}
  if num_ids <= MAX_TABLE_IDS:
    bigram_VV = drafters.fit_bigram(sequences, num_ids)
    drafts['bigram'] = (bigram_model, jnp.asarray(bigram_VV))
  return drafts


def measure(subject: common.Subject) -> list[dict]:
  """One record for each task, draft and temperature."""
  pair, records = subject.pair, []
  for task, sources in subject.sources.items():
    drafts = table_drafts(subject, task)
    if pair.draft is not None:
      drafts['draft'] = (pair.draft, pair.params.draft)
    for temperature in (0.0, 1.0):
      sampling = SamplingConfig(temperature=temperature)
      plain = SpeculationConfig('none')
      run = common.prepare(pair, sources, sampling, plain, batch_size=16)
      outputs = run.generations(pair)
      text = common.prefixes(pair, sources, outputs, sampling)
      for name, (model, params) in drafts.items():
        paper = PAPER.get(task, {}).get(name)
        records.append(
          {
            'task': task,
            'draft': name,
            'temperature': temperature,
            'tokens': sum(len(each.ids) for each in outputs),
            'alpha': round(common.measure_alpha(pair, text, model, params), 3),
            'alpha_paper': paper and paper[int(temperature)],
          }
        )
  return records


def main(argv: list[str] | None = None) -> None:
  parser = common.pair_parser('table3', __doc__, count=32)
  options = common.parse(parser, argv, count=1)
  records = measure(common.load_subject(options.config, options.count))
  common.write_records(options.output, records)
  common.print_table(records)


if __name__ == '__main__':
  common.run(main)
