"""What a pair is worth per task: `python -m specjax.eval.pair_report --help`.

Decodes a split of the embedded corpus with every drafter, at temperatures 0 and
1, and prints alpha, acceptance, tokens per target call, BLEU and chrF. Counts
only: nothing here depends on the machine's speed (see `eval.interleave` for that).
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import rich.box
import rich.console
import rich.table
import tyro

from specjax import drafters
from specjax.checkpoints import store
from specjax.core import loop, rng, types
from specjax.core import warp as warps
from specjax.core.verify import token_verifier
from specjax.data import corpus, text
from specjax.eval import metrics
from specjax.models.t5 import t5_model
from specjax.train.config import run_command

ASSETS = Path(__file__).parents[1] / 'assets'
TASKS = ('ende', 'summ', 'fix')


class Decoded(NamedTuple):
  """A task decoded with one drafter.

  Attributes:
    texts: outputs, in the order of the sources.
    summary: counts of the loop.
    alpha: mean over the outputs' prefixes of sum_x min(p, q).
  """

  texts: list[str]
  summary: metrics.Summary
  alpha: float


class Models(NamedTuple):
  """A pair, read by `read_models`."""

  target: types.Model
  draft: types.Model
  params: types.Params
  vocabulary: text.Vocabulary
  vocab_size: int


def read_models(folder: Path) -> Models:
  """Reads `target.safetensors`, `draft.safetensors` and `vocab.model`."""
  target = store.load(folder / 'target.safetensors')
  draft = store.load(folder / 'draft.safetensors')
  return Models(
    t5_model(target.config),
    t5_model(draft.config),
    types.Params(target.params, draft.params),
    text.sentencepiece_vocabulary(folder / 'vocab.model'),
    target.config.vocab_size,
  )


def read_task(
  task: str, split: str, limit: int | None = None, seed: int = 0
) -> list[corpus.Example]:
  """A task's examples, or `limit` of them drawn by `seed`."""
  examples = corpus.read_corpus(split)
  if task == 'fix':
    examples = corpus.fix_examples(examples)
  examples = [example for example in examples if example.task == task]
  if limit is not None and limit < len(examples):
    examples = random.Random(seed).sample(examples, limit)
  return examples


def decode_task(
  models: Models,
  drafter: types.Drafter,
  sources: Sequence[Sequence[int]],
  *,
  temperature: float,
  seed: int = 0,
  max_new_tokens: int = 127,
  batch_size: int = 64,
) -> Decoded:
  """Decodes sources in the speculative loop and counts.

  Args:
    models: the pair.
    drafter: of `specjax.drafters`.
    sources: ids with EOS.
    temperature: of target and draft.
    seed: a row's stream depends on it and on the row's number.
    max_new_tokens: longest output.
    batch_size: rows decoded at once.

  Returns:
    Texts, counts, and alpha of the *draft model* on these texts.
  """
  warp = warps.make_warp(models.vocabulary.size, models.vocabulary.eos_id)
  texts = [''] * len(sources)
  summaries, alphas = [], []
  lengths = [len(source) for source in sources]
  for padded, rows in text.group_by_length(lengths, batch_size, (64, 128)):
    inputs_BE = jnp.asarray(
      text.pad([sources[row] for row in rows], padded, batch_size)
    )
    # The rows that fill up a batch have no budget, and so are born done.
    budget_B = np.where(np.arange(batch_size) < len(rows), max_new_tokens, 0)
    sampling = warps.make_sampling(
      batch_size, temperature=temperature, max_new_tokens=budget_B
    )
    state = loop.decode(
      models.params,
      inputs_BE,
      rng.row_keys(seed, np.resize(rows, batch_size)),
      sampling,
      target=models.target,
      drafter=drafter,
      verifier=token_verifier,
      warp=warp,
      max_len=max_new_tokens + 1,
      eos_id=models.vocabulary.eos_id,
    )
    summaries.append(metrics.summarize(state, models.vocabulary.eos_id))
    alphas.append(
      metrics.alpha(
        models.params,
        inputs_BE,
        state.tokens_BS[:, : max_new_tokens + 1],
        state.length_B,
        sampling,
        target=models.target,
        draft=models.draft,
        warp=warp,
      )
    )
    tokens_BS, length_B = np.asarray(state.tokens_BS), np.asarray(state.length_B)
    for i, row in enumerate(rows):
      texts[row] = models.vocabulary.decode(tokens_BS[i, 1 : length_B[i]])
  alpha = metrics.Alpha(
    np.concatenate([each.sum_B for each in alphas]),
    np.concatenate([each.count_B for each in alphas]),
  )
  return Decoded(texts, metrics.total(summaries), alpha.mean)


def report(
  folder: Path,
  *,
  split: str = 'test',
  limit: int | None = None,
  max_source: int = 128,
  num_draft: int = 4,
  num_lookup: int = 8,
) -> Iterator[dict[str, Any]]:
  """Yields one row per task, temperature and drafter.

  Args:
    folder: holds the pair.
    split: of the embedded corpus.
    limit: most examples per task, drawn by a fixed seed.
    max_source: longer sources are cut to that many ids.
    num_draft: gamma of the draft model.
    num_lookup: gamma of prompt lookup, whose drafts cost nothing.
  """
  models = read_models(folder)
  warp = warps.make_warp(models.vocabulary.size, models.vocabulary.eos_id)
  methods = {
    'draft_model': drafters.model_draft(models.draft, warp, num_draft),
    'ngram': drafters.ngram_draft(num_lookup, models.vocab_size),
  }
  for task in TASKS:
    examples = read_task(task, split, limit)
    sources = [
      corpus.encode_example(models.vocabulary, example, max_source).source
      for example in examples
    ]
    references = [example.target for example in examples]
    for temperature in (0.0, 1.0):
      for method, drafter in methods.items():
        decoded = decode_task(models, drafter, sources, temperature=temperature)
        yield {
          'task': task,
          'split': split,
          'num_examples': len(examples),
          'temperature': temperature,
          'method': method,
          'num_draft': drafter.num_draft,
          'alpha': decoded.alpha,
          'acceptance_rate': decoded.summary.acceptance_rate,
          'block_efficiency': decoded.summary.block_efficiency,
          'num_emitted_tokens': decoded.summary.num_emitted_tokens,
          **quality(decoded.texts, references),
        }


def quality(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
  """BLEU and chrF (sacrebleu's defaults) and the part that is exactly right."""
  try:
    import sacrebleu
  except ImportError as error:
    raise ValueError(
      "pair_report needs sacrebleu; install it with pip install 'specjax[eval]'"
    ) from error
  exact = np.mean([a == b for a, b in zip(texts, references, strict=True)])
  return {
    'bleu': sacrebleu.corpus_bleu(list(texts), [list(references)]).score,
    'chrf': sacrebleu.corpus_chrf(list(texts), [list(references)]).score,
    'exact_match': float(exact),
  }


def table(rows: Sequence[dict[str, Any]]) -> rich.table.Table:
  """The rows of `report` as a table."""
  columns = {
    'task': 'task',
    'temperature': 'T',
    'method': 'method',
    'num_draft': 'gamma',
    'alpha': 'alpha',
    'acceptance_rate': 'acc.',
    'block_efficiency': 'tok/call',
    'bleu': 'BLEU',
    'chrf': 'chrF',
    'exact_match': 'exact',
  }
  result = rich.table.Table(*columns.values(), box=rich.box.SIMPLE_HEAD, pad_edge=False)
  for row in rows:
    cells = [
      f'{row[key]:.3g}' if isinstance(row[key], float) else str(row[key])
      for key in columns
    ]
    result.add_row(*cells)
  return result


def main(
  folder: Annotated[Path, tyro.conf.arg(help="Holds the pair's files.")] = ASSETS,
  split: Annotated[str, tyro.conf.arg(help='train, valid or test.')] = 'test',
  limit: Annotated[
    int | None, tyro.conf.arg(help='Most examples per task; default all.')
  ] = None,
  num_draft: Annotated[int, tyro.conf.arg(help='Gamma of the draft model.')] = 4,
  num_lookup: Annotated[int, tyro.conf.arg(help='Gamma of prompt lookup.')] = 8,
  output: Annotated[Path | None, tyro.conf.arg(help='JSON file for the rows.')] = None,
) -> None:
  """Measures a pair on the embedded corpus: alpha, tokens per call, BLEU."""
  rows = []
  console = rich.console.Console()
  for row in report(
    folder, split=split, limit=limit, num_draft=num_draft, num_lookup=num_lookup
  ):
    rows.append(row)
    console.print(
      f'{row["task"]} T={row["temperature"]:g} {row["method"]}: '
      f'{row["block_efficiency"]:.2f} tokens per call'
    )
  console.print(table(rows))
  if output is not None:
    data = json.dumps({'rows': rows}, indent=1) + '\n'
    store.write_atomically(output.expanduser(), data.encode())


if __name__ == '__main__':
  run_command(main)
