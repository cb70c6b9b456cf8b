"""Draft shapes: parameters and work counted by hand, and S from them."""

import json
import math
import sys

import numpy as np
import pytest

from specjax import published
from specjax.checkpoints import store
from specjax.checkpoints.leaves import expected_shapes
from specjax.eval import roofline, theory
from specjax.models.t5 import SIZES, T5Config
from specjax.parallel.topology import V4, find
from specjax.testing.tiny_pair import blank_t5
from specjax.train import shape_costs, shapes
from specjax.train.config import run_command
from specjax.train.shape_costs import Request

TINY = T5Config(
  vocab_size=100,
  emb_dim=8,
  num_heads=2,
  head_dim=3,
  mlp_dim=10,
  num_encoder_layers=1,
  num_decoder_layers=2,
  dtype='bfloat16',
)
XXL = T5Config.from_size('t5_1_1_xxl', dtype='bfloat16')
SMALL = T5Config.from_size('t5_1_1_small', dtype='bfloat16')
CHIP = find('v4')


@pytest.mark.parametrize('name', ['t5_1_1_small', 't5_1_0_base', 'byt5_small'])
def test_parameters_are_those_of_the_network(name):
  config = T5Config.from_size(name)
  total = sum(math.prod(shape) for shape in expected_shapes(config).values())
  assert shape_costs.num_parameters(config) == total
  assert published.num_parameters(name) == pytest.approx(total, rel=2e-3)


def test_work_of_a_step_by_hand():
  request = Request(batch_size=3, source=20, slots=30)
  # A layer: self-attention 4 x 8 x 6, cross-attention 2 x 8 x 6 (keys and values of the
  # source are there), feed-forward 3 x 8 x 10; a head of 100 x 8.
  weights = 2 * (4 * 48 + 2 * 48 + 240) + 800
  caches = 2 * 2 * 3 * (20 + 30) * 6
  attention = 2 * 2 * 2 * 3 * 5 * (20 + 30) * 6
  work = shape_costs.step_work(TINY, 5, request)
  assert work.nbytes == 2 * (weights + caches)
  assert work.flops == 2 * 3 * 5 * weights + attention
  assert work.collectives == ()
  split = shape_costs.step_work(TINY, 5, request, 4)
  assert split.nbytes == work.nbytes / 4
  (sums,) = split.collectives
  assert (sums.kind, sums.group, sums.times) == ('all-reduce', 4, 6)
  assert sums.nbytes == 3 * 5 * 8 * 2


def test_costs_are_near_the_compilers():
  """docs/aot.md: a plain step of this target moves 11.6 GB, one of the draft 89 MB."""
  work = shape_costs.step_work(XXL, 1, Request())
  assert work.nbytes == pytest.approx(11.6e9, rel=0.03)
  assert shape_costs.step_work(SMALL, 1, Request()).nbytes == pytest.approx(
    89e6, rel=0.06
  )
  costs = shape_costs.roofline_costs(XXL, CHIP, Request(), 8)
  assert costs.plain == pytest.approx(work.nbytes / V4.hbm_bandwidth)
  assert list(costs.verify) == list(range(1, 9))
  assert costs.verify[8] == pytest.approx(costs.plain, rel=0.02), 'v is 1 on a TPU'


def test_search_orders_by_speedup_and_knows_what_was_measured():
  costs = shape_costs.roofline_costs(XXL, CHIP, Request(), 16)
  candidates = [
    ('same', XXL, 0.9, False), ('small', SMALL, 0.6, True), ('poor', SMALL, 0.2, False)
  ]  # fmt: skip
  rows = shape_costs.search(candidates, CHIP, Request(), costs)
  assert [row.name for row in rows] == ['small', 'poor', 'same']
  small, _, same = rows
  assert same.c == pytest.approx(1.0)
  assert (same.gamma, same.speedup) == (0, 1.0)
  assert (small.is_measured, same.is_measured) == (True, False)
  v = [1.0, *(seconds / costs.plain for seconds in costs.verify.values())]
  by_hand = [theory.speedup(0.6, gamma, small.c, v) for gamma in range(17)]
  assert small.gamma == int(np.argmax(by_hand))
  assert small.speedup == pytest.approx(max(by_hand))


def test_alpha_to_lead():
  costs = shape_costs.roofline_costs(XXL, CHIP, Request(), 16)
  candidates = [('small', SMALL, 0.6, True), ('same', XXL, 0.9, False)]
  small, same = shape_costs.search(candidates, CHIP, Request(), costs)
  found = shape_costs.needed_alpha(small, small.speedup, costs)
  assert found == pytest.approx(0.6, abs=1e-6)
  assert shape_costs.needed_alpha(same, small.speedup, costs) is None


def test_presets_fit_a_target_and_are_narrower_or_shallower():
  for name in ('t5_1_1_xxl', 't5_1_0_small', 'byt5_small'):
    target = T5Config.from_size(name)
    found = shape_costs.presets(target)
    assert len(set(found.values())) == len(found) > 4
    for config in found.values():
      assert config.vocab_size == target.vocab_size
      smaller = shape_costs.num_parameters(config)
      assert smaller < shape_costs.num_parameters(target)
  wide = shape_costs.presets(XXL)['shallow, wide']
  assert (wide.num_decoder_layers, wide.emb_dim) == (1, 4096)
  assert set(SIZES) >= {'t5_1_1_xxl'}


def aot_json(path):
  seconds = {'plain': 0.010, 'draft': 0.0005, 'verify_3': 0.012, 'verify_5': 0.016}
  path.write_text(json.dumps({
    'config': {
      'target': 't5_1_1_xl', 'draft': 't5_1_1_small', 'dtype': 'bfloat16'
    },
    'topology': {'name': 'v4:2x2x1'},
    'roofline': {name: {'seconds': each} for name, each in seconds.items()},
  }))  # fmt: skip
  return path


def test_times_of_compiled_programs_replace_the_targets(tmp_path):
  target, place, costs = shape_costs.aot_costs(aot_json(tmp_path / 'aot.json'), 16)
  assert target == T5Config.from_size('t5_1_1_xl', dtype='bfloat16')
  assert place == 'v4:2x2x1'
  assert costs.plain == 0.010
  assert costs.verify == pytest.approx({1: 0.011, 2: 0.012, 3: 0.014, 4: 0.016})
  (row,) = shape_costs.search(
    [('small', SMALL, 0.5, True)], find(place), Request(), costs
  )
  assert row.c == pytest.approx(0.05)
  base = T5Config.from_size('t5_1_1_base', dtype='bfloat16')
  (row,) = shape_costs.search(
    [('base', base, 0.5, True)], find(place), Request(), costs
  )
  bound = roofline.bound(shape_costs.step_work(base, 1, Request()), V4)
  assert row.c == pytest.approx(bound.seconds / 0.010)
  (tmp_path / 'bad.json').write_text('{}')
  with pytest.raises(ValueError, match=r'aot: .*bad.json is no JSON of python -m'):
    shape_costs.aot_costs(tmp_path / 'bad.json', 16)


def run(monkeypatch, *argv):
  monkeypatch.setattr(sys, 'argv', ['shapes', *argv])
  run_command(shapes.main)


def test_the_table(monkeypatch, capsys, tmp_path):
  draft = blank_t5(384)
  (tmp_path / 'a_run').mkdir()
  store.save(
    tmp_path / 'a_run' / 'best.safetensors',
    draft.params,
    draft.config,
    notes={'alpha': 0.77},
  )
  output = tmp_path / 'rows.jsonl'
  weights = str(tmp_path / 'a_run' / 'best.safetensors')
  run(
    monkeypatch, '--target', 'byt5_small', '--alpha', '0.5', '--draft', weights,
    '--also', 'byt5_small', '--output', str(output),
  )  # fmt: skip
  page = capsys.readouterr().out
  rows = [json.loads(line) for line in output.read_text().splitlines()]
  speedups = [row['speedup'] for row in rows]
  assert speedups == sorted(speedups, reverse=True)
  measured = [row for row in rows if row['is_measured']]
  assert [row['alpha'] for row in measured] == [0.77]
  assert rows[0] == measured[0]
  assert T5Config.from_dict(rows[0]['config']).emb_dim == draft.config.emb_dim
  lines = [line for line in page.splitlines() if 'a_run' in line]
  assert len(lines) == 1
  assert '0.770 ' in lines[0]
  assert '0.500*' in page
  assert page.index('a_run') < page.index('shallow, wide')
  assert 'assumed: a draft earns its alpha by training' in page


@pytest.mark.parametrize(
  ('argv', 'message'),
  [
    (['--alpha', '1.5'], 'alpha: 1.5; a probability in [0, 1] is needed'),
    (['--topology', 'v9'], "topology: 'v9' is unknown;"),
    (['--target', 't5_1_1_xxxl'], "unknown T5 size 't5_1_1_xxxl'; did you mean"),
    (['--also', 'byt5_small'], 'also: byt5_small has 384 logits, the target 32128'),
    (['--batch-size', '0'], 'batch_size: 0; give 1 or more'),
  ],
)
def test_bad_input_is_one_line(monkeypatch, capsys, argv, message):
  with pytest.raises(SystemExit) as stop:
    run(monkeypatch, *argv)
  assert stop.value.code == 2
  error = capsys.readouterr().err
  assert error.startswith(f'error: {message}')
  assert error.count('\n') == 1
