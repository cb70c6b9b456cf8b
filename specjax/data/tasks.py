"""Tasks: sources, references, and how outputs are scored.

  ende, summ, fix      the embedded corpus; neither seqio nor TensorFlow is needed
  wmt_t2t_ende_v003    WMT14 English to German, as T5 and the paper evaluate it
  cnn_dailymail_v002   CNN/DailyMail, likewise
  any other            a SeqIO task, by the name under which a module registers it

The second kind is read by TFDS, and prepared as T5's tasks of these names do it.
seqio and TensorFlow are imported where they are used, and nowhere else.
"""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.config import suggest
from specjax.data import corpus
from specjax.eval import scores

SPLIT_ALIASES = {'validation': 'valid'}
EMBEDDED_METRICS: dict[str, tuple[scores.Metric, ...]] = {
  'ende': (scores.bleu, scores.chrf),
  'summ': (scores.rouge, scores.chrf),
  'fix': (scores.bleu, scores.chrf, scores.exact_match),
}


class TaskData(NamedTuple):
  """One split of a task, read.

  Attributes:
    name: of the task.
    split: of the task.
    sources: texts with the task's prefix.
    targets: references, after the task's postprocessing; most are texts.
    metrics: `(targets, predictions) -> scores`.
    postprocess: `(text, number of the source) -> prediction`.
    target_texts: what a model is trained to say; None: the targets are that.
  """

  name: str
  split: str
  sources: list[str]
  targets: list[Any]
  metrics: tuple[Callable[..., dict[str, Any]], ...]
  postprocess: Callable[[str, int], Any] = lambda text, index: text
  target_texts: list[str] | None = None


class TextTask(NamedTuple):
  """What defines a TFDS task before it is tokenised.

  Attributes:
    tfds_name: dataset, configuration and version.
    prefix: what the source begins with.
    keys: of the source and of the target in an example.
    metrics: `(targets, predictions) -> scores`.
  """

  tfds_name: str
  prefix: str
  keys: tuple[str, str]
  metrics: tuple[scores.Metric, ...]


TFDS_TASKS = {
  'wmt_t2t_ende_v003': TextTask(
    'wmt_t2t_translate/de-en:1.0.0',
    'translate English to German: ',
    ('en', 'de'),
    (scores.bleu,),
  ),
  # T5 names version 3.2.0 or an older one, which TFDS does not offer any more.
  'cnn_dailymail_v002': TextTask(
    'cnn_dailymail:3.4.0',
    'summarize: ',
    ('article', 'highlights'),
    (scores.rouge,),
  ),
}
KNOWN = (*corpus.PREFIXES, *TFDS_TASKS)


def read_task(
  name: str,
  split: str = 'test',
  *,
  num_examples: int | None = None,
  module: str | None = None,
) -> TaskData:
  """Reads a split of a task.

  Args:
    name: a task's name, see this module's head.
    split: e.g. 'test', or 'validation'.
    num_examples: only the first so many; None: all.
    module: dotted name of a module that registers SeqIO tasks when imported.

  Returns:
    The split.

  Raises:
    ValueError: the task or the split is unknown (known ones are given), the data
      are not on this machine, or a package is missing; the message says what to do.
  """
  if num_examples is not None and num_examples < 1:
    raise ValueError(f'num_examples: {num_examples}; give 1 or more')
  if name in corpus.PREFIXES and module is None:
    data = _read_embedded(name, split, num_examples)
  else:
    data = _read_with_seqio(name, split, num_examples, module)
  if not data.sources:
    raise ValueError(f'split: {split!r} of {name} has no example; choose another')
  return data


def _read_with_seqio(
  name: str, split: str, num_examples: int | None, module: str | None
) -> TaskData:
  unknown = (
    f'task: {name!r} is unknown; {suggest(name, KNOWN)} (others are SeqIO tasks of a '
    'module named with --task_module)'
  )
  try:
    seqio = importlib.import_module('seqio')
  except ImportError as error:
    if name not in KNOWN and module is None:
      raise ValueError(unknown) from error
    raise ValueError(_missing('seqio', f'task: {name!r}')) from error
  if module is not None:
    _import_tasks(module)
  if name in seqio.TaskRegistry.names():
    return _read_seqio(seqio.TaskRegistry.get(name), split, num_examples)
  if name in TFDS_TASKS:
    return _read_tfds(name, split, num_examples)
  if module is not None:
    registered = suggest(name, seqio.TaskRegistry.names())
    raise ValueError(f'task: {name!r} is not registered by {module}; {registered}')
  raise ValueError(unknown)


def score(data: TaskData, texts: Sequence[str]) -> dict[str, float]:
  """All metrics of a task over all its outputs, in the order of the sources."""
  predictions = [data.postprocess(text, index) for index, text in enumerate(texts)]
  results: dict[str, float] = {}
  for metric in data.metrics:
    for key, value in metric(data.targets, predictions).items():
      results[key] = float(getattr(value, 'value', value))
  return results


def _read_embedded(name: str, split: str, num_examples: int | None) -> TaskData:
  own_split = SPLIT_ALIASES.get(split, split)
  if own_split not in corpus.SPLITS:
    known = ', '.join(corpus.SPLITS)
    raise ValueError(f'split: {split!r} is none of {known} (validation)')
  examples = corpus.read_corpus(own_split)
  if name == 'fix':
    examples = corpus.fix_examples(examples)
  examples = [example for example in examples if example.task == name][:num_examples]
  # Without sacrebleu there is nothing to report; ROUGE alone may be missing.
  metrics = tuple(
    metric
    for metric in EMBEDDED_METRICS[name]
    if metric is not scores.rouge or scores.is_available(metric)
  )
  _check_metrics(metrics)
  return TaskData(
    name,
    split,
    [corpus.PREFIXES[name] + example.source for example in examples],
    [example.target for example in examples],
    metrics,
  )


def _check_metrics(metrics: Sequence[scores.Metric]) -> None:
  """Fails before anything is decoded rather than after."""
  for metric in metrics:
    if not scores.is_available(metric):
      metric([''], [''])  # raises with the package's name


def _read_tfds(name: str, split: str, num_examples: int | None) -> TaskData:
  tfds = _import('tensorflow_datasets', f'task: {name!r}')
  task = TFDS_TASKS[name]
  builder = _prepared(name, task.tfds_name, lambda: tfds.builder(task.tfds_name))
  if split not in builder.info.splits:
    known = ', '.join(builder.info.splits)
    raise ValueError(f'split: {split!r} of {name} is none of {known}')
  _check_metrics(task.metrics)
  dataset = builder.as_dataset(split=split)
  pairs = [
    tuple(example[key].decode('utf-8') for key in task.keys)
    for example in tfds.as_numpy(dataset.take(num_examples or -1))
  ]
  return TaskData(
    name,
    split,
    [task.prefix + source for source, _ in pairs],
    [target for _, target in pairs],
    task.metrics,
  )


def _prepared(name: str, tfds_name: str, make: Callable[[], Any]) -> Any:
  """A TFDS builder; an error says how to get data which are not there."""
  try:
    builder = make()
    is_there = builder.data_path.exists()
  except Exception as error:  # TFDS raises what its versions disagree on
    reason = ' '.join(str(error).split())
    raise ValueError(f'task: {name}: TFDS refuses {tfds_name}: {reason}') from error
  if not is_there:
    raise ValueError(
      f'task: the data of {name} are not in {builder.data_path}; prepare them with '
      f"'tfds build {tfds_name.partition(':')[0]}' on a machine with network access, "
      'and point TFDS_DATA_DIR to the folder that holds them'
    )
  return builder


def _read_seqio(task: Any, split: str, num_examples: int | None) -> TaskData:
  tfds = getattr(task.source, 'tfds_dataset', None)
  if tfds is not None and tfds.name:
    _prepared(task.name, tfds.name, lambda: tfds.builder)
  if split not in task.splits:
    known = ', '.join(task.splits)
    raise ValueError(f'split: {split!r} of {task.name} is none of {known}')
  dataset = task.get_dataset(sequence_length=None, split=split, shuffle=False)
  examples = list(dataset.take(num_examples or -1).as_numpy_iterator())
  return TaskData(
    task.name,
    split,
    [_text(task, example, 'inputs') for example in examples],
    [
      task.postprocess_fn(
        _text(task, example, 'targets'), example=example, is_target=True
      )
      for example in examples
    ],
    tuple(task.predict_metric_fns),
    lambda text, index: task.postprocess_fn(
      text, example=examples[index], is_target=False
    ),
    [_text(task, example, 'targets') for example in examples],
  )


def _text(task: Any, example: dict[str, Any], feature: str) -> str:
  """The text before tokenisation: a pair has a vocabulary of its own."""
  pretokenized = example.get(f'{feature}_pretokenized')
  if pretokenized is not None:
    return pretokenized.decode('utf-8')
  return task.output_features[feature].vocabulary.decode(example[feature].tolist())


def add_seqio_tasks(vocabulary: Any) -> list[str]:
  """Registers the tasks of this module with SeqIO, for `seqio.Evaluator` and T5X.

  Args:
    vocabulary: a `seqio.Vocabulary`, see `seqio_vocabulary`.

  Returns:
    Their names: those of `TFDS_TASKS` where SeqIO has no task of that name yet,
    and `specjax_ende`, `specjax_summ`, `specjax_fix`.
  """
  seqio = _import('seqio', 'add_seqio_tasks')
  features = {
    'inputs': seqio.Feature(vocabulary, add_eos=True),
    'targets': seqio.Feature(vocabulary, add_eos=True),
  }
  rest = [
    seqio.preprocessors.tokenize,
    seqio.CacheDatasetPlaceholder(),
    seqio.preprocessors.append_eos_after_trim,
  ]
  names = []

  def add(name, source, prepare, metrics):
    if name in seqio.TaskRegistry.names():
      return
    seqio.TaskRegistry.add(
      name,
      source=source,
      preprocessors=[*prepare, *rest],
      output_features=features,
      metric_fns=[*metrics],
    )
    names.append(name)

  for name, task in TFDS_TASKS.items():
    add(name, seqio.TfdsDataSource(task.tfds_name), [preprocessor(task)], task.metrics)
  for name, metrics in EMBEDDED_METRICS.items():
    source = seqio.FunctionDataSource(
      _embedded_dataset(name), splits=('train', 'validation', 'test')
    )
    add(f'specjax_{name}', source, [], metrics)
  return names


def preprocessor(task: TextTask) -> Callable[[Any], Any]:
  """`tf.data.Dataset -> tf.data.Dataset` of inputs and targets, not tokenised."""

  def prepare(dataset):
    import tensorflow as tf

    source, target = task.keys
    return dataset.map(
      lambda x: {
        'inputs': tf.strings.join([task.prefix, x[source]]),
        'targets': x[target],
      },
      num_parallel_calls=tf.data.AUTOTUNE,
    )

  return prepare


def seqio_vocabulary(path: str | Path, extra_ids: int = 100) -> Any:
  """SeqIO's vocabulary with the ids of ours.

  Args:
    path: a SentencePiece `.model` file, or 'bytes' for ByT5's.
    extra_ids: number of sentinels.
  """
  seqio = _import('seqio', 'seqio_vocabulary')
  if str(path) == 'bytes':
    return seqio.ByteVocabulary(extra_ids)
  return seqio.SentencePieceVocabulary(str(path), extra_ids)


def _embedded_dataset(name: str) -> Callable[..., Any]:
  def dataset(split: str, shuffle_files: bool = False, seed: int | None = None):
    del shuffle_files, seed
    import tensorflow as tf

    data = _read_embedded(name, split, None)
    columns = {'inputs': data.sources, 'targets': data.targets}
    return tf.data.Dataset.from_tensor_slices(columns)

  return dataset


def _import(package: str, needed_by: str) -> Any:
  try:
    return importlib.import_module(package)
  except ImportError as error:
    raise ValueError(_missing(package, needed_by)) from error


def _missing(package: str, needed_by: str) -> str:
  return (
    f"{needed_by} needs {package}; install it with pip install 'specjax[seqio]' (the "
    f'tasks {", ".join(corpus.PREFIXES)} need no more than specjax[eval])'
  )


def _import_tasks(module: str) -> None:
  try:
    importlib.import_module(module)
  except Exception as error:
    reason = ' '.join(str(error).split())
    raise ValueError(
      f'task_module: {module} fails with {type(error).__name__}: {reason}; give the '
      'dotted name of a module that can be imported from here'
    ) from error
