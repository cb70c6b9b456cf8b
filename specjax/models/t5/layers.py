"""The parts of a T5: projections, norm, embedding, relative bias, attention.

Parameter names and shapes are T5X's (`examples/t5/layers.py`): kernels are
two-dimensional, `[in, out]`, heads joined. Kernels are cast to the dtype of the
activations; softmax, norm and logits are computed in float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

# Added to the logits of keys that must not be seen. After the float32 softmax
# their weight is exactly 0, and a row without any visible key stays finite.
MASKED = -1e10

# Tokens of a decoding step, as against those of a training batch.
_FEW_ROWS = 32

_fan_in = nn.initializers.variance_scaling(1.0, 'fan_in', 'normal')
_fan_in_truncated = nn.initializers.variance_scaling(1.0, 'fan_in', 'truncated_normal')
_fan_avg = nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform')

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'gelu': nn.gelu,
  'relu': nn.relu,
  'silu': nn.silu,
  'linear': lambda x: x,
}


class KeyValue(NamedTuple):
  """Keys and values of one attention layer, one leaf each.

  Attributes:
    key: `[B, H, S, K]`, or `[H, S, K]` for a batch of one, in the dtype of the
      activations.
    value: likewise.
  """

  key: jax.Array
  value: jax.Array


class Dense(nn.Module):
  """`x @ kernel`, without bias.

  Attributes:
    features: width of the output.
    dtype: of the product; None multiplies in the wider dtype of input and
      kernel and returns float32 (the head).
    kernel_init: initializer.
  """

  features: int
  dtype: str | None
  kernel_init: Callable[..., jax.Array] = _fan_in_truncated

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    shape = (x_BTD.shape[-1], self.features)
    kernel_DF = self.param('kernel', self.kernel_init, shape, jnp.float32)
    if self.dtype is None:
      return float32_product(x_BTD, kernel_DF, contract=0)
    return x_BTD.astype(self.dtype) @ kernel_DF.astype(self.dtype)


def float32_product(x: jax.Array, y: jax.Array, *, contract: int) -> jax.Array:
  """Contracts the last axis of x with one axis of y, into float32.

  Nothing is transposed, and when both are bfloat16 no float32 copy is made:
  products of bfloat16 numbers are exact in float32.

  Args:
    x: float.
    y: float.
    contract: the axis of y.

  Returns:
    float32, x's other axes before y's.
  """
  dtype = jnp.promote_types(x.dtype, y.dtype)
  return jax.lax.dot_general(
    x.astype(dtype),
    y.astype(dtype),
    (((x.ndim - 1,), (contract,)), ((), ())),
    preferred_element_type=jnp.float32,
  )


class LayerNorm(nn.Module):
  """`scale * x / sqrt(mean(x^2) + 1e-6)`: no mean subtracted, no bias."""

  dtype: str

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    scale_D = self.param('scale', nn.initializers.ones, (x_BTD.shape[-1],), jnp.float32)
    x_BTD = x_BTD.astype(jnp.float32)
    mean_BT1 = jnp.mean(jnp.square(x_BTD), axis=-1, keepdims=True)
    scale_11D = scale_D.astype(jnp.float32)[None, None]
    return (x_BTD * jax.lax.rsqrt(mean_BT1 + 1e-6) * scale_11D).astype(self.dtype)


class Embed(nn.Module):
  """The table of token embeddings, which is also the head of T5 1.0."""

  vocab_size: int
  emb_dim: int
  dtype: str

  def setup(self):
    shape = (self.vocab_size, self.emb_dim)
    self.embedding = self.param(
      'embedding', nn.initializers.normal(1.0), shape, jnp.float32
    )

  def __call__(self, tokens_BT: jax.Array) -> jax.Array:
    rows_BTD = jnp.take(self.embedding, tokens_BT, axis=0, mode='clip')
    return rows_BTD.astype(self.dtype)

  def logits(self, x_BTD: jax.Array, *, scaled: bool = True) -> jax.Array:
    batch, length, _ = x_BTD.shape
    if batch * length > _FEW_ROWS:
      logits_BTV = float32_product(x_BTD, self.embedding, contract=1)
    else:
      # For a few rows x, E x^T mostly beats x E^T on CPUs, up to twice as fast:
      # for the latter the compiler repacks the whole table E.
      logits_VBT = float32_product(self.embedding, x_BTD, contract=2)
      logits_BTV = jnp.moveaxis(logits_VBT, 0, -1)
    return logits_BTV * self.emb_dim**-0.5 if scaled else logits_BTV


def relative_position_bucket(
  distance, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
  """Maps query - key distances to buckets, on the host.

  The first half of the buckets holds one distance each, the second half grows
  as the logarithm, up to `max_distance` (Raffel et al. 2020, section 2.1). In
  NumPy, since a float logarithm on a device may round across an edge.

  Args:
    distance: integers, query slot - key slot, any shape.
    bidirectional: keys after the query get buckets of their own (encoder);
      otherwise they share the bucket of distance 0.
    num_buckets: R.
    max_distance: distances from here on share the last bucket.

  Returns:
    int32 in [0, R), of the shape of `distance`.
  """
  distance = np.asarray(distance, np.int32)
  first = np.zeros_like(distance)
  if bidirectional:
    num_buckets //= 2
    first = np.where(distance < 0, num_buckets, 0).astype(np.int32)
    distance = np.abs(distance)
  distance = np.maximum(distance, 0)
  exact = num_buckets // 2
  # In float32 and in this order of operations, as the models were trained.
  ratio = np.maximum(distance, 1).astype(np.float32) / np.float32(exact)
  log_ratio = np.log(ratio + np.finfo(np.float32).eps) / np.log(max_distance / exact)
  log_bucket = exact + (log_ratio * (num_buckets - exact)).astype(np.int32)
  log_bucket = np.minimum(log_bucket, num_buckets - 1)
  return (first + np.where(distance < exact, distance, log_bucket)).astype(np.int32)


class RelativeBias(nn.Module):
  """T5's bias of self-attention: a learned number per head and bucket.

  Attributes:
    num_heads: H.
    num_buckets: R.
    max_distance: see `relative_position_bucket`.
    causal: a decoder's: keys after the query are masked.
  """

  num_heads: int
  num_buckets: int
  max_distance: int
  causal: bool

  @nn.compact
  def __call__(self, start_B: jax.Array, num_queries: int, num_keys: int) -> jax.Array:
    """Returns float32 `bias_BHTS` for queries `start + t` and keys `s`.

    The bias depends on s - (start + t) only, so one row per head holds it for
    all offsets (masked where a causal key is ahead), and each query's bias is
    a window of that row.

    Args:
      start_B: int32, absolute slot of the first query of each row.
      num_queries: T; `start + T <= num_keys`.
      num_keys: S.
    """
    rel_embedding_HR = self.param(
      'rel_embedding', _fan_avg, (self.num_heads, self.num_buckets), jnp.float32
    )
    offset_O = np.arange(1 - num_keys, num_keys)
    bucket_O = relative_position_bucket(
      -offset_O,
      bidirectional=not self.causal,
      num_buckets=self.num_buckets,
      max_distance=self.max_distance,
    )
    bias_HO = rel_embedding_HR.astype(jnp.float32)[:, bucket_O]
    if self.causal:
      bias_HO = jnp.where(jnp.asarray(offset_O > 0)[None], MASKED, bias_HO)

    def window(query):
      return jax.lax.dynamic_slice_in_dim(
        bias_HO, num_keys - 1 - query, num_keys, axis=1
      )

    query_BT = start_B[:, None] + jnp.arange(num_queries, dtype=jnp.int32)[None]
    if query_BT.size <= _FEW_ROWS and query_BT.shape[0] == 1:
      # Slices are cheaper on CPUs than the gather that `vmap` makes of them.
      rows = [window(query_BT[0, t]) for t in range(num_queries)]
      return jnp.stack(rows, axis=1)[None]
    return jax.vmap(jax.vmap(window, out_axes=1))(query_BT)


class Attention(nn.Module):
  """Multi-head attention; T5 folds 1/sqrt(K) into the query's initializer."""

  emb_dim: int
  num_heads: int
  head_dim: int
  dtype: str

  def setup(self):
    width = self.num_heads * self.head_dim

    def query_init(*args):
      return _fan_in(*args) * self.head_dim**-0.5

    self.query = Dense(width, self.dtype, query_init)
    self.key = Dense(width, self.dtype, _fan_in)
    self.value = Dense(width, self.dtype, _fan_in)
    self.out = Dense(self.emb_dim, self.dtype, _fan_in)

  def _split(self, x_BTJ: jax.Array) -> jax.Array:
    shape = (*x_BTJ.shape[:2], self.num_heads, self.head_dim)
    return x_BTJ.reshape(shape).swapaxes(1, 2)

  def key_value(self, x_BSD: jax.Array) -> KeyValue:
    return KeyValue(self._split(self.key(x_BSD)), self._split(self.value(x_BSD)))

  def __call__(self, x_BTD: jax.Array, kv: KeyValue, bias: jax.Array) -> jax.Array:
    """Attends from x to keys and values.

    Args:
      x_BTD: queries before projection.
      kv: keys and values.
      bias: float32, broadcastable to `[B, H, T, S]`; carries the mask.

    Returns:
      `[B, T, D]`.
    """
    query = self._split(self.query(x_BTD))
    if kv.key.ndim == 3:
      query, bias = query[0], bias[0]
    logits = jnp.einsum(
      '...tk,...sk->...ts', query, kv.key, preferred_element_type=jnp.float32
    )
    weights = jax.nn.softmax(logits + bias, axis=-1).astype(self.dtype)
    mixed = jnp.einsum('...ts,...sk->...tk', weights, kv.value)
    return self.out(mixed.swapaxes(-3, -2).reshape(*x_BTD.shape[:2], -1))


class Mlp(nn.Module):
  """`wo(act(wi x))`, or gated: `wo(act_0(wi_0 x) * act_1(wi_1 x))`."""

  emb_dim: int
  mlp_dim: int
  activations: tuple[str, ...]
  dtype: str

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    gated = len(self.activations) > 1
    product: Any = None
    for index, name in enumerate(self.activations):
      wi = Dense(self.mlp_dim, self.dtype, name=f'wi_{index}' if gated else 'wi')
      branch_BTF = _ACTIVATIONS[name](wi(x_BTD))
      product = branch_BTF if product is None else product * branch_BTF
    return Dense(self.emb_dim, self.dtype, name='wo')(product)
