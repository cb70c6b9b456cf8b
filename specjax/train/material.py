"""What a draft is distilled from: a frozen target, texts, and held-out prompts."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from specjax.checkpoints import formats, leaves, store
from specjax.data import corpus, mixture, text
from specjax.train import evaluate, texts
from specjax.train.answers import answer, load_answers, save_answers
from specjax.train.config import DistillConfig
from specjax.train.recipe import Recipe
from specjax.train.train import open_sources


class Material(NamedTuple):
  """What a recipe is carried out with.

  Attributes:
    target: the frozen target.
    vocabulary: of both.
    pairs: sources with the texts to learn on, or, for texts that are sampled as
      training goes, with texts whose lengths they may have.
    prompts: held-out sources by name, ids with EOS.
  """

  target: store.Checkpoint
  vocabulary: text.Vocabulary
  pairs: Sequence[corpus.Pair]
  prompts: Mapping[str, Sequence[Sequence[int]]]


def open_target(path: str, dtype: str = 'float32') -> store.Checkpoint:
  """A target of any format, on the default device.

  Args:
    path: as for `formats.open_weights`.
    dtype: of parameters and activations, 'float32' or 'bfloat16'.

  Raises:
    ValueError: there is no checkpoint, or it is damaged.
  """
  weights = formats.open_weights(path)
  config = dataclasses.replace(weights.config, dtype=dtype)
  params = leaves.restore(weights, dtype=dtype)
  return store.Checkpoint(config, params, dict(weights.notes))


def read_prompts(
  config: DistillConfig, recipe: Recipe, vocabulary: text.Vocabulary
) -> dict[str, list[list[int]]]:
  """The held-out sources on which alpha is measured, by name.

  Raises:
    ValueError: none is named, and files have no split of their own.
  """
  names = evaluate.held_out_names(config)
  if not names:
    raise ValueError(
      'eval.sources: alpha is measured on held-out sources, and files have no split of '
      'their own; name some with --valid'
    )
  prompts = {}
  for name in names:
    source = evaluate.open_held_out(config, vocabulary, name)
    examples = source.examples(0, 0)[: recipe.num_prompts]
    prompts[name] = [list(source.encode(each).source) for each in examples]
  return prompts


def read_material(
  config: DistillConfig,
  recipe: Recipe,
  target: store.Checkpoint,
  vocabulary: text.Vocabulary,
  folder: Path,
) -> Material:
  """One epoch of the mixture as material.

  The target's answers, which data 'target' and 'mixed' need, are kept in
  `folder/answers.npz` and used again: remove the file when target or sources have
  changed.

  Raises:
    ValueError: as for `read_prompts` and `mixture.open_source`.
  """
  prompts = read_prompts(config, recipe, vocabulary)
  if recipe.data not in ('target', 'mixed'):
    pairs = _read_pairs(config, vocabulary)
    return Material(target, vocabulary, pairs, prompts)
  path = folder / 'answers.npz'
  if not path.is_file():
    found = answer(
      target,
      vocabulary,
      [pair.source for pair in _read_pairs(config, vocabulary)],
      temperature=recipe.temperature,
      seed=config.fit.seed,
      num_top=1,  # laws are computed anew, over the whole vocabulary
      max_new_tokens=max(length for _, length in config.data.buckets) - 1,
    )
    save_answers(path, [each for _, each in found])
  pairs = texts.answer_pairs(load_answers(path))
  return Material(target, vocabulary, pairs, prompts)


def _read_pairs(config: DistillConfig, vocabulary: text.Vocabulary):
  sources = open_sources(config.data, vocabulary)
  return list(mixture.epoch_pairs(sources, config.fit.seed, 0))
