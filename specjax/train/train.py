"""Trains a T5: `python -m specjax.train --config FILE --folder FOLDER`.

Teacher forcing with T5X's loss, from random weights or from a checkpoint, on files of
pairs, on spans of plain text, or on tasks; see docs/training.md.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh

from specjax.checkpoints import files, formats, leaves, store
from specjax.data import corpus, mixture, pairs, text
from specjax.data import vocabulary as vocabulary_lib
from specjax.models import t5
from specjax.parallel import mesh as mesh_lib
from specjax.train import loss, resuming
from specjax.train.config import (
  DataConfig,
  TrainConfig,
  changed,
  load_config,
  run_command,
  weighted,
)
from specjax.train.evaluate import make_evaluate
from specjax.train.fit import TrainState, fit
from specjax.train.loss import cross_entropy, shift_right, teacher_forcing
from specjax.train.metrics import has_tensorboard
from specjax.train.optimizer import param_shardings

__all__ = ['cross_entropy', 'shift_right', 'teacher_forcing', 'train']

EMBEDDED = 'embedded'
VOCABULARY_PATH = Path(__file__).parents[1] / 'assets' / 'vocab.model'
# Embeddings are padded to a multiple of 128, or of that for each device.
MAX_PADDING = 1024


def init_params(config: t5.T5Config, seed: int, mesh: Mesh | None = None) -> Any:
  """T5's random initial parameters, float32; on a mesh each device makes its own."""
  tokens = jnp.zeros((1, 1), jnp.int32)

  def init(key):
    return t5.Transformer(config).init(key, tokens, tokens)['params']

  key = jax.random.key(seed)
  if mesh is None:
    return jax.jit(init)(key)
  placed = param_shardings(jax.eval_shape(init, key), mesh)
  return jax.jit(init, out_shardings=placed)(key)


def restore_params(weights: leaves.Weights, mesh: Mesh | None = None) -> Any:
  """A checkpoint's parameters in float32; on a mesh each device reads its own."""
  if mesh is None:
    return leaves.restore(weights)
  tree = flax.traverse_util.unflatten_dict(
    {
      name: jax.ShapeDtypeStruct(leaf.shape, 'float32')
      for name, leaf in weights.leaves.items()
    },
    sep='/',
  )
  placed = flax.traverse_util.flatten_dict(param_shardings(tree, mesh), sep='/')
  return leaves.restore(weights, shardings=placed)


def find_vocabulary(vocabulary: str, init: str | None) -> tuple[text.Vocabulary, str]:
  """A run's vocabulary, and its file or 'bytes'.

  Args:
    vocabulary: of `DataConfig`; 'embedded' is what lies beside `init`, if that is
      given.
    init: a checkpoint.

  Raises:
    ValueError: there is none, or it can not be read.
  """
  if vocabulary == EMBEDDED:
    place, given = files.resolve(VOCABULARY_PATH if init is None else init), None
  else:
    place, given = files.resolve(vocabulary), vocabulary
  found, path = vocabulary_lib.find(place, given), vocabulary_lib.locate(place, given)
  if found is None or path is None:
    raise ValueError(
      f'vocabulary: none beside {place} (looked for '
      f'{", ".join(vocabulary_lib.NAMES)}); name it with --vocabulary'
    )
  return found, path


def open_sources(
  data: DataConfig, vocabulary: text.Vocabulary
) -> list[tuple[mixture.Source, float]]:
  """The mixture's sources, read and encoded, with their weights."""
  return [
    (
      mixture.open_source(
        name,
        vocabulary,
        max_source=data.max_source,
        noise_density=data.noise_density,
        mean_span=data.mean_span,
        task_module=data.task_module,
      ),
      weight,
    )
    for name, weight in data.mixture
  ]


def source_batches(
  config: TrainConfig,
  sources: list[tuple[mixture.Source, float]],
  start: int = 0,
) -> Iterator[corpus.Batch]:
  """Endless training batches; the stream from `start` on is the same stream."""
  return mixture.endless_batches(
    sources,
    config.data.buckets,
    config.data.tokens_per_batch,
    config.fit.seed,
    start,
  )


def train(
  config: TrainConfig,
  folder: Path,
  *,
  resume: bool = False,
  init: str | None = None,
) -> TrainState:
  """Trains a T5 and leaves `model.safetensors` (bfloat16) in `folder`.

  Args:
    config: everything about the run.
    folder: of the run; made if absent.
    resume: go on from the checkpoint in `folder`.
    init: a checkpoint of any format to begin with, whose shape replaces
      `config.model`'s; None: random weights.

  Raises:
    ValueError: bad input, or what `fit` raises.
  """
  vocabulary, vocabulary_path = find_vocabulary(config.data.vocabulary, init)
  weights = None if init is None else formats.open_weights(init)
  if weights is not None:
    model = dataclasses.replace(weights.config, dtype=config.model.dtype)
    config = dataclasses.replace(config, model=model)
  _check_width(config.model.vocab_size, vocabulary.size)
  mesh = None
  if (config.mesh.data, config.mesh.model) != (1, 1):
    mesh = mesh_lib.make_mesh(config.mesh.data, config.mesh.model)
  sources = open_sources(config.data, vocabulary)
  evaluate = make_evaluate(config, vocabulary, mesh)
  resuming.make_folder(folder)
  if vocabulary_path != vocabulary_lib.BYTES:  # the model can be decoded from there
    copy = folder / vocabulary_lib.NAMES[0]
    store.write_atomically(copy, files.read(vocabulary_path))
  if not has_tensorboard():
    print("metrics.jsonl only: pip install 'specjax[tensorboard]' adds event files")
  notes = {
    'seed': config.fit.seed,
    'corpus_sha256': corpus.corpus_sha256(),
    'data_sha256': {
      source.path: pairs.sha256(source.path) for source, _ in sources if source.path
    },
  }
  began = time.monotonic()

  def export(params, step):
    seconds = round(time.monotonic() - began)
    about = {'step': step, **notes, 'seconds_of_this_run': seconds}
    store.save(folder / 'model.safetensors', params, config.model, notes=about)

  loss_fn, factor = loss.from_config(config.model, config.loss)
  return fit(
    config.fit,
    loss_fn,
    init_params(config.model, config.fit.seed, mesh)
    if weights is None
    else restore_params(weights, mesh),
    functools.partial(source_batches, config, sources),
    folder,
    export=export,
    evaluate=evaluate,
    resume=resume,
    factor=factor,
    mesh=mesh,
    identity={
      'model': config.model.to_dict(),
      'data': dataclasses.asdict(config.data),
      'loss': dataclasses.asdict(config.loss),
      'optimizer': config.fit.optimizer,
      'vocabulary_size': vocabulary.size,
      **notes,
    },
  )


def _check_width(width: int, size: int) -> None:
  """Padding may differ, vocabularies may not."""
  if not size <= width < size + MAX_PADDING:
    raise ValueError(
      f'vocabulary: it has {size} ids and the model {width} logits; name its own with '
      '--vocabulary, or set model.vocab_size'
    )


def main(
  config: Annotated[str, tyro.conf.arg(help='A file that defines CONFIG.')],
  folder: Annotated[str, tyro.conf.arg(help='Where checkpoints go.')],
  resume: Annotated[bool, tyro.conf.arg(help='Go on from the checkpoint.')] = False,
  init: Annotated[
    str | None, tyro.conf.arg(help='Checkpoint to fine-tune, of any format.')
  ] = None,
  data: Annotated[
    tuple[str, ...],
    tyro.conf.arg(help='SOURCE or SOURCE=WEIGHT each; replaces data.mixture.'),
  ] = (),
  valid: Annotated[
    tuple[str, ...], tyro.conf.arg(help='Held-out sources; replaces eval.sources.')
  ] = (),
  vocabulary: Annotated[
    str | None, tyro.conf.arg(help="SentencePiece file, or 'bytes'.")
  ] = None,
  decode_examples: Annotated[
    int | None, tyro.conf.arg(help='Replaces eval.decode_examples.')
  ] = None,
  total_steps: Annotated[
    int | None, tyro.conf.arg(help='Replaces fit.total_steps.')
  ] = None,
  learning_rate: Annotated[
    float | None, tyro.conf.arg(help='Replaces fit.learning_rate.')
  ] = None,
  dtype: Annotated[
    str | None, tyro.conf.arg(help='Of activations: float32 or bfloat16.')
  ] = None,
  mesh_data: Annotated[
    int | None, tyro.conf.arg(help='Groups of devices that split the rows.')
  ] = None,
  mesh_model: Annotated[
    int | None, tyro.conf.arg(help='Devices that split the parameters.')
  ] = None,
) -> None:
  """Trains a T5."""

  loaded = load_config(config, TrainConfig)
  parts = {
    'model': changed(loaded.model, dtype=dtype),
    'fit': changed(loaded.fit, total_steps=total_steps, learning_rate=learning_rate),
    'data': changed(
      loaded.data, mixture=tuple(map(weighted, data)), vocabulary=vocabulary
    ),
    'eval': changed(loaded.eval, sources=valid, decode_examples=decode_examples),
    'mesh': changed(loaded.mesh, data=mesh_data, model=mesh_model),
  }
  train(
    dataclasses.replace(loaded, **parts),
    Path(folder).expanduser(),
    resume=resume,
    init=init,
  )


if __name__ == '__main__':
  run_command(main)
