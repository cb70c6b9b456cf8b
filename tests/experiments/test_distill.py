"""The experiment's arithmetic, its table and picture; all of it, tiny, if asked for."""

import json

import pytest
import rich.console

from experiments.distill import __main__ as command


def record(divergence, data, alpha, draft='cut', steps=100):
  return {
    'draft': draft,
    'divergence': divergence,
    'data': data,
    'steps': steps,
    'alpha': {'0': 0.1, str(steps // 2): 0.3, str(steps): alpha},
    'alpha_by_task': {'ende': alpha - 0.2, 'fix': alpha + 0.2},
    'best_step': steps,
    'c': 0.1,
    'gamma': 3,
    'speedup': 1.5,
    'seconds': 7,
  }


RECORDS = [
  record('cross_entropy', 'fixed', 0.5),
  record('forward_kl', 'target', 0.5625),
  record('tvd', 'target', 0.25),
  record('forward_kl', 'draft', 0.5),
  record('cross_entropy', 'fixed', 0.625, 'cut, longest', 1600),
  record('kl_then_tvd', 'target', 0.75, 'cut, longest', 1600),
  record('cross_entropy', 'fixed', 0.75, 'embedded'),
  record('forward_kl', 'target', 0.875, 'embedded'),
]


def test_gains_are_over_cross_entropy_of_the_same_draft():
  gains = [command.gain(each, RECORDS) for each in RECORDS]
  assert gains == [0.0, 0.0625, -0.25, 0.0, 0.0, 0.125, 0.0, 0.125]


def test_the_table_says_so():
  console = rich.console.Console(width=140, record=True, quiet=False)
  with console.capture() as capture:
    console.print(command.table(RECORDS))
  lines = capture.get().splitlines()
  (line,) = (line for line in lines if 'embedded' in line and 'forward_kl' in line)
  for cell in ('0.100', '0.875', '+0.125', '0.675', '1.075', '1.50'):
    assert cell in line
  assert sum('-0.250' in line for line in lines) == 1


def test_the_picture_has_every_run_in_its_panel(tmp_path):
  command.picture(RECORDS, tmp_path / 'alpha.png')
  assert (tmp_path / 'alpha.png').read_bytes().startswith(b'\x89PNG')
  panels = command.panels(RECORDS)
  assert [
    [(e['divergence'], e['data']) for e in shown] for shown in panels.values()
  ] == [
    [('cross_entropy', 'fixed'), ('forward_kl', 'target'), ('tvd', 'target')],
    [('cross_entropy', 'fixed'), ('forward_kl', 'target'), ('forward_kl', 'draft')],
    [('cross_entropy', 'fixed'), ('kl_then_tvd', 'target')],
    [('cross_entropy', 'fixed'), ('forward_kl', 'target')],
  ]


def test_short_examples_are_short_and_of_both_tasks():
  vocabulary = command.text.sentencepiece_vocabulary(command.ASSETS / 'vocab.model')
  pairs = command.short_pairs(vocabulary, 'valid', 5)
  assert len(pairs) == 10
  assert max(len(each.source) for each in pairs) <= command.LONGEST
  assert max(len(each.target) for each in pairs) <= command.LONGEST
  prefixes = [vocabulary.decode(each.source)[:4] for each in pairs]
  assert prefixes == ['ende'] * 5 + ['fix:'] * 5


@pytest.mark.slow
def test_a_quick_run(tmp_path, capsys):
  command.main(['--quick', '--output', str(tmp_path)])
  lines = (tmp_path / 'results.jsonl').read_text().splitlines()
  records = [json.loads(line) for line in lines]
  assert [(each['divergence'], each['data']) for each in records] == [
    ('cross_entropy', 'fixed'), ('forward_kl', 'draft')
  ]  # fmt: skip
  for each in records:
    assert each['alpha']['0'] > 0.7, 'the embedded draft is a good one'
    assert 0.5 < command.last_alpha(each) <= 1
  assert 'over CE' in capsys.readouterr().out
  assert (tmp_path / 'alpha.png').stat().st_size > 10_000
