"""A pair compiled for TPUs, without one: does it fit, what does a round cost.

  python -m specjax.aot                                   T5-XXL, T5-small, one v4 chip
  python -m specjax.aot --config paper/ende_small_t0@v4 --sweep gamma=1..15
  python -m specjax.aot --target t5_1_1_xl --draft t5_1_1_base --topology v5e:2x4

Needs the TPU compiler: pip install 'specjax[aot]'. docs/aot.md explains the table.

Exit codes: 0; 1 when the pair does not fit or the loop waits for the host; 2 for bad
input, with one line on stderr that says what to do.
"""

import sys
from collections.abc import Sequence

from specjax.command import aot_config, cli


def main(argv: Sequence[str] | None = None) -> int:
  """Parses, compiles, prints and writes; returns the exit code."""
  argv = sys.argv[1:] if argv is None else argv
  try:
    config = aot_config.parse(argv)
    # JAX starts here: help and bad options are answered before.
    import jax

    from specjax.command import aot_page

    if not jax.config.jax_platforms:  # type: ignore[attr-defined]
      jax.config.update('jax_platforms', 'cpu')  # a TPU here, if any, is left alone
    return aot_page.show(config)
  except ValueError as error:
    return cli.fail(error, argv, aot_config.AotConfig)


if __name__ == '__main__':
  sys.exit(main())
