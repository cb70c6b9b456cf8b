"""Hugging Face's names of a T5's parameters beside T5X's: data, and one look-up.

Hugging Face stores a projection as `[out, in]` and the relative bias as
`[buckets, heads]`; T5X stores `[in, out]` and `[heads, buckets]`. A square tensor
looks the same either way, so the table says which ones are transposed and no shape
is ever asked.
"""

import re
from typing import NamedTuple


class Place(NamedTuple):
  """Where Hugging Face keeps a parameter.

  Attributes:
    name: of the tensor.
    transposed: it is the transpose of T5X's parameter.
  """

  name: str
  transposed: bool


# T5X's name, Hugging Face's, transposed; {} is the number of a layer.
NAMES = (
  ('token_embedder/embedding', 'shared.weight', False),
  ('decoder/logits_dense/kernel', 'lm_head.weight', True),
  (
    'encoder/relpos_bias/rel_embedding',
    'encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight',
    True,
  ),
  (
    'decoder/relpos_bias/rel_embedding',
    'decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight',
    True,
  ),
  ('encoder/encoder_norm/scale', 'encoder.final_layer_norm.weight', False),
  ('decoder/decoder_norm/scale', 'decoder.final_layer_norm.weight', False),
)
# The same below encoder/layers_{} and encoder.block.{}.layer.
ENCODER_NAMES = (
  ('pre_attention_layer_norm/scale', '0.layer_norm.weight', False),
  ('attention/query/kernel', '0.SelfAttention.q.weight', True),
  ('attention/key/kernel', '0.SelfAttention.k.weight', True),
  ('attention/value/kernel', '0.SelfAttention.v.weight', True),
  ('attention/out/kernel', '0.SelfAttention.o.weight', True),
  ('pre_mlp_layer_norm/scale', '1.layer_norm.weight', False),
  ('mlp/wi/kernel', '1.DenseReluDense.wi.weight', True),
  ('mlp/wi_0/kernel', '1.DenseReluDense.wi_0.weight', True),
  ('mlp/wi_1/kernel', '1.DenseReluDense.wi_1.weight', True),
  ('mlp/wo/kernel', '1.DenseReluDense.wo.weight', True),
)
# The same below decoder/layers_{} and decoder.block.{}.layer.
DECODER_NAMES = (
  ('pre_self_attention_layer_norm/scale', '0.layer_norm.weight', False),
  ('self_attention/query/kernel', '0.SelfAttention.q.weight', True),
  ('self_attention/key/kernel', '0.SelfAttention.k.weight', True),
  ('self_attention/value/kernel', '0.SelfAttention.v.weight', True),
  ('self_attention/out/kernel', '0.SelfAttention.o.weight', True),
  ('pre_cross_attention_layer_norm/scale', '1.layer_norm.weight', False),
  ('encoder_decoder_attention/query/kernel', '1.EncDecAttention.q.weight', True),
  ('encoder_decoder_attention/key/kernel', '1.EncDecAttention.k.weight', True),
  ('encoder_decoder_attention/value/kernel', '1.EncDecAttention.v.weight', True),
  ('encoder_decoder_attention/out/kernel', '1.EncDecAttention.o.weight', True),
  ('pre_mlp_layer_norm/scale', '2.layer_norm.weight', False),
  ('mlp/wi/kernel', '2.DenseReluDense.wi.weight', True),
  ('mlp/wi_0/kernel', '2.DenseReluDense.wi_0.weight', True),
  ('mlp/wi_1/kernel', '2.DenseReluDense.wi_1.weight', True),
  ('mlp/wo/kernel', '2.DenseReluDense.wo.weight', True),
)

# All of these are the embedding; files hold one of them or several.
EMBEDDINGS = (
  'shared.weight',
  'encoder.embed_tokens.weight',
  'decoder.embed_tokens.weight',
)
HEAD = 'lm_head.weight'
# Old files have it, and no model ever read it.
UNUSED = 'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'

_PLACES = {name: Place(hf, transposed) for name, hf, transposed in NAMES}
for _stack, _names in (('encoder', ENCODER_NAMES), ('decoder', DECODER_NAMES)):
  for _name, _hf, _transposed in _names:
    _PLACES[f'{_stack}/layers_{{}}/{_name}'] = Place(
      f'{_stack}.block.{{}}.layer.{_hf}', _transposed
    )


def hugging_face(name: str) -> Place:
  """Where Hugging Face keeps the parameter of a T5X name.

  Example:
    >>> hugging_face('encoder/layers_3/mlp/wo/kernel').name
    'encoder.block.3.layer.1.DenseReluDense.wo.weight'
  """
  layer = re.search(r'layers_(\d+)', name)
  if layer is None:
    return _PLACES[name]
  place = _PLACES[name.replace(layer.group(), 'layers_{}')]
  return place._replace(name=place.name.format(layer.group(1)))
