"""Shows which tokens were drafted and accepted, and which the target supplied.

After Figure 1 of Leviathan et al. 2023. With colour: accepted drafts green,
corrections orange, bonus tokens blue, plain tokens in the terminal's own colour.
Without: marks,

  [Die Zelle] *wird* | [rot.] +</s>+

where '|' ends a round, that is, one call of the target.
"""

import codecs
import collections
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from specjax.core.loop import Source


class Token(NamedTuple):
  """An emitted token.

  Attributes:
    piece: its text, as SentencePiece names it: a leading '\u2581' is a space,
      '<0xC3>' a byte.
    source: a code of `loop.Source`.
    round: the round that emitted it, from 1.
  """

  piece: str
  source: int
  round: int


class Look(NamedTuple):
  """How the tokens of one source are shown: a rich style, or marks around them."""

  style: str
  opening: str
  closing: str
  meaning: str


# Mid-tones with contrast on dark and on light terminals; weight and underline
# repeat what the colour says, for those who can not tell the colours apart.
LOOKS = {
  Source.ACCEPTED: Look('#2a9d4a', '[', ']', 'accepted draft'),
  Source.CORRECTION: Look('bold underline #e8590c', '*', '*', 'correction'),
  Source.BONUS: Look('bold #3b82f6', '+', '+', 'bonus'),
  Source.PLAIN: Look('', '', '', 'plain step'),
}
_NAMES = {
  Source.ACCEPTED: 'accepted',
  Source.CORRECTION: 'corrected',
  Source.BONUS: 'bonus',
  Source.PLAIN: 'plain',
}
_SEPARATOR = 'dim'
_BYTE = re.compile(r'<0x([0-9A-Fa-f]{2})>')


def piece_texts(pieces: Iterable[str]) -> list[str]:
  """The text of each piece, in its place.

  '\u2581' becomes a space. A run of byte pieces is decoded as UTF-8, and each
  character is the text of its last byte's piece, so that no piece is lost and
  none is shown twice; bytes that are no UTF-8 become U+FFFD. Control characters,
  which could steer a terminal, become U+FFFD too, and line breaks U+21B5.

  Example:
    >>> piece_texts(['\u2581gr', '<0xC3>', '<0xBC>', 'n'])
    [' gr', '', 'ü', 'n']
  """
  texts: list[str] = []
  decoder = codecs.getincrementaldecoder('utf-8')('replace')
  for piece in pieces:
    byte = _BYTE.fullmatch(piece)
    if byte:
      texts.append(decoder.decode(bytes.fromhex(byte[1])))
      continue
    cut_off = decoder.decode(b'', final=True)
    if cut_off:
      texts[-1] += cut_off
    decoder.reset()
    texts.append(piece.replace('\u2581', ' '))
  cut_off = decoder.decode(b'', final=True)
  if cut_off:
    texts[-1] += cut_off
  return [_printable(text) for text in texts]


def _printable(text: str) -> str:
  text = text.replace('\r\n', '\n').replace('\n', '\u21b5')
  return ''.join(x if x.isprintable() else '\ufffd' for x in text)


def uses_colour(console: Console) -> bool:
  """Whether the console shows colours: a terminal, and NO_COLOR is not set."""
  return console.color_system is not None and not console.no_color


def render(tokens: Sequence[Token], *, colour: bool) -> Text:
  """The running text, tokens shown by source and rounds divided by '|'.

  Neighbours of one source and round share one pair of marks.

  Args:
    tokens: the output, in order.
    colour: styles if true, marks if not.

  Example:
    >>> tokens = [Token('\u2581Die', 1, 1), Token('\u2581rot', 2, 1)]
    >>> str(render(tokens, colour=False))
    '[Die] *rot*'
  """
  texts = piece_texts(token.piece for token in tokens)
  shown = Text()
  keyed = zip(tokens, texts, strict=True)
  previous_round = None
  for (number, source), group in itertools.groupby(
    keyed, lambda pair: (pair[0].round, pair[0].source)
  ):
    text = ''.join(text for _, text in group)
    if previous_round is not None and number != previous_round:
      # The space of the next word stays outside of the separator's own spaces,
      # and a word that goes on is visibly cut: 'Zel|le' but 'Die | Zelle'.
      apart = text.startswith(' ')
      shown.append(' |' if apart else '|', style=_SEPARATOR if colour else '')
    if not shown:
      text = text.removeprefix(' ')
    previous_round = number
    _append(shown, text, LOOKS[Source(source)], colour)
  return shown


def _append(shown: Text, text: str, look: Look, colour: bool) -> None:
  word = text.lstrip(' ')
  shown.append(text[: len(text) - len(word)])
  if colour:
    shown.append(word, style=look.style)
  elif word:
    shown.append(f'{look.opening}{word}{look.closing}')


def legend(*, colour: bool) -> Text:
  """One line that explains colours or marks.

  Example:
    >>> str(legend(colour=False))
    '[accepted draft]  *correction*  +bonus+  plain step  | next target call'
  """
  shown = Text()
  for look in LOOKS.values():
    _append(shown, look.meaning, look, colour)
    shown.append('  ')
  shown.append('|', style=_SEPARATOR if colour else '')
  shown.append(' next target call')
  return shown


def counts_line(tokens: Sequence[Token]) -> str:
  """How many tokens came from where.

  Example:
    >>> counts_line([Token('a', 1, 1), Token('b', 2, 1)])
    '2 tokens in 1 target call (2.00 per call): 1 accepted, 1 corrected'
  """
  if not tokens:
    return '0 tokens'
  calls = max(token.round for token in tokens)
  counts = collections.Counter(Source(token.source) for token in tokens)
  sources = ', '.join(
    f'{counts[source]} {name}' for source, name in _NAMES.items() if counts[source]
  )
  return (
    f'{len(tokens)} token{"s" * (len(tokens) > 1)} in {calls} target call'
    f'{"s" * (calls > 1)} ({len(tokens) / calls:.2f} per call): {sources}'
  )


def print_trace(tokens: Sequence[Token], console: Console, indent: int = 2) -> None:
  """Prints the rendered text and its counts; print `legend` once, before."""
  colour = uses_colour(console)
  for text in (
    render(tokens, colour=colour),
    Text(counts_line(tokens), style='dim' if colour else ''),
  ):
    for line in text.wrap(console, max(console.width - indent, 20)):
      line.rstrip()
      console.print(Text(' ' * indent) + line, highlight=False)
