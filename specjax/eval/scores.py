"""How texts are scored against references: SeqIO's convention, T5's definitions.

A metric is a function `(targets, predictions) -> {name: score}`, scores from 0 to
100, as SeqIO's `metric_fns` are. BLEU is sacrebleu's with the 'intl' tokenisation
and ROUGE is rouge_score's F1 (no stemming, mid bootstrap value), as T5 evaluates
WMT and CNN/DailyMail (Raffel et al. 2020). Both packages are in the extra `eval`.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

Metric = Callable[[Sequence[str], Sequence[str]], dict[str, float]]

ROUGE_KEYS = ('rouge1', 'rouge2', 'rougeLsum')


def bleu(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
  """Corpus BLEU; a target may be a list, of all references of its text."""
  sacrebleu = _needed('sacrebleu')
  references = (
    [list(column) for column in zip(*targets, strict=True)]
    if isinstance(targets[0], list)
    else [list(targets)]
  )
  result = sacrebleu.corpus_bleu(list(predictions), references, tokenize='intl')
  return {'bleu': result.score}


def chrf(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
  """Corpus chrF2 with sacrebleu's defaults."""
  sacrebleu = _needed('sacrebleu')
  return {'chrf': sacrebleu.corpus_chrf(list(predictions), [list(targets)]).score}


def rouge(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
  """ROUGE-1, -2 and -Lsum."""
  rouge_scorer = _needed('rouge_score.rouge_scorer')
  scorer = rouge_scorer.RougeScorer([*ROUGE_KEYS])
  aggregator = _needed('rouge_score.scoring').BootstrapAggregator()
  for target, prediction in zip(targets, predictions, strict=True):
    # ROUGE-Lsum takes each line for a sentence.
    target, prediction = (x.replace(' . ', ' .\n') for x in (target, prediction))
    aggregator.add_scores(scorer.score(target=target, prediction=prediction))
  result = aggregator.aggregate()
  return {key: float(result[key].mid.fmeasure * 100) for key in ROUGE_KEYS}


def exact_match(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
  """The part of texts that equal their reference."""
  equal = [a == b for a, b in zip(targets, predictions, strict=True)]
  return {'exact_match': 100 * sum(equal) / len(equal)}


def is_available(metric: Metric) -> bool:
  """Whether the package that the metric needs can be imported."""
  packages: dict[Metric, str] = {
    bleu: 'sacrebleu',
    chrf: 'sacrebleu',
    rouge: 'rouge_score',
  }
  package = packages.get(metric)
  try:
    return package is None or bool(importlib.import_module(package))
  except ImportError:
    return False


def _needed(name: str) -> Any:
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ValueError(
      f'task: scoring needs {name.partition(".")[0]}; install it with '
      "pip install 'specjax[eval]'"
    ) from error
