"""The shape of a T5, and the shapes that were published.

Field names are T5X's. A configuration is frozen and hashable: it is a static
argument of `jit` and the key under which a compiled model is found again.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

ACTIVATIONS = ('gelu', 'relu', 'silu', 'linear')
DTYPES = ('float32', 'bfloat16')
_COUNTS = (
  'vocab_size',
  'emb_dim',
  'num_heads',
  'head_dim',
  'mlp_dim',
  'num_encoder_layers',
  'num_decoder_layers',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config:
  """Hyperparameters of an encoder-decoder T5 (Raffel et al. 2020).

  The defaults are those of T5 1.1; T5 1.0 has `mlp_activations=('relu',)` and
  `logits_via_embedding=True`.

  Attributes:
    vocab_size: rows of the embedding, padding rows included.
    emb_dim: D, width of the residual stream.
    num_heads: H.
    head_dim: K; `num_heads * head_dim` need not equal `emb_dim`.
    mlp_dim: F.
    num_encoder_layers: depth of the encoder.
    num_decoder_layers: depth of the decoder, which may differ (ByT5).
    mlp_activations: one name: a plain block; two: a gated one, whose branches
      are multiplied.
    logits_via_embedding: the head is the embedding, scaled by D^-1/2.
    scale_tied_logits: with `logits_via_embedding`, the D^-1/2 is there, as T5X
      always has it; some Hugging Face models tie without it.
    relative_attention_num_buckets: R, even.
    relative_attention_max_distance: distances from here on share a bucket.
    dtype: of the activations, `'float32'` or `'bfloat16'`. Softmax, norms and
      logits are float32 in any case.

  Raises:
    ValueError: a field is out of range; the message names it and its value.
  """

  vocab_size: int
  emb_dim: int
  num_heads: int
  head_dim: int
  mlp_dim: int
  num_encoder_layers: int
  num_decoder_layers: int
  mlp_activations: tuple[str, ...] = ('gelu', 'linear')
  logits_via_embedding: bool = False
  scale_tied_logits: bool = True
  relative_attention_num_buckets: int = 32
  relative_attention_max_distance: int = 128
  dtype: str = 'float32'

  def __post_init__(self):
    for name in _COUNTS:
      _require_int(name, getattr(self, name), at_least=1)
    _require_activations(self.mlp_activations)
    for name in ('logits_via_embedding', 'scale_tied_logits'):
      if not isinstance(getattr(self, name), bool):
        raise ValueError(f'{name}={getattr(self, name)!r}: must be true or false')
    buckets = self.relative_attention_num_buckets
    _require_int('relative_attention_num_buckets', buckets, at_least=4)
    if buckets % 2:
      raise ValueError(
        f'relative_attention_num_buckets={buckets}: must be even, the encoder '
        'uses one half for each direction'
      )
    # The decoder counts the first half of its buckets one by one.
    _require_int(
      'relative_attention_max_distance',
      self.relative_attention_max_distance,
      at_least=buckets // 2 + 1,
    )
    if self.dtype == 'float16':
      raise ValueError(
        "dtype='float16': T5's feed-forward activations exceed the float16 "
        "range (65504) and turn into NaN; use 'bfloat16' or 'float32'"
      )
    if self.dtype not in DTYPES:
      raise ValueError(f'dtype={self.dtype!r}: must be one of {", ".join(DTYPES)}')

  @classmethod
  def from_size(cls, name: str, **overrides: Any) -> 'T5Config':
    """Returns a published configuration, e.g. `'t5_1_1_small'`.

    Args:
      name: a key of `SIZES`.
      **overrides: fields to replace, e.g. `dtype='bfloat16'`.

    Returns:
      The configuration.

    Raises:
      ValueError: the name is unknown (near names are given), or a field is bad.

    Example:
      >>> T5Config.from_size('byt5_small').num_decoder_layers
      4
    """
    if name not in SIZES:
      near = difflib.get_close_matches(name, SIZES, n=3) or sorted(SIZES)
      raise ValueError(f'unknown T5 size {name!r}; did you mean {", ".join(near)}?')
    return cls.from_dict({**SIZES[name], **overrides})

  @classmethod
  def from_dict(cls, fields: Mapping[str, Any]) -> 'T5Config':
    """Builds a configuration from what `to_dict`, or JSON, holds.

    Args:
      fields: names and values; those with a default may be absent.

    Returns:
      The configuration.

    Raises:
      ValueError: a field is unknown, missing or out of range.
    """
    known = {field.name: field for field in dataclasses.fields(cls)}
    for name in fields:
      if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f'; did you mean {near[0]}?' if near else ''
        raise ValueError(f'unknown T5Config field {name!r}{hint}')
    missing = [name for name in _COUNTS if name not in fields]
    if missing:
      raise ValueError(f'T5Config lacks the fields {", ".join(missing)}')
    values = dict(fields)
    if isinstance(values.get('mlp_activations'), list):
      values['mlp_activations'] = tuple(values['mlp_activations'])
    return cls(**values)

  def to_dict(self) -> dict[str, Any]:
    """Returns the fields as JSON types, the inverse of `from_dict`."""
    fields = dataclasses.asdict(self)
    return {**fields, 'mlp_activations': list(self.mlp_activations)}


def _require_int(name: str, value: Any, *, at_least: int) -> None:
  if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
    raise ValueError(f'{name}={value!r}: must be an integer >= {at_least}')


def _require_activations(value: Any) -> None:
  if not isinstance(value, tuple) or len(value) not in (1, 2):
    raise ValueError(
      f"mlp_activations={value!r}: must be a tuple of one name, e.g. ('relu',), "
      "or two, e.g. ('gelu', 'linear')"
    )
  for name in value:
    if name not in ACTIVATIONS:
      raise ValueError(
        f'mlp_activations={value!r}: {name!r} is not one of {", ".join(ACTIVATIONS)}'
      )


def _size(vocab, emb, heads, head, mlp, encoder, decoder, **fields):
  counts = (vocab, emb, heads, head, mlp, encoder, decoder)
  return dict(zip(_COUNTS, counts, strict=True), **fields)


def _v1_0(*counts):
  return _size(32128, *counts, mlp_activations=('relu',), logits_via_embedding=True)


# Raffel et al. 2020 (1.0), the T5 1.1 release, Xue et al. 2021 (mT5: T5 1.1
# with a larger vocabulary) and 2022 (ByT5: bytes, a deep encoder, a shallow
# decoder). Columns: emb_dim, num_heads, head_dim, mlp_dim, encoder, decoder.
_V1_1 = {
  'small': (512, 6, 64, 1024, 8, 8),
  'base': (768, 12, 64, 2048, 12, 12),
  'large': (1024, 16, 64, 2816, 24, 24),
  'xl': (2048, 32, 64, 5120, 24, 24),
  'xxl': (4096, 64, 64, 10240, 24, 24),
}
SIZES: dict[str, dict[str, Any]] = {
  't5_1_0_small': _v1_0(512, 8, 64, 2048, 6, 6),
  't5_1_0_base': _v1_0(768, 12, 64, 3072, 12, 12),
  't5_1_0_large': _v1_0(1024, 16, 64, 4096, 24, 24),
  't5_1_0_3b': _v1_0(1024, 32, 128, 16384, 24, 24),
  't5_1_0_11b': _v1_0(1024, 128, 128, 65536, 24, 24),
  **{f't5_1_1_{name}': _size(32128, *counts) for name, counts in _V1_1.items()},
  **{f'mt5_{name}': _size(250112, *counts) for name, counts in _V1_1.items()},
  'byt5_small': _size(384, 1472, 6, 64, 3584, 12, 4),
  'byt5_base': _size(384, 1536, 12, 64, 3968, 18, 6),
  'byt5_large': _size(384, 1536, 16, 64, 3840, 36, 12),
  'byt5_xl': _size(384, 2560, 32, 64, 6720, 36, 12),
  'byt5_xxl': _size(384, 4672, 64, 64, 12352, 36, 12),
}
