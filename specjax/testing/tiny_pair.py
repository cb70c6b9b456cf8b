"""A random pair as files: what `specjax.load_pair` reads, a few kilobytes of it."""

import functools
import json
from pathlib import Path
from typing import Any

import flax.traverse_util
import numpy as np

from specjax.checkpoints import leaves, store
from specjax.models.t5 import T5Config, t5_model
from specjax.testing.tiny_t5 import TinyT5, tiny_t5

EXTRA_IDS = 100
VOCAB_SIZE = 359  # pad, EOS, unknown, 256 bytes, the sentinels
NUM_LOGITS = 384


def blank_t5(num_logits: int) -> TinyT5:
  """A T5 of zeros, made without compiling anything; for tests of files."""
  config = T5Config(
    vocab_size=num_logits,
    emb_dim=16,
    num_heads=2,
    head_dim=8,
    mlp_dim=32,
    num_encoder_layers=1,
    num_decoder_layers=1,
  )
  params = flax.traverse_util.unflatten_dict(
    {name: np.zeros(shape) for name, shape in leaves.expected_shapes(config).items()},
    sep='/',
  )
  return TinyT5(config, params, t5_model(config), t5_model(config))


@functools.cache
def _default(seed: int, num_layers: int, num_logits: int) -> TinyT5:
  return tiny_t5(seed, num_layers, vocab_size=num_logits)


def write_tiny_pair(
  folder: str | Path,
  *,
  target: TinyT5 | None = None,
  draft: TinyT5 | None = None,
  draft_logits: int = NUM_LOGITS,
  extra_ids: int = EXTRA_IDS,
  max_source: int = 40,
) -> Path:
  """Writes a pair over bytes into a folder.

  Args:
    folder: made if it is missing.
    target: two layers by default.
    draft: one layer by default.
    draft_logits: width of the default draft; padding beyond the vocabulary.
    extra_ids: sentinels of the vocabulary, which has 259 ids without.
    max_source: most ids of a source.

  Returns:
    The folder, for `specjax.load_pair` and `--model`.
  """
  folder = Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  target = target or _default(0, 2, NUM_LOGITS)
  draft = draft or _default(1, 1, draft_logits)
  for name, model in (('target', target), ('draft', draft)):
    path = folder / f'{name}.safetensors'
    store.save(path, model.params, model.config, dtype='float32')
  manifest: dict[str, Any] = {
    'vocabulary': 'bytes',
    'extra_ids': extra_ids,
    'max_source': max_source,
  }
  (folder / 'pair.json').write_text(json.dumps(manifest), encoding='utf-8')
  samples = [
    {'task': task, 'source': f'{task}: {text}', 'target': ''}
    for task in ('copy', 'more')
    for text in ('abcabc', 'the text')
  ]
  lines = ''.join(json.dumps(sample) + '\n' for sample in samples)
  (folder / 'samples.jsonl').write_text(lines, encoding='utf-8')
  return folder
