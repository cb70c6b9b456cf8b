"""Exact speculative decoding of encoder-decoder models in one compiled loop.

  pair = specjax.load_pair()
  results = pair.generate(['ende: Click the button.'], num_draft=4)

Names are loaded when they are first used: importing specjax starts no JAX
backend.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = '0.1.0'

if TYPE_CHECKING:
  from specjax.config import RunConfig as RunConfig
  from specjax.config import SamplingConfig as SamplingConfig
  from specjax.config import SpeculationConfig as SpeculationConfig
  from specjax.core.autoregressive import no_draft as no_draft
  from specjax.core.loop import decode as decode
  from specjax.core.loop import stream as stream
  from specjax.core.rng import row_keys as row_keys
  from specjax.core.types import Draft as Draft
  from specjax.core.types import Drafter as Drafter
  from specjax.core.types import Model as Model
  from specjax.core.types import Output as Output
  from specjax.core.types import Params as Params
  from specjax.core.types import Sampling as Sampling
  from specjax.core.verify import block_verifier as block_verifier
  from specjax.core.verify import token_verifier as token_verifier
  from specjax.core.warp import make_warp as make_warp
  from specjax.drafters import bigram_draft as bigram_draft
  from specjax.drafters import model_draft as model_draft
  from specjax.drafters import ngram_draft as ngram_draft
  from specjax.generation import Chunk as Chunk
  from specjax.generation import Generation as Generation
  from specjax.load import load_pair as load_pair
  from specjax.models.t5 import T5Config as T5Config
  from specjax.models.t5 import t5_model as t5_model
  from specjax.pair import Pair as Pair
  from specjax.parallel.mesh import make_mesh as make_mesh
  from specjax.shard import shard_pair as shard_pair

_MODULES = {
  'specjax.config': ('RunConfig', 'SamplingConfig', 'SpeculationConfig'),
  'specjax.core.autoregressive': ('no_draft',),
  'specjax.core.loop': ('decode', 'stream'),
  'specjax.core.rng': ('row_keys',),
  'specjax.core.types': (
    'Draft',
    'Drafter',
    'Model',
    'Output',
    'Params',
    'Sampling',
  ),
  'specjax.core.verify': ('block_verifier', 'token_verifier'),
  'specjax.core.warp': ('make_warp',),
  'specjax.drafters': ('bigram_draft', 'model_draft', 'ngram_draft'),
  'specjax.generation': ('Chunk', 'Generation'),
  'specjax.load': ('load_pair',),
  'specjax.models.t5': ('T5Config', 't5_model'),
  'specjax.pair': ('Pair',),
  'specjax.parallel.mesh': ('make_mesh',),
  'specjax.shard': ('shard_pair',),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ['__version__', *sorted(_WHERE)]


def __getattr__(name: str) -> Any:
  if name not in _WHERE:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  value = getattr(importlib.import_module(_WHERE[name]), name)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
