"""experiments/ is no part of the package: it is found beside it."""

import importlib
import pathlib
import sys

import numpy as np
import pytest

from specjax.core.types import Params
from specjax.data.text import byte_vocabulary
from specjax.drafters.table import bigram_model
from specjax.pair import Pair
from specjax.testing import tiny_pair

# Behind everything else, so that an installed specjax stays the one under test.
sys.path.append(str(pathlib.Path(__file__).parents[2]))


@pytest.fixture(scope='session')
def pair(tmp_path_factory):
  """Bigram tables over bytes, which compile in no time; the draft often agrees."""
  table_text = tmp_path_factory.mktemp('pair') / 'outputs.txt'
  table_text.write_text('abcabc\nthe text\n', encoding='utf-8')
  vocabulary = byte_vocabulary(extra_ids=0)
  num_ids = vocabulary.size
  rng = np.random.default_rng(0)
  target_VV = 3 * rng.standard_normal((num_ids, num_ids), np.float32)
  target_VV[:, vocabulary.eos_id] = 6.0  # texts end after some tens of tokens
  draft_VV = target_VV + rng.standard_normal((num_ids, num_ids), np.float32)
  config = tiny_pair.blank_t5(num_ids).config  # for its width and dtype
  return Pair(
    name='tables',
    target=bigram_model,
    draft=bigram_model,
    params=Params(target_VV, draft_VV),
    target_config=config,
    draft_config=config,
    vocabulary=vocabulary,
    table_text=str(table_text),
  )


@pytest.fixture
def config(pair, tmp_path, monkeypatch):
  """The name of a configuration with texts of its own; its pair is `pair`."""
  common = importlib.import_module('experiments.common')
  monkeypatch.setattr(common, '_load_pair', lambda config: pair)
  name = tmp_path / 'config.py'
  name.write_text(
    'from specjax.config import IOConfig, RunConfig\n'
    "CONFIG = RunConfig(io=IOConfig(prompt=('copy: abcabc', 'the text', 'more')))\n",
    encoding='utf-8',
  )
  return str(name)
