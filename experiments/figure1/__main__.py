"""Figure 1: a coloured trace; `python -m experiments.figure1`.

One line for each call of the target: accepted drafts, then the token that the target
supplied, a correction after a rejection or a bonus.
"""

import itertools

import rich.console

from experiments import common
from specjax.command.session import trace_tokens
from specjax.config import SamplingConfig, SpeculationConfig
from specjax.core.loop import Source
from specjax.eval import trace

# Source -> (text colour, box): told apart in grey too.
LOOKS = {
  Source.ACCEPTED: ('#1b6e34', {'facecolor': '#dff2e3', 'edgecolor': 'none'}),
  Source.CORRECTION: ('#a33b00', {'facecolor': 'white', 'edgecolor': '#a33b00'}),
  Source.BONUS: ('white', {'facecolor': '#1f4e9c', 'edgecolor': 'none'}),
  Source.PLAIN: ('black', {'facecolor': 'white', 'edgecolor': 'none'}),
}


def measure(pair, sources, temperature: float, gamma: int) -> list[dict]:
  """One record for each text: its pieces with their sources and rounds."""
  sampling = SamplingConfig(temperature=temperature)
  speculation = SpeculationConfig('draft_model', gamma)
  run = common.prepare(pair, sources, sampling, speculation, batch_size=8)
  records = []
  for output in run.generations(pair):
    tokens = trace_tokens(output, pair.vocabulary)
    records.append(
      {
        'gamma': gamma,
        'T': temperature,
        'tokens': len(output.ids),
        'target_calls': output.num_target_calls,
        'tokens_per_call': round(output.block_efficiency, 2),
        'pieces': [token.piece for token in tokens],
        'sources': [int(token.source) for token in tokens],
        'rounds': [token.round for token in tokens],
      }
    )
  return records


def trace_of(record: dict) -> list[trace.Token]:
  fields = zip(record['pieces'], record['sources'], record['rounds'], strict=True)
  return [trace.Token(piece, source, round_) for piece, source, round_ in fields]


def draw(record: dict, folder) -> None:
  plt = common.plots()
  tokens = trace_of(record)
  texts = trace.piece_texts(token.piece for token in tokens)
  rounds = itertools.groupby(
    zip(tokens, texts, strict=True), lambda pair: pair[0].round
  )
  height = 0.3 * (record['target_calls'] + 2.5)
  figure = plt.figure(figsize=(7.6, height))
  axes = figure.add_axes((0, 0, 1, 1))
  axes.set_axis_off()
  renderer = figure.canvas.get_renderer()
  dots = figure.dpi
  width = 7.6 * dots

  def place(x, row, text, colour, box):
    drawn = axes.text(
      x / width,
      1 - 0.3 * (row + 1) / height,
      text,
      color=colour,
      family='DejaVu Sans Mono',
      fontsize=9,
      va='baseline',
      bbox={'boxstyle': 'square,pad=0.18', 'linewidth': 0.9, **box} if box else None,
    )
    return x + drawn.get_window_extent(renderer).width + 0.07 * dots

  x = 0.1 * dots
  for source in (Source.ACCEPTED, Source.CORRECTION, Source.BONUS):
    x = place(x, 0, trace.LOOKS[source].meaning, *LOOKS[source]) + 0.1 * dots
  place(
    x,
    0,
    f'{record["tokens"]} tokens, {record["target_calls"]} target calls',
    'black',
    None,
  )
  for row, (number, pairs) in enumerate(rounds, 1):
    x = place(0.1 * dots, row + 0.3, f'{number:>2}', '#606060', None) + 0.1 * dots
    for token, text in pairs:
      # Monospaced boxes show a leading space as what it is.
      shown = text.replace(' ', '\u00b7', 1) if text.startswith(' ') else text
      x = place(x, row + 0.3, shown or '\u2400', *LOOKS[Source(token.source)])
  common.save_figure(figure, folder, 'figure1')


def main(argv: list[str] | None = None) -> None:
  parser = common.pair_parser('figure1', __doc__, count=2, gamma=7)
  parser.add_argument('--temperature', type=float, default=0.0, metavar='FLOAT')
  options = common.parse(parser, argv, count=1, gamma=2)
  subject = common.load_subject(options.config, options.count, draft=True)
  sources = [ids for each in subject.sources.values() for ids in each]
  records = measure(subject.pair, sources, options.temperature, options.gamma)
  common.write_records(options.output, records)
  ordered = sorted(records, key=lambda each: each['tokens_per_call'])
  draw(ordered[(len(records) - 1) // 2], options.output)  # neither best nor worst
  console = rich.console.Console()
  console.print(trace.legend(colour=trace.uses_colour(console)))
  for record in records:
    trace.print_trace(trace_of(record), console)


if __name__ == '__main__':
  common.run(main)
