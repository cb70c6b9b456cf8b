"""Draws the pictures of the documentation, from the embedded pair.

  python scripts/pictures.py            docs/trace.png and docs/round.png
  python scripts/pictures.py --text     prints the round of docs/how-it-works.md

Needs the extra `plots`. Seeds are fixed: the same pictures on every machine.
"""

import argparse
import pathlib
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

import specjax
from specjax.command.session import trace_tokens
from specjax.core import loop, rng
from specjax.core.verify import token_verifier
from specjax.eval import trace
from specjax.generation import make_batches

DOCS = pathlib.Path(__file__).resolve().parents[1] / 'docs'
WIDTH = 84  # columns of the trace
TRACED = (
  'ende: Click the icon to open the dialog.',
  'ende: Enter the radius of the circle that you want to use to round the corners.',
  'summ: Flips the selected object(s) horizontally from left to right. Choose Shape - '
  'Flip - Horizontally (LibreOffice Draw). Choose Format - Image - Properties, and '
  'then click the Image tab.',
  'fix: Selecct the formatting style for the separator line. If you do not want a '
  'separator line, choose "None".',
)
SOURCE = 'ende: Enter the name of the table that you want to use.'
SEED = 0
NUM_DRAFT = 4


class Round(NamedTuple):
  """What one round of one row saw; G drafts, V ids.

  Attributes:
    prefix: emitted tokens before it.
    drafts: ids [G]; q_GV, p_G1V: laws; coin_G: uniforms.
    num_accepted: n.
    next_token: the correction or bonus.
  """

  prefix: tuple[int, ...]
  drafts: np.ndarray
  q_GV: np.ndarray
  p_G1V: np.ndarray
  coin_G: np.ndarray
  num_accepted: int
  next_token: int

  @property
  def ratio_G(self) -> np.ndarray:
    """min(1, p / q) of each draft."""
    place_G = np.arange(len(self.drafts))
    p_G, q_G = self.p_G1V[place_G, self.drafts], self.q_GV[place_G, self.drafts]
    return np.minimum(1.0, p_G / q_G)


def record_rounds(pair: specjax.Pair, source: str, seed: int) -> list[Round]:
  """Decodes at temperature 1, with `loop.step` itself, and looks over its shoulder."""
  row = specjax.SamplingConfig(temperature=1.0, seed=seed)
  speculation = specjax.SpeculationConfig(num_speculative_tokens=NUM_DRAFT)
  params, static = pair.decoder(speculation, max_new_tokens=row.max_new_tokens)
  (batch,) = make_batches(pair.encode([source]), [row], [NUM_DRAFT], batch_size=1)
  seen: list[Any] = []

  def verifier(accept_key_B, resample_key_B, draft, logp_BG1V):
    verdict = token_verifier(accept_key_B, resample_key_B, draft, logp_BG1V)
    coin_BG = rng.uniform(accept_key_B, NUM_DRAFT)
    seen.append((draft.tokens_BG, draft.logq_BGV, logp_BG1V, coin_BG, *verdict))
    return verdict

  static |= {'verifier': verifier}
  names = ('target', 'drafter', 'max_len')
  with pair.precision():
    state = loop.start(
      params, batch.inputs_BE, batch.sampling, **{name: static[name] for name in names}
    )
    rounds = []
    while not bool(state.done_B[0]):
      prefix = np.asarray(state.tokens_BS)[0, 1 : int(state.length_B[0])]
      state = loop.step(params, state, batch.row_key_B, batch.sampling, **static)
      drafts, logq, logp, coins, num, token = (np.asarray(x)[0] for x in seen[-1])
      laws = (np.exp(logq), np.exp(logp), coins)
      rounds.append(Round(tuple(prefix.tolist()), drafts, *laws, int(num), int(token)))
  return rounds


def residual(each: Round) -> np.ndarray:
  """norm(max(p - q, 0)) where the draft was rejected; p where none was."""
  p_V = each.p_G1V[each.num_accepted]
  if each.num_accepted == len(each.drafts):
    return p_V
  left_V = np.maximum(p_V - each.q_GV[each.num_accepted], 0.0)
  return left_V / left_V.sum()


def describe(pair: specjax.Pair, each: Round) -> str:
  """The round as text: one line a draft, then the residual."""
  piece = pair.vocabulary.piece
  lines = [
    f'emitted   {pair.vocabulary.decode(list(each.prefix))!r}',
    f'{"draft":12}{"q(x)":>8}{"p(x)":>8}{"min(1,p/q)":>12}{"u":>8}',
  ]
  for i, token in enumerate(each.drafts):
    verdict = 'accept' if each.coin_G[i] < each.ratio_G[i] else 'reject'
    if i > each.num_accepted:
      verdict = 'not looked at'
    lines.append(
      f'{piece(int(token)):12}{each.q_GV[i, token]:8.3f}{each.p_G1V[i, token]:8.3f}'
      f'{each.ratio_G[i]:12.3f}{each.coin_G[i]:8.3f}  {verdict}'
    )
  law_V = residual(each)
  lines.append(f'then one of the target, {piece(each.next_token)!r}, from')
  n = min(each.num_accepted, len(each.drafts) - 1)
  for token in np.argsort(-law_V)[:4]:
    lines.append(
      f'{piece(int(token)):12}{each.q_GV[n, token]:8.3f}'
      f'{each.p_G1V[each.num_accepted, token]:8.3f}   residual {law_V[token]:.3f}'
    )
  return '\n'.join(lines)


def draw_round(pair: specjax.Pair, each: Round, path: pathlib.Path) -> None:
  """Coins against ratios on the left, p, q and the residual on the right."""
  piece = pair.vocabulary.piece
  figure = Figure(figsize=(9.5, 3.6), layout='constrained')
  left, right = figure.subplots(1, 2, width_ratios=[1, 1.15])
  for i, ratio in enumerate(each.ratio_G):
    looked_at = i <= each.num_accepted
    accepted = i < each.num_accepted
    colour = '#2a9d4a' if accepted else '#e8590c' if looked_at else '#dddddd'
    left.bar(i, ratio, color=colour, width=0.7)
    left.plot(i, each.coin_G[i], 'o', color='black' if looked_at else '#aaaaaa')
    word = 'accept' if accepted else 'reject' if looked_at else 'not\nlooked at'
    left.text(i, 1.04, word, ha='center', va='bottom', fontsize=9)
  names = [piece(int(token)).replace('\u2581', ' ').strip() for token in each.drafts]
  left.set_xticks(range(len(names)), names)
  left.set(ylim=(0, 1.25), ylabel='bar: min(1, p/q); dot: the coin u')
  left.set_title('accept while u < p/q', loc='left', fontsize=10)

  n, law_V = each.num_accepted, residual(each)
  shown = np.argsort(-(each.p_G1V[n] + each.q_GV[n]))[:6]
  if each.next_token not in shown:
    shown = np.append(shown[:-1], each.next_token)
  place = np.arange(len(shown))
  series = (
    ('q, the draft', each.q_GV[n], '#adb5bd'),
    ('p, the target', each.p_G1V[n], '#495057'),
    ('residual, max(p - q, 0)', law_V, '#e8590c'),
  )
  for k, (label, law, colour) in enumerate(series):
    right.bar(place + 0.27 * (k - 1), law[shown], 0.27, label=label, color=colour)
  names = [piece(int(token)).replace('\u2581', ' ').strip() for token in shown]
  right.set_xticks(place, names)
  drawn = piece(each.next_token).replace('\u2581', ' ').strip()
  right.set_title(f'the rejected place; drawn: {drawn}', loc='left', fontsize=10)
  right.legend(frameon=False, fontsize=9)
  for axes in (left, right):
    axes.spines[['top', 'right']].set_visible(False)
  figure.savefig(path, dpi=110)


def trace_lines(pair: specjax.Pair) -> list[Text]:
  """Sources, coloured outputs and counts, wrapped."""
  console = Console(width=WIDTH)
  lines = [trace.legend(colour=True), Text()]
  for result in pair.generate(TRACED, num_draft=NUM_DRAFT):
    tokens = trace_tokens(result, pair.vocabulary)
    lines += Text(TRACED[result.index], style='dim').wrap(console, WIDTH)
    lines += trace.render(tokens, colour=True).wrap(console, WIDTH)
    lines += [Text(trace.counts_line(tokens), style='dim'), Text()]
  return lines[:-1]


def draw_trace(lines: list[Text], path: pathlib.Path) -> None:
  """Text in cells of one size, as in a terminal."""
  cell_width, cell_height = 0.0855, 0.19  # inches, at 10.5 points
  margin = 0.15
  size = (WIDTH * cell_width + 2 * margin, len(lines) * cell_height + 2 * margin)
  figure = Figure(figsize=size, facecolor='white')
  console = Console(width=WIDTH, color_system='truecolor', force_terminal=True)
  for number, line in enumerate(lines):
    column = 0
    height = 1 - (margin + (number + 0.75) * cell_height) / size[1]
    for text, style, _ in line.render(console):
      for letter in text:
        colour = '#6c757d' if style is None or style.dim else '#212529'
        if style is not None and style.color is not None:
          colour = style.color.get_truecolor().hex
        place = (margin + column * cell_width) / size[0]
        bold = style is not None and style.bold
        figure.text(
          place,
          height,
          letter,
          family='DejaVu Sans Mono',
          fontsize=10.5,
          color=colour,
          weight='bold' if bold else 'normal',
        )
        if style is not None and style.underline:
          figure.text(place, height - 0.02 / size[1], '_', color=colour, fontsize=9)
        column += 1
  figure.savefig(path, dpi=100)


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
  parser.add_argument('--text', action='store_true', help='print the rounds only')
  options = parser.parse_args()
  pair = specjax.load_pair()
  rounds = record_rounds(pair, SOURCE, SEED)
  if options.text:
    for number, each in enumerate(rounds, 1):
      print(f'round {number}\n{describe(pair, each)}\n')
    return
  draw_trace(trace_lines(pair), DOCS / 'trace.png')
  chosen = next(each for each in rounds if 0 < each.num_accepted < NUM_DRAFT)
  draw_round(pair, chosen, DOCS / 'round.png')


if __name__ == '__main__':
  main()
