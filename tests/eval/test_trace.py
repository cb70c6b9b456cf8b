"""The rendered trace, with colours and without."""

import io

import pytest
from rich.console import Console

from specjax.core.loop import Source
from specjax.eval import trace
from specjax.eval.report import make_console

A, C, B, P = Source.ACCEPTED, Source.CORRECTION, Source.BONUS, Source.PLAIN


def tokens(*triples):
  return [trace.Token(*triple) for triple in triples]


EXAMPLE = tokens(
  ('▁Die', A, 1),
  ('▁Z', A, 1),
  ('elle', B, 1),
  ('▁wird', A, 2),
  ('▁gr', C, 2),
  ('<0xC3>', A, 3),
  ('<0xBC>', A, 3),
  ('n', C, 3),
  ('.', P, 4),
  ('</s>', P, 5),
)


def test_marks_without_colour():
  text = str(trace.render(EXAMPLE, colour=False))
  assert text == '[Die Z]+elle+ | [wird] *gr*|[ü]*n*|.|</s>'


def test_colours_without_marks():
  text = trace.render(EXAMPLE, colour=True)
  assert str(text) == 'Die Zelle | wird gr|ün|.|</s>'

  def style_of(word):
    start = str(text).index(word)
    return next(
      span.style for span in text.spans if span.start <= start < span.end and span.style
    )

  styles = [style_of('Die'), style_of('elle'), style_of('gr')]
  assert len(set(styles)) == 3
  assert styles[0] == trace.LOOKS[A].style


def test_every_source_of_a_token_has_a_look_and_a_mark_of_its_own():
  assert set(trace.LOOKS) == set(Source) - {Source.NONE}
  assert len({look.style for look in trace.LOOKS.values()}) == 4
  assert len({look.opening for look in trace.LOOKS.values()}) == 4
  legend = str(trace.legend(colour=False))
  for look in trace.LOOKS.values():
    assert f'{look.opening}{look.meaning}{look.closing}' in legend
  assert '|' in legend
  assert '[' not in str(trace.legend(colour=True))


def test_neighbouring_rounds_of_one_source_are_divided():
  text = trace.render(tokens(('▁a', A, 1), ('▁b', A, 2), ('c', A, 3)), colour=False)
  assert str(text) == '[a] | [b]|[c]'


def test_bytes_become_characters_where_they_are_complete():
  assert trace.piece_texts(['<0xE2>', '<0x82>', '<0xAC>', '▁5']) == ['', '', '€', ' 5']
  assert trace.piece_texts(['<0xE2>', '<0x82>', 'x']) == ['', '\ufffd', 'x']
  assert trace.piece_texts(['<0xC3>']) == ['\ufffd']
  assert trace.piece_texts(['<0xFF>', 'a']) == ['\ufffd', 'a']
  assert trace.piece_texts(['<0xzz>', '<0x4']) == ['<0xzz>', '<0x4']
  assert trace.piece_texts([]) == []


def test_control_characters_do_not_reach_the_terminal():
  shown = trace.piece_texts(['<0x1B>', '[31m', 'a\x07b', 'line\nbreak', '<0x0A>'])
  assert shown == ['\ufffd', '[31m', 'a\ufffdb', 'line↵break', '↵']


def test_markup_in_the_text_is_text():
  console = make_console(False, io.StringIO(), width=80)
  trace.print_trace(tokens(('[bold]', P, 1), ('[/x]', P, 2)), console)
  assert '[bold]|[/x]' in console.file.getvalue()


def test_counts_line():
  assert trace.counts_line(EXAMPLE) == (
    '10 tokens in 5 target calls (2.00 per call): 5 accepted, 2 corrected, 1 bonus,'
    ' 2 plain'
  )
  assert trace.counts_line([]) == '0 tokens'


@pytest.mark.parametrize('colour', [True, False])
def test_printed_lines_fit_and_have_no_trailing_spaces(colour, monkeypatch):
  monkeypatch.delenv('NO_COLOR', raising=False)
  monkeypatch.setenv('TERM', 'xterm-256color')
  console = make_console(colour, io.StringIO(), width=80)
  long = [
    token._replace(round=token.round + 5 * i) for i in range(20) for token in EXAMPLE
  ]
  trace.print_trace(long, console)
  output = console.file.getvalue()
  assert ('\x1b[' in output) == colour
  if not colour:
    lines = output.splitlines()
    assert len(lines) > 5
    assert all(len(line) <= 80 for line in lines)
    assert all(line == line.rstrip() for line in lines)
    assert all(line.startswith('  ') for line in lines)


def test_no_color_and_pipes_get_marks(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm-256color')
  monkeypatch.delenv('NO_COLOR', raising=False)
  monkeypatch.delenv('FORCE_COLOR', raising=False)
  assert not trace.uses_colour(Console(file=io.StringIO()))
  assert trace.uses_colour(Console(file=io.StringIO(), force_terminal=True))
  monkeypatch.setenv('NO_COLOR', '1')
  assert not trace.uses_colour(Console(file=io.StringIO(), force_terminal=True))


def test_an_empty_output_is_shown():
  console = make_console(False, io.StringIO(), width=80)
  trace.print_trace([], console)
  assert '0 tokens' in console.file.getvalue()
