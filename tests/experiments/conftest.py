"""experiments/ is no part of the package: it is found beside it."""

import pathlib
import sys

import jax
import pytest

from specjax.testing import tiny_pair, tiny_t5

# Behind everything else, so that an installed specjax stays the one under test.
sys.path.append(str(pathlib.Path(__file__).parents[2]))


@pytest.fixture(scope='session')
def config(tmp_path_factory):
  """The name of a configuration: a random pair over bytes, with texts of its own."""
  target = tiny_t5.tiny_t5(0, 1, vocab_size=tiny_pair.NUM_LOGITS)
  # A draft that often agrees.
  draft = target._replace(params=jax.tree.map(lambda leaf: 0.9 * leaf, target.params))
  folder = tiny_pair.write_tiny_pair(
    tmp_path_factory.mktemp('pair'), target=target, draft=draft
  )
  table_text = folder / 'outputs.txt'
  table_text.write_text('abcabc\nthe text\n', encoding='utf-8')
  name = folder / 'config.py'
  name.write_text(
    'from specjax.config import IOConfig, PairConfig, RunConfig\n'
    'CONFIG = RunConfig(\n'
    f'  pair=PairConfig(model={str(folder)!r}, table_text={str(table_text)!r}),\n'
    "  io=IOConfig(prompt=('copy: abcabc', 'the text', 'another')),\n"
    ')\n',
    encoding='utf-8',
  )
  return str(name)
