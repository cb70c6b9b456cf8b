"""Distils a draft from a target: `python -m specjax.train.distill --config FILE`.

What a draft must predict is the target, not the corpus. With a `Recipe` it learns
the target's whole law, in the divergence and at the prefixes that the recipe names
(DistillSpec: Zhou et al. 2023, arXiv 2310.08461), alpha is measured on held-out
prompts as it goes, and the draft of the largest promised speedup is kept. Without
one it learns from a file of the target's answers (`train.answers`), as the embedded
draft did.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import tyro

from specjax.checkpoints import store
from specjax.core import types
from specjax.core import warp as warps
from specjax.data import corpus, text
from specjax.models import t5
from specjax.parallel import topology
from specjax.train import resuming, shape_costs, slicing, texts
from specjax.train.answers import (
  answer,
  answer_train_split,
  answer_valid_split,
  distillation,
  endless_batches,
  load_answers,
  make_agreement,
  save_answers,
)
from specjax.train.config import DistillConfig, load_config, run_command
from specjax.train.fit import TrainState, fit
from specjax.train.recipe import DATA, DIVERGENCES, Recipe
from specjax.train.select import held_out, make_selection, measure_alpha
from specjax.train.train import VOCABULARY_PATH, init_params, teacher_forcing


class Material(NamedTuple):
  """What a recipe is carried out with.

  Attributes:
    target: the frozen target.
    vocabulary: of both.
    pairs: sources with the texts to learn on, or, for texts that are sampled as
      training goes, with texts whose lengths they may have.
    prompts: held-out sources by task, ids with EOS.
  """

  target: store.Checkpoint
  vocabulary: text.Vocabulary
  pairs: Sequence[corpus.Pair]
  prompts: Mapping[str, Sequence[Sequence[int]]]


def first_params(config: DistillConfig, recipe: Recipe, target: store.Checkpoint):
  """Parameters to begin with: random, or cut from the target's."""
  if recipe.start == 'random':
    return init_params(config.model, config.fit.seed)
  params = slicing.cut(
    target.params,
    target.config,
    config.model,
    encoder_layers=recipe.encoder_layers,
    decoder_layers=recipe.decoder_layers,
  )
  return jax.tree.map(jax.numpy.asarray, params)


def costs(recipe: Recipe, target: t5.T5Config, draft: t5.T5Config) -> float:
  """c: what the recipe says, or else by the roofline, in bfloat16."""
  if recipe.c is not None:
    return recipe.c
  place = topology.find(recipe.topology)
  request = shape_costs.Request()
  target, draft = (
    dataclasses.replace(each, dtype='bfloat16') for each in (target, draft)
  )
  found = shape_costs.roofline_costs(target, place, request, 1)
  return shape_costs.draft_seconds(draft, place, request, found) / found.plain


def make_measure(
  recipe: Recipe, material: Material, draft: t5.T5Config, seed: int
) -> Callable[[Any], dict[str, float]]:
  """`draft params -> {'all': alpha, task: alpha, ...}` on the held-out prompts.

  The target answers the prompts here, once; 'all' is the mean over all prefixes.
  """
  target = t5.t5_model(material.target.config)
  target_params = jax.device_put(material.target.params)
  vocabulary = material.vocabulary
  warp = warps.make_warp(vocabulary.size, vocabulary.eos_id)
  prompts = {
    task: held_out(
      target,
      target_params,
      vocabulary,
      sources,
      temperature=recipe.temperature,
      seed=seed,
    )
    for task, sources in material.prompts.items()
  }
  every = [each for task_prompts in prompts.values() for each in task_prompts]

  def measure(params: Any) -> dict[str, float]:
    both = types.Params(target_params, params)
    models: dict[str, Any] = {
      'target': target, 'draft': t5.t5_model(draft), 'warp': warp
    }  # fmt: skip
    named = {'all': every, **prompts} if len(prompts) > 1 else {'all': every}
    return {name: measure_alpha(both, each, **models) for name, each in named.items()}

  return measure


def learn(
  config: DistillConfig,
  recipe: Recipe,
  material: Material,
  folder: Path,
  *,
  params: Any = None,
  measure: Callable[[Any], Mapping[str, float]] | None = None,
  resume: bool = False,
) -> TrainState:
  """Carries out a recipe.

  Leaves in `folder`: `best.safetensors`, the draft of the largest S, with its score
  in its notes; `scores.jsonl`, all measurements; `model.safetensors`, the last one.

  Args:
    config: shape, schedule, batches.
    recipe: what is learnt.
    material: from what.
    folder: made if absent.
    params: to begin with; None: as `recipe.start` says.
    measure: from `make_measure`; None: made here.
    resume: go on from the checkpoint in `folder`.

  Raises:
    ValueError: widths of the logits differ, or see `fit`.
  """
  resuming.make_folder(folder)
  target, total_steps = material.target, config.fit.total_steps
  if config.model.vocab_size != target.config.vocab_size:
    raise ValueError(
      f'vocab_size: {config.model.vocab_size} of the draft, {target.config.vocab_size} '
      "of the target; give the draft the target's, padding included"
    )
  if measure is None:
    measure = make_measure(recipe, material, config.model, config.fit.seed)

  def write(path: Path, params: Any, notes: Mapping[str, Any]) -> None:
    about = {'seed': config.fit.seed, 'recipe': dataclasses.asdict(recipe), **notes}
    store.save(path, params, config.model, notes=about)

  selection = make_selection(
    folder,
    measure,
    write,
    c=costs(recipe, target.config, config.model),
    v=recipe.v,
    measure_steps=recipe.measure_steps,
    total_steps=total_steps,
    max_gamma=recipe.max_gamma,
  )
  return fit(
    config.fit,
    texts.objective(recipe, teacher_forcing(config.model), material.vocabulary.size),
    first_params(config, recipe, target) if params is None else params,
    lambda step: texts.pair_batches(
      material.pairs,
      config.data.buckets,
      config.data.tokens_per_batch,
      config.fit.seed,
      step,
    ),
    folder,
    export=lambda params, step: write(
      folder / 'model.safetensors', params, {'step': step}
    ),
    prepare=texts.make_prepare(
      recipe,
      t5.t5_model(target.config),
      jax.device_put(target.params),
      t5.t5_model(config.model),
      config.model.vocab_size,
      material.vocabulary,
      total_steps=total_steps,
      seed=config.fit.seed,
    ),
    observe=selection.observe,
    resume=resume,
    identity={**identify(config, target), 'recipe': dataclasses.asdict(recipe)},
  )


def identify(config: DistillConfig, target: store.Checkpoint) -> dict[str, Any]:
  """What makes a run the one that it is: another is not resumed."""
  return {
    'model': config.model.to_dict(),
    'data': dataclasses.asdict(config.data),
    'optimizer': config.fit.optimizer,
    'seed': config.fit.seed,
    'corpus_sha256': corpus.corpus_sha256(),
    'target': int(resuming.checksum(target.params)),
  }


def read_material(
  config: DistillConfig, recipe: Recipe, target: store.Checkpoint, folder: Path
) -> Material:
  """The embedded corpus as material.

  The target's answers, which data 'target' and 'mixed' need, are kept in
  `folder/answers.npz` and used again: remove the file when the target has changed.
  """
  vocabulary = text.sentencepiece_vocabulary(VOCABULARY_PATH)
  mixture = dict(config.data.mixture)

  def encode(examples) -> Iterator[corpus.Pair]:
    for each in examples:
      yield corpus.encode_example(vocabulary, each, config.data.max_source)

  chosen = corpus.epoch_examples(
    corpus.read_corpus('train'), mixture, config.fit.seed, 0
  )
  pairs = list(encode(chosen))
  if recipe.data in ('target', 'mixed'):
    path = folder / 'answers.npz'
    if not path.is_file():
      sources = [pair.source for pair in pairs]
      found = answer(
        target,
        vocabulary,
        sources,
        temperature=recipe.temperature,
        seed=config.fit.seed,
        num_top=1,  # laws are computed anew, over the whole vocabulary
      )
      save_answers(path, [each for _, each in found])
    pairs = texts.answer_pairs(load_answers(path))
  held = corpus.read_corpus('valid')
  held += corpus.fix_examples(held)
  prompts = {
    task: [
      pair.source
      for pair in encode([e for e in held if e.task == task][: recipe.num_prompts])
    ]
    for task in mixture
  }
  return Material(target, vocabulary, pairs, prompts)


def distill(
  config: DistillConfig,
  target: Path,
  folder: Path,
  *,
  recipe: Recipe | None = None,
  resume: bool = False,
) -> TrainState:
  """Distils a draft on the embedded corpus; leaves it in `folder`.

  Args:
    config: the draft and its schedule.
    target: weights of the target.
    folder: where everything goes; made if absent.
    recipe: see `learn`; None: `learn_answers`.
    resume: go on from the checkpoint in `folder`.
  """
  resuming.make_folder(folder)
  teacher = store.load(target)
  if recipe is None:
    return learn_answers(config, teacher, folder, resume=resume)
  material = read_material(config, recipe, teacher, folder)
  return learn(config, recipe, material, folder, resume=resume)


def learn_answers(
  config: DistillConfig,
  target: store.Checkpoint,
  folder: Path,
  *,
  resume: bool = False,
) -> TrainState:
  """Learns the laws kept with the target's answers, cut to their likeliest ids.

  Answers are kept in `folder/answers.npz` and used again if they exist: remove
  the file when the target has changed. Leaves `model.safetensors` in `folder`.
  """
  vocabulary = text.sentencepiece_vocabulary(VOCABULARY_PATH)
  began = time.monotonic()
  path = folder / 'answers.npz'
  if path.is_file():
    answers = load_answers(path)
  else:
    answers = answer_train_split(config, target, vocabulary)
    save_answers(path, answers)
  valid = answer_valid_split(config, target, vocabulary)

  def export(params, step):
    notes = {
      'step': step,
      'seed': config.fit.seed,
      'corpus_sha256': corpus.corpus_sha256(),
      'answers': len(answers),
      'seconds_of_this_run': round(time.monotonic() - began),
    }
    store.save(folder / 'model.safetensors', params, config.model, notes=notes)

  return fit(
    config.fit,
    distillation(config.model, config.hard_weight),
    init_params(config.model, config.fit.seed),
    lambda step: endless_batches(
      answers, config.data.buckets, config.data.tokens_per_batch, config.fit.seed, step
    ),
    folder,
    export=export,
    evaluate=make_agreement(config.model, valid),
    resume=resume,
    identity={
      **identify(config, target),
      'hard_weight': config.hard_weight,
      'answers': len(answers),
    },
  )


def _replaces(name: str) -> Any:
  return tyro.conf.arg(
    help=f"Replaces the recipe's {name}; makes one if there is none."
  )


def main(
  config: Annotated[str, tyro.conf.arg(help='A file that defines CONFIG.')],
  target: Annotated[str, tyro.conf.arg(help="The target's weights.")],
  folder: Annotated[str, tyro.conf.arg(help='Where checkpoints go.')],
  resume: Annotated[bool, tyro.conf.arg(help='Go on from the checkpoint.')] = False,
  total_steps: Annotated[
    int | None, tyro.conf.arg(help='Replaces fit.total_steps.')
  ] = None,
  divergence: Annotated[
    Literal[DIVERGENCES] | None,  # type: ignore[valid-type]
    _replaces('divergence'),
  ] = None,
  data: Annotated[Literal[DATA] | None, _replaces('data')] = None,  # type: ignore[valid-type]
  start: Annotated[Literal['random', 'target'] | None, _replaces('start')] = None,
  c: Annotated[
    float | None, tyro.conf.arg(help="Time of a draft step / of a target's, for S.")
  ] = None,
  v: Annotated[
    float | None, tyro.conf.arg(help='Time of verifying / of a target step, for S.')
  ] = None,
) -> None:
  """Distils a draft from a target on the embedded corpus."""
  loaded = load_config(config, DistillConfig)
  if total_steps is not None:
    schedule = dataclasses.replace(loaded.fit, total_steps=total_steps)
    loaded = dataclasses.replace(loaded, fit=schedule)
  asked = {
    'divergence': divergence, 'data': data, 'start': start, 'c': c, 'v': v
  }  # fmt: skip
  changes = {name: value for name, value in asked.items() if value is not None}
  recipe = loaded.recipe
  if changes:
    recipe = dataclasses.replace(recipe or Recipe(), **changes)  # type: ignore[arg-type]
  distill(
    loaded,
    Path(target).expanduser(),
    Path(folder).expanduser(),
    recipe=recipe,
    resume=resume,
  )


if __name__ == '__main__':
  run_command(main)
