"""Tables that fit a terminal, and plain ones for files."""

import io

import pytest

from specjax.eval import report

RESULTS = [
  report.Result(
    task='ende',
    method='draft_model',
    gamma=4,
    acceptance_rate=0.484,
    alpha=0.61,
    tokens_per_call=2.71,
    c=0.22,
    v=2.1,
    predicted=0.89,
    measured=0.93,
    low=0.91,
    high=0.95,
    identical=True,
  ),
  report.Result('ende', 'ngram', 7, 0.0, 1.0, 12.5, 0.0, 2.4, 10.5, 11.0, 9.0, 13.0),
  report.Result('fix', 'draft_model with block rule', identical=False),
]


def drawn(results, colour=False):
  console = report.make_console(colour, io.StringIO(), width=80)
  console.print(report.table(results, colour=colour))
  return console.file.getvalue()


def test_cells():
  assert report.cells(RESULTS[0]) == (
    *('ende', 'draft_model', '4', '.48', '.61', '2.71', '.22', '2.10'),
    *('0.89', '0.93±.02', 'yes'),
  )
  assert report.cells(RESULTS[2])[2:] == ('-',) * 8 + ('NO',)


def test_the_table_fits_80_columns_and_shows_every_cell_whole():
  text = drawn(RESULTS)
  lines = text.splitlines()
  assert max(map(len, lines)) <= 80
  assert '…' not in text
  for result in RESULTS[:2]:
    for cell in report.cells(result)[1:]:
      assert cell in text
  assert text.count('ende') == 1  # a task's name is shown once
  for word in ['draft_model', 'with', 'block', 'rule']:
    assert word in text


def test_colours_only_on_demand(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm-256color')
  monkeypatch.delenv('NO_COLOR', raising=False)
  assert '\x1b[' in drawn(RESULTS, colour=True)
  assert '\x1b[' not in drawn(RESULTS, colour=False)


def test_files_get_a_plain_table_that_never_wraps(monkeypatch):
  monkeypatch.delenv('FORCE_COLOR', raising=False)
  console = report.make_console(None, io.StringIO(), width=40)
  long_name = report.Result('a task with a long name ' * 5, 'ngram', 7)
  report.print_results([*RESULTS, long_name], console)
  lines = console.file.getvalue().splitlines()
  assert len(lines) == 5
  assert lines[0].split() == [
    *('task', 'method', 'gamma', 'accept_rate', 'alpha', 'tokens/call', 'c', 'v'),
    *('predicted', 'measured', 'same_text'),
  ]
  assert 'ende' in lines[1]
  assert 'ende' in lines[2]
  assert '\x1b' not in console.file.getvalue()


def test_a_terminal_gets_the_drawn_table(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm-256color')
  monkeypatch.delenv('NO_COLOR', raising=False)
  console = report.make_console(True, io.StringIO(), width=80)
  report.print_results(RESULTS, console)
  assert '───' in console.file.getvalue()


@pytest.mark.parametrize(
  ('result', 'line'),
  [
    (
      RESULTS[0],
      'ende, draft_model, gamma 4: 0.93x as fast as plain decoding'
      ' (predicted 0.89x), same text.',
    ),
    (RESULTS[2], 'fix, draft_model with block rule: DIFFERENT text.'),
    (
      report.Result('fix', 'ngram', 7, tokens_per_call=3.1),
      'fix, ngram, gamma 7: 3.10 tokens per target call.',
    ),
    (report.Result('fix', 'none'), 'fix, none: nothing measured.'),
  ],
)
def test_verdict(result, line):
  assert report.verdict(result) == line
