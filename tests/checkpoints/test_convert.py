"""Conversions: what they write, what they refuse, and how they go on."""

import dataclasses
import pathlib
import shutil

import jax
import numpy as np
import pytest

from specjax.checkpoints import convert, formats, hf, leaves, store

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'hf'
SOURCE = GOLDEN / 'square'


@pytest.fixture
def main(capsys):
  """`main(*arguments)` -> (exit code, stdout, last line of stderr)."""

  def call(*arguments):
    code = convert.main([*map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err.strip().rpartition('\n')[2]

  return call


def contents(folder):
  return sorted(path.name for path in folder.iterdir())


def values(path):
  weights = formats.open_weights(path)
  return {name: leaves.read_whole(leaf) for name, leaf in weights.leaves.items()}


def test_there_and_back(tmp_path, main):
  code, out, _ = main(SOURCE, tmp_path / 'ours.safetensors')
  assert code == 0
  digest = out.split()[-1]
  assert main(tmp_path / 'ours.safetensors', tmp_path / 'back', '--to', 'hf')[0] == 0
  written = (tmp_path / 'back' / hf.SINGLE).read_bytes()
  assert written == (SOURCE / hf.SINGLE).read_bytes()
  assert contents(tmp_path) == ['back', 'ours.safetensors']

  loaded = store.load(tmp_path / 'ours.safetensors')
  weights = hf.open_weights(SOURCE)
  assert loaded.config == weights.config
  expected = leaves.restore(weights)
  assert jax.tree.structure(loaded.params) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, loaded.params, expected)
  # The hash that is shown is of values, whatever the format.
  assert digest == store.digest(sorted(values(SOURCE).items()))


def test_dtypes(tmp_path):
  place = tmp_path / 'x.safetensors'
  convert.convert(SOURCE, place, dtype='bfloat16')
  half = formats.open_weights(place)
  assert {leaf.dtype.name for leaf in half.leaves.values()} == {'bfloat16'}
  convert.convert(place, tmp_path / 'same.safetensors')
  assert (tmp_path / 'same.safetensors').read_bytes() != b''
  again = formats.open_weights(tmp_path / 'same.safetensors')
  assert {leaf.dtype.name for leaf in again.leaves.values()} == {'bfloat16'}
  for name, expected in values(SOURCE).items():
    np.testing.assert_array_equal(
      leaves.read_whole(again.leaves[name]), expected.astype('bfloat16')
    )


def test_float16_becomes_float32(tmp_path):
  weights = hf.open_weights(SOURCE)
  hf.write(tmp_path / 'half', weights, dtype='float16')
  convert.convert(tmp_path / 'half', tmp_path / 'x.safetensors')
  for name, found in values(tmp_path / 'x.safetensors').items():
    assert found.dtype == np.float32
    expected = leaves.read_whole(weights.leaves[name]).astype(np.float16)
    np.testing.assert_array_equal(found, expected.astype(np.float32))


def test_bad_input_is_one_line_and_code_2(tmp_path, main):
  taken = tmp_path / 'taken.safetensors'
  taken.write_text('mine')
  (tmp_path / 'empty').mkdir()
  (tmp_path / 'torch').mkdir()
  (tmp_path / 'torch' / 'pytorch_model.bin').write_text('')
  cases = [
    ([tmp_path / 'absent', tmp_path / 'x', '--to', 'hf'], 'nothing is at'),
    ([tmp_path / 'empty', tmp_path / 'x', '--to', 'hf'], 'nothing is at'),
    ([tmp_path / 'torch', tmp_path / 'x', '--to', 'hf'], 'saved as safetensors'),
    ([SOURCE, taken], 'taken.safetensors exists; name another'),
    ([SOURCE, tmp_path / 'x'], 'to: not given; pass --to with one of t5x, hf'),
    ([SOURCE, tmp_path / 'x', '--to', 'specjax'], 'writes a file *.safetensors'),
    ([SOURCE, tmp_path / 'x.safetensors', '--to', 'hf'], 'the other formats a folder'),
    ([SOURCE, tmp_path / 'no' / 'x.safetensors'], 'no is no folder'),
    ([SOURCE, 'gs://bucket/x', '--to', 'hf'], 'gcloud storage cp'),
    ([SOURCE, tmp_path / 'x', '--dtype', 'float16'], "invalid choice: 'float16'"),
    ([SOURCE], 'required: DST; see'),
    ([SOURCE, tmp_path / 'x', '--bo', 'hf'], '--bo'),
  ]
  before = contents(tmp_path)
  for arguments, message in cases:
    code, out, line = main(*arguments)
    assert (code, out) == (2, ''), arguments
    assert line.startswith('specjax: ')
    assert message in line
    assert contents(tmp_path) == before
  assert taken.read_text() == 'mine'
  for looked_for in ('config.json', 'target.safetensors', 'checkpoint', 'Orbax'):
    assert looked_for in main(tmp_path / 'empty', tmp_path / 'x', '--to', 'hf')[2]


def test_help(main, capsys):
  with pytest.raises(SystemExit) as exit_:
    convert.main(['--help'])
  assert exit_.value.code == 0
  text = capsys.readouterr().out
  for word in ('SRC', 'DST', '--to', '--dtype', '--overwrite', 'checkpoint_N'):
    assert word in text
  assert max(map(len, text.splitlines())) <= 88


def test_overwriting(tmp_path):
  place = tmp_path / 'x'
  place.mkdir()
  (place / 'old').write_text('old')
  convert.convert(SOURCE, place, to='hf', overwrite=True)
  assert contents(tmp_path) == ['x']
  assert contents(place) == [hf.CONFIG, 'generation_config.json', hf.SINGLE]
  # Also when it is converted onto itself.
  convert.convert(place, place, to='hf', dtype='bfloat16', overwrite=True)
  assert values(place)['decoder/decoder_norm/scale'].dtype == 'bfloat16'


def test_a_damaged_source_names_the_parameter(tmp_path):
  shutil.copytree(SOURCE, tmp_path / 'cut')
  path = tmp_path / 'cut' / hf.SINGLE
  path.write_bytes(path.read_bytes()[:-5])
  with pytest.raises(ValueError, match=r'cut: it ends in shared\.weight'):
    convert.convert(tmp_path / 'cut', tmp_path / 'x.safetensors')

  shutil.copytree(SOURCE, tmp_path / 'nan')
  path = tmp_path / 'nan' / hf.SINGLE
  data = bytearray(path.read_bytes())
  data[-4:] = np.float32(np.nan).tobytes()
  path.write_bytes(data)
  place = tmp_path / 'old'
  place.mkdir()
  with pytest.raises(ValueError, match='token_embedder/embedding has values that are'):
    convert.convert(tmp_path / 'nan', place, to='hf', overwrite=True)
  assert contents(tmp_path) == ['cut', 'nan', 'old']
  assert contents(place) == []


def stopping(monkeypatch, after):
  """Interrupts the conversion at its read number `after` of a leaf."""
  count = {'reads': 0}
  original = formats.open_weights

  def open_weights(path):
    weights = original(path)

    def stopped(leaf):
      def read(index):
        count['reads'] += 1
        if count['reads'] == after:
          raise KeyboardInterrupt
        return leaf.read(index)

      return leaf._replace(read=read)

    opened = {name: stopped(leaf) for name, leaf in weights.leaves.items()}
    return weights._replace(leaves=opened)

  monkeypatch.setattr(formats, 'open_weights', open_weights)
  return count


@pytest.mark.parametrize('name', ['x', 'x.safetensors'])
@pytest.mark.parametrize('stage', ['writing', 'verifying'])
def test_interrupted_and_continued(tmp_path, main, monkeypatch, name, stage):
  arguments = [SOURCE, tmp_path / name, *(['--to', 'hf'] if name == 'x' else [])]
  num_leaves = len(formats.open_weights(SOURCE).leaves)
  with monkeypatch.context() as patch:
    stopping(patch, 30 if stage == 'writing' else num_leaves + 30)
    code, _, line = main(*arguments)
  assert (code, line) == (130, 'interrupted; the same command continues')
  assert contents(tmp_path) == [f'.{name}.partial']
  unfinished = max(tmp_path.rglob('*.safetensors'))
  size, node = unfinished.stat().st_size, unfinished.stat().st_ino
  assert size > 1000

  written = []
  open_file = pathlib.Path.open

  def opened(path, mode='r', *rest, **options):
    file = open_file(path, mode, *rest, **options)
    if '+' not in mode:
      return file
    assert mode == 'r+b', 'started anew'

    class Watched:
      def __getattr__(self, key):
        return getattr(file, key)

      def __enter__(self):
        return self

      def __exit__(self, *args):
        file.close()

      def write(self, data):
        written.append((file.tell(), len(data)))
        return file.write(data)

    return Watched()

  with monkeypatch.context() as patch:
    patch.setattr(pathlib.Path, 'open', opened)
    assert main(*arguments)[0] == 0
  # The file's header is completed at the end; nothing else was there before.
  again = [start for start, length in written if start and start + length <= size]
  assert again == []
  assert bool(written) == (stage == 'writing')
  path = tmp_path / name
  assert (path / hf.SINGLE if name == 'x' else path).stat().st_ino == node
  assert contents(tmp_path) == [name]
  found = values(path)
  for leaf, expected in values(SOURCE).items():
    np.testing.assert_array_equal(found[leaf], expected)


@pytest.mark.parametrize('stage', ['writing', 'verifying'])
def test_a_conversion_to_t5x_is_continued(tmp_path, main, monkeypatch, stage):
  source, place = GOLDEN / 'v1_0', tmp_path / 'checkpoint_1'
  num_leaves = len(formats.open_weights(source).leaves)
  with monkeypatch.context() as patch:
    stopping(patch, 20 if stage == 'writing' else num_leaves + 20)
    assert main(source, place)[0] == 130
  assert contents(tmp_path) == ['.checkpoint_1.partial']
  partial = tmp_path / '.checkpoint_1.partial' / 'checkpoint_1'

  def written_at(folder):
    chunks = [path for path in folder.rglob('[0-9]*') if path.is_file()]
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in chunks}

  before = written_at(partial)
  assert len(before) == (19 if stage == 'writing' else num_leaves)
  assert main(source, place)[0] == 0
  after = written_at(place)
  assert len(after) == num_leaves
  assert before.items() <= after.items()
  found = values(place)
  for leaf, expected in values(source).items():
    np.testing.assert_array_equal(found[leaf], expected)


def test_another_conversion_does_not_continue(tmp_path, monkeypatch):
  """Nor does it take what another source left, all written and not yet compared."""
  place = tmp_path / 'x.safetensors'
  num_leaves = len(formats.open_weights(SOURCE).leaves)
  with monkeypatch.context() as patch:
    stopping(patch, num_leaves + 30)
    with pytest.raises(KeyboardInterrupt):
      convert.convert(SOURCE, place)
  shutil.copytree(SOURCE, tmp_path / 'other')
  path = tmp_path / 'other' / hf.SINGLE
  data = bytearray(path.read_bytes())
  data[-4:] = np.float32(0.25).tobytes()
  path.write_bytes(data)
  convert.convert(tmp_path / 'other', place)
  assert contents(tmp_path) == ['other', 'x.safetensors']
  assert values(place)['token_embedder/embedding'][-1, -1] == 0.25


@pytest.mark.parametrize(
  'fault', ['value', 'shape', 'dtype', 'lost', 'added', 'configuration']
)
def test_what_was_written_is_compared(tmp_path, monkeypatch, fault):
  """A writer with a fault is found out, and nothing is left."""
  name = 'decoder/layers_1/self_attention/query/kernel'

  def write(path, weights):
    stored = {key: leaves.read_whole(leaf) for key, leaf in weights.leaves.items()}
    config = weights.config
    if fault == 'value':
      stored[name] = stored[name].copy()
      stored[name][3, 5] += 1
    if fault == 'shape':
      stored[name] = stored[name].T.copy()
    if fault == 'dtype':
      stored[name] = stored[name].astype('bfloat16')
    if fault == 'lost':
      stored.pop(name)
    if fault == 'added':
      stored['extra'] = stored[name]
    if fault == 'configuration':
      config = dataclasses.replace(config, relative_attention_max_distance=99)
    faulty = {key: leaves.array_leaf(value) for key, value in stored.items()}
    original(path, leaves.Weights(config, faulty, {}))

  original = store.write
  monkeypatch.setattr(store, 'write', write)
  message = (
    'relative_attention_max_distance is 20' if fault == 'configuration' else name
  )
  if fault == 'added':
    message = 'extra'
  with pytest.raises(ValueError, match=message):
    convert.convert(SOURCE, tmp_path / 'x.safetensors')
  assert contents(tmp_path) == []


def test_a_flipped_bit_in_the_file_names_its_parameter(tmp_path, monkeypatch):
  original = store.write

  def write(path, weights):
    original(path, weights)
    data = bytearray(path.read_bytes())
    data[-2] ^= 1  # of the last name in order
    path.write_bytes(data)

  monkeypatch.setattr(store, 'write', write)
  with pytest.raises(ValueError, match='token_embedder/embedding is not what was wri'):
    convert.convert(SOURCE, tmp_path / 'x.safetensors')
  assert contents(tmp_path) == []


def test_detection(tmp_path):
  shutil.copytree(SOURCE, tmp_path / 'hf')
  expected = formats.open_weights(tmp_path / 'hf').config
  convert.convert(SOURCE, tmp_path / 'target.safetensors')
  for path in ('hf', 'hf/model.safetensors', 'target.safetensors', '', './hf/'):
    assert formats.open_weights(f'{tmp_path}/{path}').config == expected


def test_a_tied_head_without_scale_becomes_one_of_its_own_in_t5x():
  weights = hf.open_weights(GOLDEN / 'v1_1')
  untied = convert.untie_unscaled(weights)
  assert untied.config == dataclasses.replace(
    weights.config, logits_via_embedding=False, scale_tied_logits=True
  )
  shapes = {name: leaf.shape for name, leaf in untied.leaves.items()}
  leaves.check_shapes('x', shapes, untied.config)
  np.testing.assert_array_equal(
    leaves.read_whole(untied.leaves['decoder/logits_dense/kernel']),
    leaves.read_whole(weights.leaves['token_embedder/embedding']).T,
  )
  scaled = hf.open_weights(GOLDEN / 'v1_0')
  assert convert.untie_unscaled(scaled) is scaled


def test_the_file_that_is_written_in_parts_is_what_save_writes(tmp_path):
  weights = hf.open_weights(SOURCE)._replace(notes={'step': 3})
  store.write(tmp_path / 'parts.safetensors', weights)
  params = leaves.restore(weights)
  store.save(
    tmp_path / 'whole.safetensors',
    params,
    weights.config,
    dtype='float32',
    notes={'step': 3},
  )
  parts, whole = (
    store.load(tmp_path / f'{name}.safetensors') for name in ('parts', 'whole')
  )
  assert (parts.config, parts.notes) == (whole.config, whole.notes)
  jax.tree.map(np.testing.assert_array_equal, parts.params, whole.params)


def test_there_and_back_by_t5x(tmp_path, main):
  """Hugging Face -> T5X -> Hugging Face: the same file. T5X can not keep it all."""
  source = GOLDEN / 'v1_0'
  code, out, _ = main(source, tmp_path / 'checkpoint_7')
  assert code == 0
  assert main(tmp_path, tmp_path / 'back', '--to', 'hf')[:2] == (
    0,
    out.replace('checkpoint_7', 'back'),
  )
  written = (tmp_path / 'back' / hf.SINGLE).read_bytes()
  assert written == (source / hf.SINGLE).read_bytes()
  assert main(GOLDEN / 'v1_1', tmp_path / 'untied', '--to', 't5x')[0] == 0
  untied = values(tmp_path / 'untied')
  np.testing.assert_array_equal(
    untied['decoder/logits_dense/kernel'], untied['token_embedder/embedding'].T
  )
  code, _, line = main(SOURCE, tmp_path / 'x', '--to', 't5x')
  assert code == 2
  assert 'relative_attention_max_distance is 20, and would be read back as 128' in line
  assert contents(tmp_path) == ['back', 'checkpoint_7', 'untied']
