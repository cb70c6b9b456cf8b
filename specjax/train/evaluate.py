"""Held-out examples: loss and accuracy per token, and decoded texts with scores."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from specjax.core import autoregressive, rng, types
from specjax.core import warp as warps
from specjax.data import corpus, mixture, pairs, tasks, text
from specjax.eval import scores
from specjax.models import t5
from specjax.parallel import mesh as mesh_lib
from specjax.parallel.model import shard_model
from specjax.parallel.rules import TENSOR_PARALLEL
from specjax.train.config import TrainConfig
from specjax.train.loss import teacher_forcing

ROWS = 32  # decoded together


class HeldOut(NamedTuple):
  """Examples of one source that are not trained on.

  Attributes:
    name: of the source.
    batches: for teacher forcing.
    decoded: texts, references and metrics; None: nothing is decoded.
  """

  name: str
  batches: list[corpus.Batch]
  decoded: tasks.TaskData | None


def read_held_out(config: TrainConfig, vocabulary: text.Vocabulary) -> list[HeldOut]:
  """The examples that `config.eval` names.

  Raises:
    ValueError: as for `mixture.open_source` and `tasks.read_task`.
  """
  names = held_out_names(config)
  return [_read(config, vocabulary, name) for name in names]


def held_out_names(config: TrainConfig) -> tuple[str, ...]:
  """Those of `config.eval`, or else the mixture's that have a split of their own."""
  if config.eval.sources is not None:
    return config.eval.sources
  return tuple(n for n, _ in config.data.mixture if mixture.file_of(n) is None)


def open_held_out(
  config: TrainConfig, vocabulary: text.Vocabulary, name: str
) -> mixture.Source:
  """A source's held-out split; a file is held out wholly.

  Raises:
    ValueError: as for `mixture.open_source`.
  """
  data = config.data
  return mixture.open_source(
    name,
    vocabulary,
    max_source=data.max_source,
    split=_split(config, name),
    noise_density=data.noise_density,
    mean_span=data.mean_span,
    task_module=data.task_module,
  )


def _split(config: TrainConfig, name: str) -> str:
  is_embedded = name in corpus.PREFIXES and config.data.task_module is None
  return 'valid' if is_embedded else 'validation'


def _read(config: TrainConfig, vocabulary: text.Vocabulary, name: str) -> HeldOut:
  data, evaluation = config.data, config.eval
  source = open_held_out(config, vocabulary, name)
  examples = source.examples(0, 0)[: evaluation.num_examples]
  found = corpus.batch_pairs(
    map(source.encode, examples), data.buckets[-1:], data.tokens_per_batch, '0'
  )
  batches = list(found)
  if not batches:
    raise ValueError(
      f'eval: no target of {name} has at most {data.buckets[-1][1]} ids, the length '
      'of the last bucket; give a longer one'
    )
  decoded = None
  if evaluation.decode_examples and not name.startswith(mixture.SPANS):
    decoded = _read_texts(config, name)
  return HeldOut(name, batches, decoded)


def _read_texts(config: TrainConfig, name: str) -> tasks.TaskData:
  count, split = config.eval.decode_examples, _split(config, name)
  if mixture.file_of(name) is None:
    return tasks.read_task(
      name, split, num_examples=count, module=config.data.task_module
    )
  sources, targets = zip(*pairs.read_pairs(name)[:count], strict=True)
  metrics = tuple(getattr(scores, metric) for metric in config.eval.metrics)
  for metric in metrics:
    metric([''], [''])  # a package that is missing is missed now
  return tasks.TaskData(name, split, list(sources), list(targets), metrics)


def make_evaluate(
  config: TrainConfig, vocabulary: text.Vocabulary, mesh: Mesh | None = None
) -> Callable[[Any], Mapping[str, float]]:
  """Per source: loss and accuracy per token, and its metrics of decoded texts.

  Args:
    config: of the run.
    vocabulary: of the run.
    mesh: where the parameters lie.

  Returns:
    `params -> {'ende/loss': ..., 'ende/accuracy': ..., 'ende/bleu': ...}`.
  """
  held_out = read_held_out(config, vocabulary)
  logits = teacher_forcing(config.model)

  @jax.jit
  def count(params, batch):
    targets_BT = batch.targets_BT
    real_BT = targets_BT != text.PAD_ID
    logits_BTV = logits(params, batch.sources_BE, targets_BT)
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)
    right_BT = real_BT & (jnp.argmax(logits_BTV, -1) == targets_BT)
    return jnp.stack([jnp.sum(losses_BT, where=real_BT), right_BT.sum(), real_BT.sum()])

  def evaluate(params: Any) -> dict[str, float]:
    values = {}
    for name, batches, decoded in held_out:
      loss, right, real = np.sum([count(params, batch) for batch in batches], axis=0)
      values[f'{name}/loss'] = float(loss / real)
      values[f'{name}/accuracy'] = float(right / real)
      if decoded is not None:
        texts = decode(
          config.model,
          params,
          vocabulary,
          text.encode_sources(
            vocabulary, decoded.sources, config.data.max_source, truncate=True
          ),
          max_new_tokens=config.eval.max_new_tokens,
          mesh=mesh,
        )
        found = tasks.score(decoded, texts)
        values |= {f'{name}/{metric}': score for metric, score in found.items()}
    return values

  return evaluate


def decode(
  config: t5.T5Config,
  params: Any,
  vocabulary: text.Vocabulary,
  sources: Sequence[Sequence[int]],
  *,
  max_new_tokens: int,
  mesh: Mesh | None = None,
) -> list[str]:
  """Greedy outputs of the compiled loop, in the order of the sources.

  Args:
    config: the network's shape.
    params: where they were trained.
    vocabulary: of the run.
    sources: ids with EOS.
    max_new_tokens: longest output.
    mesh: where the parameters lie.
  """
  model = t5.t5_model(config)
  if mesh is not None:
    model = shard_model(model, mesh, TENSOR_PARALLEL, t5.cache_axes)
  warp = warps.make_warp(vocabulary.size, vocabulary.eos_id)
  num_rows = mesh_lib.padded_rows(min(ROWS, len(sources)), mesh)
  texts = [''] * len(sources)
  for padded, rows in text.group_by_length([len(ids) for ids in sources], num_rows):
    filled = np.arange(num_rows) < len(rows)
    inputs_BE = text.pad([sources[row] for row in rows], padded, num_rows)
    inputs_BE[~filled, 0] = vocabulary.eos_id  # a softmax needs a term
    arguments = (
      inputs_BE,
      rng.row_keys(0, np.arange(num_rows)),
      warps.make_sampling(num_rows, max_new_tokens=np.where(filled, max_new_tokens, 0)),
    )
    if mesh is not None:
      arguments = mesh_lib.place_rows(arguments, mesh)
    state = autoregressive.decode(
      types.Params(params),
      jnp.asarray(arguments[0]),
      *arguments[1:],
      target=model,
      warp=warp,
      max_len=text.bucket_length(max_new_tokens) + 1,
      eos_id=vocabulary.eos_id,
    )
    tokens_BS, length_B = np.asarray(state.tokens_BS), np.asarray(state.length_B)
    for row, ids_S, length in zip(rows, tokens_BS, length_B, strict=False):
      texts[row] = vocabulary.decode(ids_S[1:length])
  return texts
