"""The benchmark's command: what it compares, counts, names and prints."""

import importlib.util
import io
import json

import jax
import numpy as np
import pytest
import rich.console

from specjax.checkpoints import leaves, store
from specjax.core.types import Params
from specjax.eval import bench, cases, systems
from specjax.eval.interleave import Samples
from specjax.eval.systems import Absent, System
from specjax.models.t5 import T5Config, Transformer
from specjax.models.t5.config import SIZES
from specjax.testing.tiny_pair import blank_t5

THEIRS = (systems.T5X, systems.HF_GENERATE, systems.HF_ASSISTED)
TINY = {
  'vocab_size': 64,
  'emb_dim': 32,
  'num_heads': 2,
  'head_dim': 16,
  'mlp_dim': 48,
  'num_encoder_layers': 3,
  'num_decoder_layers': 3,
}
_HAS_HF = all(importlib.util.find_spec(name) for name in ('transformers', 'torch'))


@pytest.fixture
def tiny(monkeypatch):
  monkeypatch.setitem(SIZES, 'tiny', TINY)
  return 'tiny'


def fake_case(new_tokens=4, eos_id=1):
  weights = blank_t5(8)
  weights = leaves.Weights(weights.config, {}, {})
  blank = np.ones((2, 3), np.int32)
  return cases.Case(weights, None, Params({}), blank, new_tokens, 4, eos_id, ('Made.',))


def write(folder, name):
  """A checkpoint of one layer."""
  config = T5Config(**{**TINY, 'num_encoder_layers': 1, 'num_decoder_layers': 1})
  path = folder / f'{name}.safetensors'
  store.write(path, cases.random_weights(config, len(name)))
  return str(path)


def fake(tokens, calls=None):
  return lambda case: System(lambda: (), lambda _: np.array(tokens), calls)


def shown(result, width=88):
  console = rich.console.Console(file=io.StringIO(), width=width)
  bench.print_result(result, console)
  return console.file.getvalue()


def test_the_command_on_a_pair(tmp_path, monkeypatch, capsys):
  find_spec = importlib.util.find_spec
  missing = ('t5x', 'torch', 'transformers')
  monkeypatch.setattr(
    importlib.util,
    'find_spec',
    lambda name, *rest: None if name in missing else find_spec(name, *rest),
  )
  monkeypatch.delitem(bench.systems.sys.modules, 't5x', raising=False)
  chosen = (systems.PLAIN, 'draft_model token', *THEIRS)
  arguments = ['--target', write(tmp_path, 'target'), '--systems', ','.join(chosen)]
  arguments += ['--draft', write(tmp_path, 'draft')]
  arguments += ['--source_length', '8', '--new_tokens', '6', '--batch_size', '2']
  arguments += ['--turns', '2', '--gamma', '2', '--output', f'{tmp_path}/bench.json']
  assert bench.main(arguments) == 0
  found = json.loads((tmp_path / 'bench.json').read_text())
  by_name = {each['name']: each for each in found['systems']}
  assert [*by_name] == [systems.PLAIN, 'draft_model token']
  counts = {each['num_tokens'] for each in by_name.values()}
  assert len(counts) == 1
  assert 2 <= counts.pop() <= 12
  assert by_name[systems.PLAIN]['tokens_per_call'] == 1
  assert by_name['draft_model token']['tokens_per_call'] >= 1
  assert all(len(each['seconds']) == 2 for each in by_name.values())
  assert {*found['not_run']} == {*THEIRS}
  assert 'specjax[hf]' in found['not_run'][systems.HF_GENERATE]
  assert 'google-research/t5x' in found['not_run'][systems.T5X]
  assert found['settings']['gamma'] == 2
  assert found['settings']['systems'] == list(chosen)
  printed = capsys.readouterr().out
  for name in by_name:
    assert name in printed
  for name in THEIRS:
    assert f'not run: {name}: ' in printed


@pytest.mark.slow
def test_all_of_our_systems_agree(tiny):
  case = cases.make_case(tiny, source_length=9, new_tokens=24, batch_size=2)
  makers = {name: make for name, make in systems.SYSTEMS.items() if name not in THEIRS}
  result = bench.measure(case, makers, turns=1)
  assert len(result.rows) == 5
  assert {each.difference for each in result.rows} == {None}
  calls = {each.name: each.tokens_per_call for each in result.rows}
  assert calls['draft_model token'] == calls['draft_model block'] > 1.5


def test_a_different_system_is_shown_and_fails(tmp_path, monkeypatch, capsys):
  expected = [[5, 6, 7, 8], [2, 3, 5, 4]]
  makers = {
    systems.PLAIN: fake(expected),
    systems.T5X: fake(expected),
    systems.HF_GENERATE: fake([[5, 6, 7, 8], [2, 3, 9, 4]]),
  }
  result = bench.measure(fake_case(), makers, turns=1)
  differences = {row.name: row.difference for row in result.rows}
  assert differences[systems.T5X] is None
  assert differences[systems.HF_GENERATE] == bench.Difference(1, 2, 5, 9)
  printed = shown(result)
  assert printed.count('DIFFERENT') == 1
  assert 'hf generate is not plain: row 1, token 2: 9, not 5' in printed

  monkeypatch.setattr(systems, 'SYSTEMS', makers)
  assert (
    bench.main(
      ['--target', write(tmp_path, 'target'), '--new_tokens', '4', '--turns', '1']
    )
    == 1
  )
  assert 'DIFFERENT' in capsys.readouterr().out


def test_a_shorter_output_is_different():
  makers = {'a': fake([[5, 6, 7], [2, 3, 5]]), 'b': fake([[5, 6], [2, 3]])}
  result = bench.measure(fake_case(3), makers, turns=1)
  assert result.rows[1].difference == bench.Difference(0, 2, 7, 0)


def test_what_follows_eos_counts_for_nothing():
  makers = {
    'a': fake([[5, 1, 0, 0], [2, 3, 5, 4]]),
    'b': fake([[5, 1, 9, 1], [2, 3, 5, 4]]),
  }
  result = bench.measure(fake_case(), makers, turns=1)
  assert [row.difference for row in result.rows] == [None, None]
  assert [row.num_tokens for row in result.rows] == [6, 6]
  endless = bench.measure(fake_case(eos_id=-1), makers, turns=1)
  assert endless.rows[1].difference == bench.Difference(0, 2, 0, 9)
  assert [row.num_tokens for row in endless.rows] == [8, 8]


def row(name, seconds, calls=None, difference=None):
  return bench.Row(name, Samples(seconds), 1.0, 100, calls, difference)


def test_whoever_loses_is_printed():
  rows = (
    row(systems.PLAIN, (2.0, 4.0, 2.0), 1.0),
    row('draft_model token', (1.0, 1.0, 1.0), 4.0),
    row(systems.T5X, (1.0, 2.0, 1.0)),
    row(systems.HF_ASSISTED, (3.0, 3.0, 3.0), 2.0),
  )
  result = bench.Result(rows, {systems.HF_GENERATE: 'not there [at all]'})
  slower, faster = result.comparisons()
  assert slower == bench.Comparison(
    systems.PLAIN, systems.T5X, Samples((0.5, 0.5, 0.5)), None
  )
  # 3 times as fast, of which a factor of 2 are better drafts.
  assert faster.speedup.median == 3
  assert faster.per_call == 1.5
  printed = shown(result)
  assert 'plain / t5x: 0.50x as fast (0.50-0.50): ours is SLOWER' in printed
  assert 'ours is faster; for each call of the target 1.50x' in ' '.join(
    printed.split()
  )
  assert 'not run: hf generate: not there [at all]' in printed
  lines = printed.splitlines()
  assert any(line.split()[:3] == ['plain', '20.00', '50'] for line in lines)
  assert any('t5x' in line and ' 2.00 ' in line for line in lines)


def test_a_table_fits_a_terminal():
  rows = [row(name, (1.0, 1.5), 2.0) for name in systems.SYSTEMS]
  printed = shown(bench.Result(tuple(rows), {}), width=80)
  table = printed.splitlines()[: len(rows) + 3]
  assert '…' not in ''.join(table), printed
  for name, line in zip(systems.SYSTEMS, table[3:], strict=True):
    assert line.strip().startswith(name)


def test_a_controlled_pair(tiny):
  case = cases.make_case(tiny, source_length=5, batch_size=2)
  assert case.draft is not None
  assert case.draft.config.num_decoder_layers == cases.DRAFT_LAYERS
  assert case.eos_id == -1
  assert 'Controlled pair' in case.notes[0]
  assert case.inputs_BE.shape == (2, 5)
  assert case.inputs_BE.min() >= 3
  # With later layers that add nothing, draft and target are one function.
  config = T5Config(**TINY)
  weights = cases.random_weights(config, 0)

  def logits(weights):
    apply = jax.jit(Transformer(weights.config).apply)
    params = leaves.restore(weights)
    return apply({'params': params}, case.inputs_BE, case.inputs_BE)

  silent = logits(cases.damped(weights, 1, 0.0))
  draft = logits(cases.truncated(weights, 1))
  np.testing.assert_allclose(silent, draft, rtol=1e-5, atol=1e-5)
  assert np.abs(draft).max() > 0.5
  damped = case.target.leaves['decoder/layers_2/mlp/wo/kernel']
  plain = weights.leaves['decoder/layers_2/mlp/wo/kernel']
  np.testing.assert_allclose(
    leaves.read_whole(damped), cases.DAMPING * leaves.read_whole(plain), rtol=1e-6
  )


def test_an_unrelated_draft_says_so(tiny):
  case = cases.make_case(tiny, draft=tiny, source_length=4)
  assert any('unrelated to the target' in note for note in case.notes)
  assert cases.make_case(tiny, draft='none', source_length=4).draft is None


def test_texts_of_the_embedded_pair():
  case = cases.make_case('embedded', source_length=16, batch_size=3)
  assert case.inputs_BE.shape == (3, 16)
  assert case.eos_id == 1
  assert (case.inputs_BE == 1).sum(axis=1).tolist() == [1, 1, 1]
  assert case.draft is not None


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--systems', 'plain,t5'], "systems: 't5' is unknown; choose from plain, "),
    (['--gamma', '0'], 'gamma: 0; give 1 or more'),
    (['--turns', '0'], 'turns: 0; give 1 or more'),
    (['--target', 'nowhere'], "target: 'nowhere' is neither 'embedded'"),
    (['--target', 'embedded', '--draft', 'tiny'], "choose a draft of the target's"),
    (['--output', 'no/such/folder.json'], 'output: there is no folder no/such'),
    (['--speed', '1'], 'unrecognized arguments: --speed 1; see python -m specjax'),
  ],
)
def test_errors_are_one_line(tiny, capsys, arguments, message):
  target = [] if '--target' in arguments else ['--target', tiny]
  assert bench.main([*target, *arguments]) == bench.USAGE_ERROR
  printed = capsys.readouterr().err
  assert message in printed
  assert printed.count('\n') == 1


def test_no_system_is_an_error():
  with pytest.raises(ValueError, match=r'none can run \(x: needs y\)'):
    bench.measure(fake_case(), {'x': lambda case: Absent('needs y')}, turns=1)


def test_a_network_that_t5x_has_not():
  config = T5Config(**TINY, relative_attention_max_distance=20)
  case = fake_case()._replace(target=leaves.Weights(config, {}, {}))
  made = systems.t5x(case)
  assert isinstance(made, Absent)
  assert 'relative_attention_max_distance' in made.reason


@pytest.mark.hf
@pytest.mark.skipif(
  not _HAS_HF, reason="needs transformers and torch: pip install -e '.[hf,test]'"
)
@pytest.mark.filterwarnings('ignore::DeprecationWarning')
@pytest.mark.filterwarnings('ignore::FutureWarning')
@pytest.mark.filterwarnings('ignore::UserWarning')
@pytest.mark.parametrize('ends', [False, True])
def test_hugging_face_decodes_the_same(tiny, ends):
  import transformers

  case = cases.make_case(tiny, source_length=9, new_tokens=24)
  names = (systems.PLAIN, 'draft_model token', systems.HF_GENERATE, systems.HF_ASSISTED)
  makers = {name: systems.SYSTEMS[name] for name in names}
  if ends:
    tokens = systems.ours(case).run().tokens_BS[0]
    case = case._replace(eos_id=int(tokens[12]))
  result = bench.measure(case, makers, turns=1)
  assert not result.absent
  rows = {each.name: each for each in result.rows}
  assert {each.difference for each in result.rows} == {None}
  assert {each.num_tokens for each in result.rows} == {rows['plain'].num_tokens}
  assert (rows['plain'].num_tokens < 24) == ends
  assert rows[systems.HF_GENERATE].tokens_per_call == 1
  # transformers 5 spoils the cache of an assistant that is a T5.
  if transformers.__version__.startswith('4.'):
    ours = rows['draft_model token'].tokens_per_call
    assert rows[systems.HF_ASSISTED].tokens_per_call == pytest.approx(ours)
    assert ours > 1.5


@pytest.mark.hf
@pytest.mark.skipif(
  not _HAS_HF, reason="needs transformers and torch: pip install -e '.[hf,test]'"
)
def test_hugging_face_assists_one_row(tiny):
  case = cases.make_case(tiny, source_length=4, batch_size=2)
  made = systems.hf_generate(case, assisted=True)
  assert isinstance(made, Absent)
  assert '--batch_size 1' in made.reason


@pytest.mark.t5x
@pytest.mark.skipif(
  importlib.util.find_spec('t5x') is None,
  reason='needs the sources of github.com/google-research/t5x on PYTHONPATH',
)
@pytest.mark.parametrize('ends', [False, True])
def test_t5x_decodes_the_same(tiny, ends):
  case = cases.make_case(tiny, source_length=9, new_tokens=16, batch_size=2)
  case.inputs_BE[1, 5:] = 0
  if ends:
    case = case._replace(eos_id=int(systems.ours(case).run().tokens_BS[0, 8]))
  makers = {name: systems.SYSTEMS[name] for name in (systems.PLAIN, systems.T5X)}
  result = bench.measure(case, makers, turns=1)
  assert not result.absent
  assert result.rows[1].difference is None
  assert (result.rows[0].num_tokens < 32) == ends
