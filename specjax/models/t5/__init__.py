"""T5 1.0 and 1.1, mT5 and ByT5 under T5X's parameter names."""

from specjax.models.t5.config import SIZES, T5Config
from specjax.models.t5.model import T5Cache, cache_axes, t5_model
from specjax.models.t5.network import Transformer, logical_axes, padding_bias

__all__ = [
  'SIZES',
  'T5Cache',
  'T5Config',
  'Transformer',
  'cache_axes',
  'logical_axes',
  'padding_bias',
  't5_model',
]
