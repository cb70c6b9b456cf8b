"""The benchmark's command: what it compares, counts, names and prints."""

import importlib.util
import io
import json

import jax
import numpy as np
import pytest
import rich.console

from specjax.checkpoints import leaves, store
from specjax.eval import bench, cases, race, systems
from specjax.eval.interleave import Samples
from specjax.eval.systems import Absent
from specjax.models.t5 import T5Config, Transformer
from specjax.models.t5.config import SIZES

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


def write(folder, name):
  """A checkpoint of one layer."""
  config = T5Config(**{**TINY, 'num_encoder_layers': 1, 'num_decoder_layers': 1})
  path = folder / f'{name}.safetensors'
  store.write(path, cases.random_weights(config, len(name)))
  return str(path)


def greedy(case):
  """The first row's ids, the start token among them."""
  return systems.ours(case).decode(case.batches[0]).tokens_BS[0].tolist()


def shown(result, width=88):
  console = rich.console.Console(file=io.StringIO(), width=width)
  bench.print_result(result, console)
  return console.file.getvalue()


@pytest.mark.slow
def test_the_command_on_a_pair(tmp_path, monkeypatch, capsys):
  find_spec = importlib.util.find_spec
  missing = ('t5x', 'torch', 'transformers')
  monkeypatch.setattr(
    importlib.util,
    'find_spec',
    lambda name, *rest: None if name in missing else find_spec(name, *rest),
  )
  monkeypatch.delitem(systems.sys.modules, 't5x', raising=False)
  chosen = (systems.PLAIN, 'draft_model token', *THEIRS)
  arguments = ['--model', write(tmp_path, 'target'), '--systems', ','.join(chosen)]
  arguments += ['--draft_model', write(tmp_path, 'draft')]
  arguments += ['--source_length', '8', '--max_new_tokens', '6', '--batch_size', '2']
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
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_all_of_our_systems_agree(tiny, dtype):
  options = {'source_length': 9, 'max_new_tokens': 24, 'batch_size': 2}
  case = cases.make_case(size=tiny, dtype=dtype, num_batches=2, **options)
  makers = {name: make for name, make in systems.SYSTEMS.items() if name not in THEIRS}
  result = race.race(case, makers, turns=1)
  assert len(result.rows) == 5
  assert {each.num_tokens for each in result.rows} == {96}
  if dtype == 'float32':
    assert {each.differences for each in result.rows} == {()}
  assert not any(each.is_fault for each in result.rows)
  calls = {each.name: each.tokens_per_call for each in result.rows}
  assert calls['draft_model token'] == calls['draft_model block'] > 1.5


def test_a_different_system_is_shown_and_fails(tmp_path, monkeypatch, capsys):
  def wrong(case):
    system = systems.ours(case)

    def tokens(state):
      found_BL = system.tokens(state).copy()
      found_BL[0, 2] = 9 if found_BL[0, 2] != 9 else 10
      return found_BL

    return system._replace(tokens=tokens)

  makers = {systems.PLAIN: systems.ours, systems.HF_GENERATE: wrong}
  monkeypatch.setattr(systems, 'SYSTEMS', makers)
  arguments = ['--model', write(tmp_path, 'target'), '--max_new_tokens', '4']
  arguments += ['--gamma', '2', '--turns', '1', '--output', f'{tmp_path}/bench.json']
  assert bench.main(arguments) == bench.DIFFERENT
  printed = ' '.join(capsys.readouterr().out.split())
  assert printed.count('DIFFERENT') == 1
  assert 'hf generate differs from plain in 1 of the rows: row 0, token 2: 9' in printed
  assert 'NOT a tie' in printed
  plain, other = json.loads((tmp_path / 'bench.json').read_text())['systems']
  assert plain['different_rows'] == 0
  assert (other['different_rows'], other['near_ties']) == (1, 0)


def test_near_ties_are_no_failure():
  tie = race.Difference(1, 2, 5, 9, 3e-6, True)
  fault = race.Difference(0, 2, 5, 9, 2e-1, False)
  rows = (row('plain', (1.0,)), row('t5x', (1.0,), differences=(tie,)))
  assert not rows[1].is_fault
  printed = shown(race.Result(rows, {}))
  assert 'near-ties' in printed.splitlines()[4]
  assert 'a near-tie, which rounding decides' in printed
  both = row('t5x', (1.0,), differences=(tie, fault))
  assert both.is_fault
  printed = shown(race.Result((rows[0], both), {}))
  assert 'DIFFERENT' in printed
  assert 't5x differs from plain in 2 of the rows: row 0' in ' '.join(printed.split())


def row(name, seconds, calls=None, differences=()):
  return race.Row(name, Samples(seconds), 1.0, 100, calls, differences)


def test_whoever_loses_is_printed():
  rows = (
    row(systems.PLAIN, (2.0, 4.0, 2.0), 1.0),
    row('draft_model token', (1.0, 1.0, 1.0), 4.0),
    row(systems.T5X, (1.0, 2.0, 1.0)),
    row(systems.HF_ASSISTED, (3.0, 3.0, 3.0), 2.0),
  )
  printed = shown(race.Result(rows, {systems.HF_GENERATE: 'not there [at all]'}))
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
  printed = shown(race.Result(tuple(rows), {}), width=80)
  table = printed.splitlines()[: len(rows) + 3]
  assert '…' not in ''.join(table), printed
  for name, line in zip(systems.SYSTEMS, table[3:], strict=True):
    assert line.strip().startswith(name)


def test_a_controlled_pair(tiny):
  case = cases.make_case(size=tiny, source_length=5, batch_size=2)
  assert case.draft is not None
  assert case.draft.config.num_decoder_layers == cases.DRAFT_LAYERS
  assert case.eos_id == -1
  assert 'Controlled pair' in case.notes[0]
  assert case.batches[0].shape == (2, 5)
  assert case.batches[0].min() >= 3
  # With later layers that add nothing, draft and target are one function.
  config = T5Config(**TINY)
  weights = cases.random_weights(config, 0)

  def logits(weights):
    apply = jax.jit(Transformer(weights.config).apply)
    params = leaves.restore(weights)
    return apply({'params': params}, case.batches[0], case.batches[0])

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
  case = cases.make_case(size=tiny, draft=tiny, source_length=4)
  assert any('unrelated to the target' in note for note in case.notes)
  assert cases.make_case(size=tiny, draft='none', source_length=4).draft is None


def test_texts_of_the_embedded_pair():
  case = cases.make_case('embedded', source_length=16, batch_size=3)
  assert [each.shape for each in case.batches] == [(3, 16)] * cases.TEXT_BATCHES
  assert (case.batches[0] != case.batches[1]).any()
  assert case.eos_id == 1
  assert (case.batches[0] == 1).sum(axis=1).tolist() == [1, 1, 1]
  assert case.draft is not None


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--systems', 'plain,t5'], "systems: 't5' is unknown; choose from plain, "),
    (['--gamma', '0'], 'gamma: 0; give 1 or more'),
    (['--turns', '0'], 'turns: 0; give 1 or more'),
    (['--model', 'nowhere'], "model: 'nowhere' is neither 'embedded'"),
    (['--size', 'tinny'], "size: 'tinny' is unknown; did you mean tiny"),
    (['--gamma', '64'], 'num_speculative_tokens: 64 is more than max_new_tokens 64'),
    (['--config', 'embeded'], 'did you mean embedded?'),
    (['--dtype', 'int8'], "invalid choice: 'int8'"),
    (['--num_batches', '0'], 'num_batches: 0; give 1 or more'),
    (
      ['--model', 'embedded', '--draft_model', 'tiny'],
      "choose a draft of the target's",
    ),
    (['--output', 'no/such/folder.json'], 'output: there is no folder no/such'),
    (['--speed', '1'], 'unrecognized arguments: --speed 1; see python -m specjax'),
  ],
)
def test_errors_are_one_line(tiny, capsys, arguments, message):
  target = [] if {'--model', '--size'} & {*arguments} else ['--size', tiny]
  assert bench.main([*target, *arguments]) == bench.USAGE_ERROR
  printed = capsys.readouterr().err
  assert message in printed
  assert printed.count('\n') == 1


def test_a_network_that_t5x_has_not():
  config = T5Config(**TINY, relative_attention_max_distance=20)
  case = cases.Case(leaves.Weights(config, {}, {}), None, {}, (), 4, 2, 1, ())
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

  case = cases.make_case(size=tiny, source_length=9, max_new_tokens=24)
  names = (systems.PLAIN, 'draft_model token', systems.HF_GENERATE, systems.HF_ASSISTED)
  makers = {name: systems.SYSTEMS[name] for name in names}
  if ends:
    case = case._replace(eos_id=greedy(case)[12])
  result = race.race(case, makers, turns=1)
  assert not result.absent
  rows = {each.name: each for each in result.rows}
  assert {each.differences for each in result.rows} == {()}
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
  case = cases.make_case(size=tiny, source_length=4, batch_size=2)
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
  case = cases.make_case(size=tiny, source_length=9, max_new_tokens=16, batch_size=2)
  case.batches[0][1, 5:] = 0
  if ends:
    case = case._replace(eos_id=greedy(case)[8])
  makers = {name: systems.SYSTEMS[name] for name in (systems.PLAIN, systems.T5X)}
  result = race.race(case, makers, turns=1)
  assert not result.absent
  assert result.rows[1].differences == ()
  assert (result.rows[0].num_tokens < 32) == ends


def test_a_configuration_gives_defaults(tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text(
    'from specjax import config as c\n'
    "CONFIG = c.RunConfig(pair=c.PairConfig(model='there', draft_model='here'),\n"
    '  speculation=c.SpeculationConfig(num_speculative_tokens=6),\n'
    '  sampling=c.SamplingConfig(max_new_tokens=20, seed=3))\n'
  )
  options = bench.parse(['--config', str(path), '--seed', '5'])
  found = (options.model, options.draft_model, options.gamma, options.max_new_tokens)
  assert found == ('there', 'here', 6, 20)
  assert options.seed == 5


def test_the_folder_of_a_pair(tmp_path):
  write(tmp_path, 'target')
  write(tmp_path, 'draft')
  case = cases.make_case(str(tmp_path), source_length=4)
  assert case.draft is not None
  kernel = 'decoder/layers_0/mlp/wo/kernel'
  target, draft = (
    leaves.read_whole(each.leaves[kernel]) for each in (case.target, case.draft)
  )
  assert (target != draft).any()
  np.testing.assert_array_equal(
    case.params.draft['decoder']['layers_0']['mlp']['wo']['kernel'], draft
  )


def test_bfloat16(tiny):
  case = cases.make_case(size=tiny, dtype='bfloat16', source_length=4)
  assert case.dtype == case.draft.config.dtype == 'bfloat16'
  assert {leaf.dtype.name for leaf in jax.tree.leaves(case.params)} == {'bfloat16'}


@pytest.mark.parametrize(('budget', 'gamma'), [(20, 4), (3, 2)])
def test_a_configuration_without_a_gamma(tmp_path, budget, gamma):
  path = tmp_path / 'mine.py'
  path.write_text(
    'from specjax import config as c\n'
    f'CONFIG = c.RunConfig(sampling=c.SamplingConfig(max_new_tokens={budget}))\n'
  )
  assert bench.parse(['--config', str(path)]).gamma == gamma


def test_a_configuration_that_chooses_gamma_is_refused(tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text(
    'from specjax import config as c\n'
    'CONFIG = c.RunConfig(speculation=c.SpeculationConfig(\n'
    "  num_speculative_tokens='auto'))\n"
  )
  with pytest.raises(ValueError, match=r"^num_speculative_tokens: 'auto' in "):
    bench.parse(['--config', str(path)])
