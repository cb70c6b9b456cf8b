"""int8 weights for any `Model`, through qwix (github.com/google/qwix).

A kernel of a quantised model is an int8 array and a scale for each output channel.
The model reads the int8 array and multiplies it out where it is used, in the
kernel's former dtype; activations are not quantised. The result is another model:
what speculation preserves is the law of the int8 model, not of the one it was made
from. It holds, and reads at every step, half of what bfloat16 does.
"""

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from specjax.core.types import Model


def _qwix() -> ModuleType:
  try:
    import qwix
  except ImportError as error:
    raise ValueError(
      "target_weights: 'int8' needs the library qwix; pip install 'specjax[int8]'"
    ) from error
  return qwix


@functools.partial(jax.jit, static_argnums=1)
def _quantize_kernel(kernel_IO: jax.Array, dtype: Any) -> Any:
  return _qwix().quantize(
    kernel_IO.astype(jnp.float32),
    jnp.int8,
    channelwise_axes=(1,),
    scale_dtype=dtype,
  )


def quantize_int8(params: Mapping[str, Any]) -> dict[str, Any]:
  """Makes the dense kernels of a network int8, one after the other.

    kernel[i, o] ~ scale[o] * int8[i, o],  scale[o] = max_i |kernel[i, o]| / 127

  so that an element is off by half a scale at most. Embeddings (a table that is
  looked up in, and the head of T5 1.0), norms and biases stay as they are.

  Args:
    params: nested dictionaries of arrays, float32 or bfloat16. Leaves named
      'kernel' are `[in, out]`. Arrays of NumPy go to the default device one at a
      time, so that it never holds all of them in their former dtype.

  Returns:
    The same dictionaries, on the default device; kernels are `qwix.QArray`s.

  Raises:
    ValueError: qwix is not installed, or a kernel is int8 already.
  """
  qwix = _qwix()

  def visit(name: str, node: Any) -> Any:
    if isinstance(node, Mapping):
      return {key: visit(f'{name}/{key}', child) for key, child in node.items()}
    if name.rpartition('/')[2] != 'kernel':
      return jnp.asarray(node)
    if isinstance(node, qwix.QArray):
      raise ValueError(
        f'weights: {name[1:]} is int8 already; give parameters of the full model'
      )
    return _quantize_kernel(node, node.dtype)

  return visit('', params)


@functools.cache
def int8_model(model: Model) -> Model:
  """The `Model` that runs `model` on what `quantize_int8` returned.

  Args:
    model: any model whose parameters are nested dictionaries.

  Returns:
    A `Model`; the same object for the same model, so that it does not recompile.

  Raises:
    ValueError: qwix is not installed.
  """
  qwix = _qwix()

  def floats(params: Any) -> Any:
    return jax.tree.map(
      lambda leaf: qwix.dequantize(leaf) if isinstance(leaf, qwix.QArray) else leaf,
      params,
      is_leaf=lambda leaf: isinstance(leaf, qwix.QArray),
    )

  def init(params, inputs_BE, *, num_slots):
    return model.init(floats(params), inputs_BE, num_slots=num_slots)

  def extend(params, cache, tokens_BT, start_B):
    # Tied to the tokens, the kernels are no invariants of the decoding loop, whose
    # floats XLA would otherwise compute once before it, and keep: all of them.
    params, tokens_BT = jax.lax.optimization_barrier((params, tokens_BT))
    return model.extend(floats(params), cache, tokens_BT, start_B)

  return Model(init, extend)
