"""The T5 encoder-decoder in Linen, under T5X's parameter names.

One set of modules serves teacher forcing and cached decoding: a decoder layer
attends either to the keys and values of its own tokens, or to a cache into
which it has written them.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from specjax.models.t5 import layers
from specjax.models.t5.config import T5Config

# Logical axes of every parameter, by the last two names of its path or by the
# last alone; the names are those of T5X, which sharding rules refer to.
_PARAM_AXES: dict[str, tuple[str, ...]] = {
  'token_embedder/embedding': ('vocab', 'embed'),
  'query/kernel': ('embed', 'joined_kv'),
  'key/kernel': ('embed', 'joined_kv'),
  'value/kernel': ('embed', 'joined_kv'),
  'out/kernel': ('joined_kv', 'embed'),
  'wi/kernel': ('embed', 'mlp'),
  'wi_0/kernel': ('embed', 'mlp'),
  'wi_1/kernel': ('embed', 'mlp'),
  'wo/kernel': ('mlp', 'embed'),
  'logits_dense/kernel': ('embed', 'vocab'),
  'relpos_bias/rel_embedding': ('heads', 'relpos_buckets'),
  'scale': ('embed',),
}


def logical_axes(params: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the tree of `params` with the logical axis names for leaves.

  Args:
    params: a T5's parameters, or a subtree of them.

  Returns:
    The same nested dictionary; each leaf is a tuple with one name per axis.

  Raises:
    ValueError: a parameter is none of a T5's.
  """

  def visit(path: tuple[str, ...], node: Any) -> Any:
    if isinstance(node, Mapping):
      return {name: visit((*path, name), child) for name, child in node.items()}
    for key in ('/'.join(path[-2:]), path[-1]):
      if key in _PARAM_AXES:
        return _PARAM_AXES[key]
    raise ValueError(f'{"/".join(path)} is not a parameter of a T5')

  return visit((), params)


def _attention(config: T5Config) -> layers.Attention:
  return layers.Attention(
    config.emb_dim, config.num_heads, config.head_dim, config.dtype
  )


def _mlp(config: T5Config) -> layers.Mlp:
  return layers.Mlp(
    config.emb_dim, config.mlp_dim, config.mlp_activations, config.dtype
  )


def _relative_bias(config: T5Config, *, causal: bool) -> layers.RelativeBias:
  return layers.RelativeBias(
    config.num_heads,
    config.relative_attention_num_buckets,
    config.relative_attention_max_distance,
    causal,
  )


def padding_bias(tokens_BE: jax.Array) -> jax.Array:
  """Returns float32 `[B, 1, 1, E]` that hides the padding (id 0) of a source."""
  return jnp.where(tokens_BE > 0, 0.0, layers.MASKED)[:, None, None]


class EncoderLayer(nn.Module):
  """Self-attention and feed-forward block, each with pre-norm and residual."""

  config: T5Config

  def setup(self):
    dtype = self.config.dtype
    self.pre_attention_layer_norm = layers.LayerNorm(dtype)
    self.attention = _attention(self.config)
    self.pre_mlp_layer_norm = layers.LayerNorm(dtype)
    self.mlp = _mlp(self.config)

  def __call__(self, x_BED: jax.Array, bias_BHEE: jax.Array) -> jax.Array:
    y_BED = self.pre_attention_layer_norm(x_BED)
    kv = self.attention.key_value(y_BED)
    x_BED = x_BED + self.attention(y_BED, kv, bias_BHEE)
    return x_BED + self.mlp(self.pre_mlp_layer_norm(x_BED))


class DecoderLayer(nn.Module):
  """Self-attention, cross-attention and feed-forward block."""

  config: T5Config

  def setup(self):
    dtype = self.config.dtype
    self.pre_self_attention_layer_norm = layers.LayerNorm(dtype)
    self.self_attention = _attention(self.config)
    self.pre_cross_attention_layer_norm = layers.LayerNorm(dtype)
    self.encoder_decoder_attention = _attention(self.config)
    self.pre_mlp_layer_norm = layers.LayerNorm(dtype)
    self.mlp = _mlp(self.config)

  def __call__(
    self,
    x_BTD: jax.Array,
    source: layers.KeyValue,
    self_bias: jax.Array,
    source_bias: jax.Array,
    write=lambda kv: kv,
  ) -> tuple[jax.Array, layers.KeyValue]:
    """Applies the layer to T tokens.

    Args:
      x_BTD: residual stream.
      source: keys and values of the encoder's output.
      self_bias: float32 `[B or 1, H, T, S]`, relative bias and causal mask.
      source_bias: float32 `[B, 1, 1, E]`, the source's padding.
      write: puts the new tokens' `KeyValue` into a cache and returns all that
        the tokens may attend to; by default the new ones themselves.

    Returns:
      The residual stream, and what `write` returned.
    """
    with jax.named_scope('self_attention'):
      y_BTD = self.pre_self_attention_layer_norm(x_BTD)
      kv = write(self.self_attention.key_value(y_BTD))
      x_BTD = x_BTD + self.self_attention(y_BTD, kv, self_bias)
    with jax.named_scope('cross_attention'):
      y_BTD = self.pre_cross_attention_layer_norm(x_BTD)
      x_BTD = x_BTD + self.encoder_decoder_attention(y_BTD, source, source_bias)
    with jax.named_scope('mlp'):
      x_BTD = x_BTD + self.mlp(self.pre_mlp_layer_norm(x_BTD))
    return x_BTD, kv


class Encoder(nn.Module):
  """A stack of encoder layers over an embedded source."""

  config: T5Config

  def setup(self):
    config = self.config
    self.relpos_bias = _relative_bias(config, causal=False)
    self.layers = [EncoderLayer(config) for _ in range(config.num_encoder_layers)]
    self.encoder_norm = layers.LayerNorm(config.dtype)

  def __call__(self, x_BED: jax.Array, source_bias: jax.Array) -> jax.Array:
    length = x_BED.shape[1]
    start_1 = jnp.zeros((1,), jnp.int32)
    bias_BHEE = self.relpos_bias(start_1, length, length) + source_bias
    for layer in self.layers:
      x_BED = layer(x_BED, bias_BHEE)
    return self.encoder_norm(x_BED)


class Decoder(nn.Module):
  """A stack of decoder layers over embedded tokens."""

  config: T5Config

  def setup(self):
    config = self.config
    self.relpos_bias = _relative_bias(config, causal=True)
    self.layers = [DecoderLayer(config) for _ in range(config.num_decoder_layers)]
    self.decoder_norm = layers.LayerNorm(config.dtype)
    if not config.logits_via_embedding:
      self.logits_dense = layers.Dense(config.vocab_size, None)

  def source_key_values(self, encoded_BED: jax.Array) -> tuple[layers.KeyValue, ...]:
    return tuple(
      layer.encoder_decoder_attention.key_value(encoded_BED) for layer in self.layers
    )

  def __call__(self, x_BTD, sources, source_bias, start_B, num_keys, writes=None):
    """Applies all layers; see `DecoderLayer` for the arguments, one per layer."""
    self_bias = self.relpos_bias(start_B, x_BTD.shape[1], num_keys)
    key_values = []
    for index, layer in enumerate(self.layers):
      write = {} if writes is None else {'write': writes[index]}
      x_BTD, kv = layer(x_BTD, sources[index], self_bias, source_bias, **write)
      key_values.append(kv)
    return self.decoder_norm(x_BTD), tuple(key_values)

  def logits(self, x_BTD: jax.Array) -> jax.Array:
    return self.logits_dense(x_BTD)


class Transformer(nn.Module):
  """T5: `logits = module.apply({'params': params}, sources, decoder_inputs)`.

  Example:
    >>> config = T5Config.from_size('t5_1_1_small', num_decoder_layers=2)
    >>> module = Transformer(config)
  """

  config: T5Config

  def setup(self):
    config = self.config
    self.token_embedder = layers.Embed(config.vocab_size, config.emb_dim, config.dtype)
    self.encoder = Encoder(config)
    self.decoder = Decoder(config)

  def encode(self, inputs_BE: jax.Array) -> jax.Array:
    """Encodes sources: int32, 0 is padding; returns `[B, E, D]`."""
    return self.encoder(self.token_embedder(inputs_BE), padding_bias(inputs_BE))

  def encode_key_values(self, inputs_BE: jax.Array) -> tuple[layers.KeyValue, ...]:
    """Encodes sources and projects them for each layer's cross-attention."""
    return self.decoder.source_key_values(self.encode(inputs_BE))

  def decode(self, tokens_BT, sources, source_bias, start_B, num_keys, writes=None):
    """Runs the decoder on T tokens.

    Args:
      tokens_BT: int32 decoder inputs.
      sources: from `encode_key_values`.
      source_bias: `padding_bias` of the sources.
      start_B: int32 slot of the first token; `[1]` if it is every row's.
      num_keys: S, slots that a query's keys may come from.
      writes: per layer, see `DecoderLayer`; None attends to the tokens alone.

    Returns:
      Float32 logits `[B, T, V]`, the normed hidden states `[B, T, D]` and each
      layer's keys and values.
    """
    x_BTD = self.token_embedder(tokens_BT)
    hidden_BTD, key_values = self.decoder(
      x_BTD, sources, source_bias, start_B, num_keys, writes
    )
    with jax.named_scope('logits'):
      if self.config.logits_via_embedding:
        logits_BTV = self.token_embedder.logits(
          hidden_BTD, scaled=self.config.scale_tied_logits
        )
      else:
        logits_BTV = self.decoder.logits(hidden_BTD)
    return logits_BTV, hidden_BTD, key_values

  def __call__(self, inputs_BE: jax.Array, decoder_inputs_BT: jax.Array) -> jax.Array:
    """Returns float32 logits of all positions, teacher-forced.

    Args:
      inputs_BE: int32 sources, 0 is padding.
      decoder_inputs_BT: int32, the targets shifted right behind a start token 0.

    Returns:
      float32 `[B, T, V]`; position t is the law of target t.
    """
    logits_BTV, _, _ = self.decode(
      decoder_inputs_BT,
      self.encode_key_values(inputs_BE),
      padding_bias(inputs_BE),
      jnp.zeros((1,), jnp.int32),
      decoder_inputs_BT.shape[1],
    )
    return logits_BTV
