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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from specjax.checkpoints import formats, store
from specjax.core import types
from specjax.core import warp as warps
from specjax.data import corpus, text
from specjax.models import t5
from specjax.parallel import topology
from specjax.train import resuming, shape_costs, slicing
from specjax.train import texts as texts_lib
from specjax.train.answers import (
  answer_train_split,
  answer_valid_split,
  distillation,
  endless_batches,
  load_answers,
  make_agreement,
  save_answers,
)
from specjax.train.config import (
  DistillConfig,
  changed,
  load_config,
  run_command,
  weighted,
)
from specjax.train.fit import TrainState, fit
from specjax.train.material import Material, open_target, read_material
from specjax.train.recipe import DATA, DIVERGENCES, Recipe
from specjax.train.select import held_out, make_selection, measure_alpha
from specjax.train.train import (
  find_vocabulary,
  init_params,
  restore_params,
  teacher_forcing,
)


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
  in its notes; `scores.jsonl`, all measurements, the first before the first step;
  `model.safetensors`, the last one.

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
  if params is None:
    params = first_params(config, recipe, target)
  if not resume:
    print(selection.observe(params, 0))
  return fit(
    config.fit,
    texts_lib.objective(
      recipe, teacher_forcing(config.model), material.vocabulary.size
    ),
    params,
    lambda step: texts_lib.pair_batches(
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
    prepare=texts_lib.make_prepare(
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


def distill(
  config: DistillConfig,
  target: str,
  folder: Path,
  *,
  recipe: Recipe | None = None,
  init: str | None = None,
  target_dtype: str = 'float32',
  resume: bool = False,
) -> TrainState:
  """Distils a draft and leaves it in `folder`.

  Args:
    config: the draft, its texts and its schedule.
    target: a checkpoint of any format.
    folder: where everything goes; made if absent.
    recipe: see `learn`; None: `learn_answers`, on the embedded corpus.
    init: a draft of any format to begin with, whose shape replaces `config.model`'s;
      None: as the recipe says.
    target_dtype: of the target's parameters and activations.
    resume: go on from the checkpoint in `folder`.

  Raises:
    ValueError: bad input, or what `fit` raises.
  """
  teacher = open_target(target, target_dtype)
  vocabulary, _ = find_vocabulary(config.data.vocabulary, target)
  resuming.make_folder(folder)
  if recipe is None:
    if init is not None:
      raise ValueError(f'init: {init} without a recipe; give --divergence')
    return learn_answers(config, teacher, vocabulary, folder, resume=resume)
  params = None
  if init is not None:
    weights = formats.open_weights(init)
    model = dataclasses.replace(weights.config, dtype=config.model.dtype)
    config = dataclasses.replace(config, model=model)
    params = restore_params(weights)
  material = read_material(config, recipe, teacher, vocabulary, folder)
  return learn(config, recipe, material, folder, params=params, resume=resume)


def learn_answers(
  config: DistillConfig,
  target: store.Checkpoint,
  vocabulary: text.Vocabulary,
  folder: Path,
  *,
  resume: bool = False,
) -> TrainState:
  """Learns the laws kept with the target's answers, cut to their likeliest ids.

  Answers are kept in `folder/answers.npz` and used again if they exist: remove
  the file when the target has changed. Leaves `model.safetensors` in `folder`.
  """
  others = [name for name, _ in config.data.mixture if name not in corpus.PREFIXES]
  if others:
    raise ValueError(f'data: {", ".join(others)} without a recipe; give --divergence')
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
  target: Annotated[str, tyro.conf.arg(help="The target's checkpoint, of any format.")],
  folder: Annotated[str, tyro.conf.arg(help='Where checkpoints go.')],
  resume: Annotated[bool, tyro.conf.arg(help='Go on from the checkpoint.')] = False,
  init: Annotated[
    str | None, tyro.conf.arg(help='Draft to begin with, of any format.')
  ] = None,
  data: Annotated[
    tuple[str, ...],
    tyro.conf.arg(help='SOURCE or SOURCE=WEIGHT each; replaces data.mixture.'),
  ] = (),
  valid: Annotated[
    tuple[str, ...], tyro.conf.arg(help='Held-out sources; replaces eval.sources.')
  ] = (),
  vocabulary: Annotated[
    str | None,
    tyro.conf.arg(help="SentencePiece file, or 'bytes'; else what lies by the target."),
  ] = None,
  total_steps: Annotated[
    int | None, tyro.conf.arg(help='Replaces fit.total_steps.')
  ] = None,
  learning_rate: Annotated[
    float | None, tyro.conf.arg(help='Replaces fit.learning_rate.')
  ] = None,
  target_dtype: Annotated[
    Literal['float32', 'bfloat16'], tyro.conf.arg(help='In which the target runs.')
  ] = 'float32',
  divergence: Annotated[
    Literal[DIVERGENCES] | None,  # type: ignore[valid-type]
    _replaces('divergence'),
  ] = None,
  texts: Annotated[Literal[DATA] | None, _replaces('data')] = None,  # type: ignore[valid-type]
  start: Annotated[Literal['random', 'target'] | None, _replaces('start')] = None,
  c: Annotated[
    float | None, tyro.conf.arg(help="Time of a draft step / of a target's, for S.")
  ] = None,
  v: Annotated[
    float | None, tyro.conf.arg(help='Time of verifying / of a target step, for S.')
  ] = None,
) -> None:
  """Distils a draft from a target."""
  loaded = load_config(config, DistillConfig)
  loaded = dataclasses.replace(
    loaded,
    fit=changed(loaded.fit, total_steps=total_steps, learning_rate=learning_rate),
    data=changed(
      loaded.data, mixture=tuple(map(weighted, data)), vocabulary=vocabulary
    ),
    eval=changed(loaded.eval, sources=valid),
  )
  recipe = loaded.recipe
  asked = {
    'divergence': divergence, 'data': texts, 'start': start, 'c': c, 'v': v
  }  # fmt: skip
  if any(value is not None for value in asked.values()):
    recipe = changed(recipe or Recipe(), **asked)
  distill(
    loaded,
    target,
    Path(folder).expanduser(),
    recipe=recipe,
    init=init,
    target_dtype=target_dtype,
    resume=resume,
  )


if __name__ == '__main__':
  run_command(main)
