"""Tasks: what is read, what it is scored by, and what is said when it is not there.

Those marked `seqio` need the extra of that name.
"""

import sys
import types

import pytest
import sacrebleu

from specjax.data import corpus, tasks, text
from specjax.eval import scores

VOCABULARY = corpus.CORPUS_PATH.with_name('vocab.model')


@pytest.fixture
def no_seqio(monkeypatch):
  for name in ('seqio', 'tensorflow', 'tensorflow_datasets'):
    monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
  ('name', 'count'), [('ende', 1340), ('summ', 119), ('fix', 961)]
)
def test_embedded_tasks_are_the_corpus(no_seqio, name, count):
  data = tasks.read_task(name, 'test')
  assert len(data.sources) == len(data.targets) == count
  assert all(source.startswith(f'{name}: ') for source in data.sources)
  assert data == tasks.read_task(name, 'test')._replace(postprocess=data.postprocess)
  first = tasks.read_task(name, 'test', num_examples=3)
  assert first.sources == data.sources[:3]
  assert first.targets == data.targets[:3]
  # What the pair was trained and reported on: the same prefix, the same misspelling.
  example = next(
    e
    for e in [
      *corpus.read_corpus('test'),
      *corpus.fix_examples(corpus.read_corpus('test')),
    ]
    if e.task == name
  )
  assert data.sources[0] == corpus.PREFIXES[name] + example.source
  assert data.targets[0] == example.target


def test_split_names(no_seqio):
  valid = tasks.read_task('ende', 'valid', num_examples=2)
  assert tasks.read_task('ende', 'validation', num_examples=2).sources == valid.sources
  assert valid.sources != tasks.read_task('ende', 'test', num_examples=2).sources


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (
      {'name': 'endd'},
      r"task: 'endd' is unknown; did you mean ende\? \(others are SeqIO",
    ),
    (
      {'name': '?'},
      'choose from cnn_dailymail_v002, ende, fix, summ, wmt_t2t_ende_v003',
    ),
    ({'name': 'ende', 'split': 'tset'}, "split: 'tset' is none of train, valid, test"),
    ({'name': 'ende', 'num_examples': 0}, 'num_examples: 0; give 1 or more'),
    ({'name': 'wmt_t2t_ende_v003'}, r"needs seqio; .*pip install 'specjax\[seqio\]'"),
    ({'name': 'x', 'module': 'os'}, r"needs seqio; .*pip install 'specjax\[seqio\]'"),
  ],
)
def test_errors_without_seqio(no_seqio, arguments, message):
  with pytest.raises(ValueError, match=message) as error:
    tasks.read_task(**arguments)
  assert '\n' not in str(error.value)


def test_scoring_without_its_package(monkeypatch):
  monkeypatch.setitem(sys.modules, 'sacrebleu', None)
  with pytest.raises(ValueError, match=r"sacrebleu; .*pip install 'specjax\[eval\]'"):
    tasks.read_task('ende', 'test')


def test_rouge_is_optional(monkeypatch):
  monkeypatch.setitem(sys.modules, 'rouge_score', None)
  data = tasks.read_task('summ', 'test', num_examples=2)
  assert data.metrics == (scores.chrf,)


def test_scores():
  targets = ['the cat sat on the mat .', 'a dog barked at the moon .']
  data = tasks.TaskData(
    'x', 'test', ['a', 'b'], targets, (scores.bleu, scores.chrf, scores.exact_match)
  )
  perfect = tasks.score(data, targets)
  assert perfect == {
    'bleu': pytest.approx(100), 'chrf': pytest.approx(100), 'exact_match': 100
  }  # fmt: skip
  half = tasks.score(data, [targets[0], 'no word of it'])
  assert half['exact_match'] == 50
  assert 0 < half['bleu'] < 100
  assert 0 < half['chrf'] < 100
  swapped = tasks.score(data, targets[::-1])
  assert swapped['bleu'] < 20
  upper = data._replace(postprocess=lambda text, index: text.upper())
  assert tasks.score(upper, targets)['exact_match'] == 0


def test_bleu_is_t5s():
  """13a splits no symbols off words, 'intl' does; and several references count."""
  target, prediction = 'sie ist „gut“, ja wohl, x→y', 'sie ist "gut", ja wohl, x→y'
  intl, other = (
    sacrebleu.BLEU(tokenize=name, smooth_method='exp', effective_order=False)
    .corpus_score([prediction], [[target]])
    .score
    for name in ('intl', '13a')
  )
  assert scores.bleu([target], [prediction])['bleu'] == intl != other
  two = scores.bleu([['a b c d', 'e f g h']], ['e f g h'])
  assert two['bleu'] == pytest.approx(100)


# With SeqIO.


@pytest.fixture(scope='module')
def seqio():
  return pytest.importorskip(
    'seqio', reason="needs seqio: pip install 'specjax[seqio]'"
  )


LINES = [
  'Öffnet den Dialog "Seite".',
  '=SUM(A1;B2) 5 % – 日本',
  'a  b   c',
  '<extra_id_0> is a <extra_id_12>ly and <extra_id_99>',
  'x<extra_id_3>y',
  '',
]


@pytest.mark.seqio
@pytest.mark.parametrize('extra_ids', [0, 100])
def test_piece_ids_are_seqios(seqio, extra_ids):
  ours = text.sentencepiece_vocabulary(VOCABULARY, extra_ids)
  theirs = tasks.seqio_vocabulary(VOCABULARY, extra_ids)
  assert ours.size == theirs.vocab_size == 4096 + extra_ids
  assert ours.eos_id == theirs.eos_id
  for token in range(ours.size):
    assert ours.piece(token) == theirs.tokenizer.IdToPiece(token).replace(
      '▁<extra', '<extra'
    )
    assert ours.decode([token]) == ('' if token < 2 else theirs.decode([token]))
  lines = [example.source for example in corpus.read_corpus('test')]
  for line in [*LINES, *lines]:
    ids = ours.encode(line)
    assert ids == [*theirs.encode(line), ours.eos_id]
    assert ids[:-1] == theirs.encode_tf(line).numpy().tolist()
    assert ours.decode(ids) == theirs.decode(ids)
  # Ids of the embedding's padding.
  assert ours.decode([5, ours.size, 7]) == theirs.decode([5, ours.size, 7])


@pytest.mark.seqio
def test_byte_ids_are_seqios(seqio):
  ours, theirs = text.byte_vocabulary(), tasks.seqio_vocabulary('bytes', 125)
  assert ours.size == theirs.vocab_size == 384
  for line in LINES:
    assert ours.encode(line) == [*theirs.encode(line), ours.eos_id]
    assert ours.decode(ours.encode(line)) == theirs.decode(ours.encode(line))


@pytest.mark.seqio
@pytest.mark.parametrize(
  ('name', 'example', 'source', 'target'),
  [
    (
      'wmt_t2t_ende_v003',
      {'en': 'That is good.', 'de': 'Das ist gut.'},
      'translate English to German: That is good.',
      'Das ist gut.',
    ),
    (
      'cnn_dailymail_v002',
      {'article': 'A ship sank .', 'highlights': 'Ship\nsinks .', 'id': '1'},
      'summarize: A ship sank .',
      'Ship\nsinks .',
    ),
  ],
)
def test_preprocessors(seqio, name, example, source, target):
  import tensorflow as tf

  dataset = tf.data.Dataset.from_tensors(example)
  (out,) = tasks.preprocessor(tasks.TFDS_TASKS[name])(dataset).as_numpy_iterator()
  assert out == {'inputs': source.encode(), 'targets': target.encode()}


@pytest.mark.seqio
def test_seqio_tasks(seqio):
  names = tasks.add_seqio_tasks(tasks.seqio_vocabulary(VOCABULARY))
  assert set(names) <= {*tasks.TFDS_TASKS, *(f'specjax_{x}' for x in corpus.PREFIXES)}
  assert tasks.add_seqio_tasks(tasks.seqio_vocabulary(VOCABULARY)) == []
  wmt = seqio.TaskRegistry.get('wmt_t2t_ende_v003')
  assert wmt.source.tfds_dataset.name == 'wmt_t2t_translate/de-en:1.0.0'
  ours = text.sentencepiece_vocabulary(VOCABULARY)
  for name in corpus.PREFIXES:
    task = seqio.TaskRegistry.get(f'specjax_{name}')
    dataset = task.get_dataset(
      sequence_length={'inputs': 64, 'targets': 64}, split='validation', shuffle=False
    )
    data = tasks.read_task(name, 'validation')
    same = tasks.read_task(f'specjax_{name}', 'validation', num_examples=20)
    assert same.sources == data.sources[:20]
    assert same.targets == data.targets[:20]
    assert tasks.score(same, same.targets)['chrf'] == pytest.approx(100)
    for example, source in zip(dataset.take(5), data.sources, strict=False):
      ids = example['inputs'].numpy().tolist()
      (expected,) = text.encode_sources(ours, [source], 64, truncate=True)
      assert ids == expected


@pytest.mark.seqio
def test_a_users_task(seqio, monkeypatch):
  import tensorflow as tf

  vocabulary = seqio.Feature(tasks.seqio_vocabulary('bytes', 0))
  rows = {'inputs': ['one', 'two'], 'targets': ['1', '2']}
  seqio.TaskRegistry.add(
    'a_users_task',
    source=seqio.FunctionDataSource(
      lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices(rows),
      splits=('test',),
    ),
    preprocessors=[seqio.preprocessors.tokenize],
    output_features={'inputs': vocabulary, 'targets': vocabulary},
    postprocess_fn=lambda text, example, is_target: (
      (int(text) if text.isdigit() else -1),
      example['inputs_pretokenized'],
    ),
    metric_fns=[lambda targets, predictions: {'same': targets == predictions}],
  )
  monkeypatch.setitem(sys.modules, 'users_tasks', types.ModuleType('users_tasks'))
  data = tasks.read_task('a_users_task', 'test', module='users_tasks')
  assert data.sources == ['one', 'two']
  assert data.targets == [(1, b'one'), (2, b'two')]
  assert tasks.score(data, ['1', '2']) == {'same': 1.0}
  assert tasks.score(data, ['1', '3']) == {'same': 0.0}
  with pytest.raises(ValueError, match="'a_user_task' is not registered by users_"):
    tasks.read_task('a_user_task', 'test', module='users_tasks')
  with pytest.raises(ValueError, match='task_module: no_such fails with ModuleNot'):
    tasks.read_task('a_users_task', 'test', module='no_such')
  with pytest.raises(ValueError, match=r"split: 'train' of a_users_task is none of te"):
    tasks.read_task('a_users_task', 'train', module='users_tasks')


@pytest.mark.seqio
@pytest.mark.parametrize('registered', [False, True])
@pytest.mark.parametrize('name', tasks.TFDS_TASKS)
def test_data_that_are_not_there(seqio, monkeypatch, tmp_path, name, registered):
  import tensorflow_datasets as tfds

  make = tfds.builder

  def in_empty_folder(name, **options):
    return make(name, **{**options, 'data_dir': tmp_path})

  monkeypatch.setattr(tfds, 'builder', in_empty_folder)
  if name in seqio.TaskRegistry.names():
    seqio.TaskRegistry.remove(name)
  if registered:
    tasks.add_seqio_tasks(tasks.seqio_vocabulary(VOCABULARY))
  with pytest.raises(
    ValueError, match=r"are not in .*'tfds build .*TFDS_DATA_DIR"
  ) as e:
    tasks.read_task(name, 'test')
  assert '\n' not in str(e.value)


@pytest.mark.seqio
def test_a_version_that_tfds_does_not_have(seqio, monkeypatch):
  task = tasks.TFDS_TASKS['cnn_dailymail_v002']._replace(
    tfds_name='cnn_dailymail:9.9.9'
  )
  monkeypatch.setitem(tasks.TFDS_TASKS, 'no_such_version', task)
  with pytest.raises(ValueError, match=r'TFDS refuses cnn_dailymail:9.9.9: ') as e:
    tasks.read_task('no_such_version', 'test')
  assert '\n' not in str(e.value)


@pytest.mark.seqio
def test_data_that_are_there(seqio, monkeypatch, tmp_path):
  """A stand-in for TFDS's reader of a prepared set: strings, splits and order."""
  import tensorflow as tf
  import tensorflow_datasets as tfds

  rows = {'article': ['Öl .', 'b', 'c'], 'highlights': ['1', '2', '3'], 'id': ['x'] * 3}
  builder = types.SimpleNamespace(
    data_path=tmp_path,
    info=types.SimpleNamespace(splits={'validation': 3}),
    as_dataset=lambda split: tf.data.Dataset.from_tensor_slices(rows),
  )
  monkeypatch.setattr(tfds, 'builder', lambda name: builder)
  if 'cnn_dailymail_v002' in seqio.TaskRegistry.names():
    seqio.TaskRegistry.remove('cnn_dailymail_v002')
  data = tasks.read_task('cnn_dailymail_v002', 'validation', num_examples=2)
  assert data.sources == ['summarize: Öl .', 'summarize: b']
  assert data.targets == ['1', '2']
  assert data.metrics == (scores.rouge,)
  with pytest.raises(ValueError, match=r"split: 'dev' of cnn.* is none of validation"):
    tasks.read_task('cnn_dailymail_v002', 'dev')


@pytest.mark.seqio
def test_rouge_is_t5s(seqio):
  """Sentences are lines for ROUGE-Lsum, as in CNN/DailyMail's highlights."""
  target = 'a ship sank . nobody was hurt .'
  result = scores.rouge([target], ['nobody was hurt . a ship sank .'])
  assert result['rouge1'] == pytest.approx(100)
  assert result['rougeLsum'] == pytest.approx(100)
  assert result['rouge2'] == pytest.approx(80)
