"""Speculative decoding from the command line.

  python -m specjax.run                                  a demonstration
  python -m specjax.run --prompt "ende: Click the button."
  python -m specjax.run --input sources.txt --output results.jsonl
  python -m specjax.run --task ende --split test --num_examples 100

Exit codes: 0; 1 when a greedy output is not plain decoding's; 2 for bad input,
with one line on stderr that says what to do; 130 when interrupted.
"""

import sys
from collections.abc import Sequence

from specjax.command import cli


def main(argv: Sequence[str] | None = None) -> int:
  """Parses, builds, decodes and writes; returns the exit code."""
  argv = sys.argv[1:] if argv is None else [*map(str, argv)]
  try:
    config = cli.parse(argv)
    # JAX starts here: help and bad options are answered before.
    from specjax import load
    from specjax.checkpoints import files
    from specjax.command import demo, devices, notes, session
    from specjax.parallel import distributed

    task = session.read_task(config)
    texts = session.read_texts(config) if task is None else task.sources
    config, mesh = devices.start(config, texts)
    for place in (config.pair.model, config.pair.draft_model):
      if place is not None and place.startswith(files.BUCKET):
        print(f'reading {place}', file=sys.stderr)
    pair = load.load_pair(
      config.pair.model,
      draft=config.pair.draft_model,
      dtype=config.pair.dtype,
      cache_dtype=config.pair.cache_dtype,
      target_weights=config.pair.target_weights,
      table_text=config.pair.table_text,
      mesh=mesh,
      shard_draft=config.parallel.shard_draft,
      vocabulary=config.pair.vocabulary,
    )
    if config.pair.target_weights == 'int8':
      print('int8 target: outputs have its law, not that of its file', file=sys.stderr)
    run = (
      demo.Demonstration(config, pair).run
      if texts is None
      else session.Session(config, pair, texts, task).run
    )
  except ValueError as error:
    return cli.fail(error, argv)
  with distributed.only_main_speaks():
    for note in notes.notes(config, cli.typed(argv), is_demo=texts is None):
      print(f'note: {note}', file=sys.stderr)
    return run()


if __name__ == '__main__':
  sys.exit(main())
