"""The layouts in which T5X stores a T5's layers, and the shape they imply.

examples/t5 has a subtree per layer (`encoder/layers_0/...`) and kernels of two
axes. examples/scalable_t5 stacks layers (`encoder/encoder/...`, on axis 1), or not,
keeps heads apart (`[D, H, K]`, and `[H, K, D]` on the way out) and gives each layer
a relative bias of its own. This package's T5, as all but umT5 of those published,
has one per stack: layers that agree open, layers that differ are refused.
"""

import re
from collections.abc import Iterable, Mapping

import numpy as np

from specjax.checkpoints.arrays import AGAIN
from specjax.checkpoints.leaves import Index, Leaf, array_leaf, read_whole
from specjax.models import t5

STACKS = ('encoder', 'decoder')
_LAYER = re.compile(r'(encoder|decoder)/layers_(\d+)/(.+)')
_BIAS = 'relpos_bias/rel_embedding'
_EMBEDDING = 'token_embedder/embedding'
_HEADS = re.compile(r'.*/(query|key|value|out)/kernel')


def infer_config(
  shapes: Mapping[str, tuple[int, ...]], where: str = 'the checkpoint'
) -> t5.T5Config:
  """The configuration that parameters of these shapes belong to.

  Shapes do not tell the activations: one `wi` is taken for T5 1.0's relu, `wi_0`
  and `wi_1` for the gated gelu of T5 1.1, mT5, ByT5 and Flan. Nor do they tell the
  distance from which relative buckets are shared; T5X's examples have 128.

  Args:
    shapes: by unrolled names joined by '/'.
    where: the file, for messages.

  Returns:
    The configuration, with float32 activations.

  Raises:
    ValueError: a parameter that is needed is missing or has another rank.
  """

  def shape(name: str) -> tuple[int, int]:
    if name not in shapes:
      raise ValueError(
        f'weights: {where} lacks {name}; its parameters are not those of a T5 under '
        "T5X's names (examples/t5 or examples/scalable_t5)"
      )
    if len(shapes[name]) != 2:
      raise ValueError(
        f'weights: {where}: {name} has shape {tuple(shapes[name])}, expected two '
        'axes; export it by the network of examples/t5'
      )
    rows, columns = shapes[name]
    return rows, columns

  depths = dict.fromkeys(STACKS, 0)
  for name in shapes:
    if match := _LAYER.fullmatch(name):
      depths[match[1]] = max(depths[match[1]], int(match[2]) + 1)
  vocab_size, emb_dim = shape(_EMBEDDING)
  num_heads, num_buckets = shape(f'encoder/{_BIAS}')
  _, width = shape('encoder/layers_0/attention/query/kernel')
  mlp_dim, _ = shape('encoder/layers_0/mlp/wo/kernel')
  if width % num_heads:
    raise ValueError(
      f'weights: {where}: encoder/layers_0/attention/query/kernel has {width} '
      f'columns, no multiple of the {num_heads} heads of encoder/{_BIAS}; '
      f'{AGAIN}'
    )
  is_gated = 'encoder/layers_0/mlp/wi/kernel' not in shapes
  return t5.T5Config(
    vocab_size=vocab_size,
    emb_dim=emb_dim,
    num_heads=num_heads,
    head_dim=width // num_heads,
    mlp_dim=mlp_dim,
    num_encoder_layers=depths['encoder'],
    num_decoder_layers=depths['decoder'],
    mlp_activations=('gelu', 'linear') if is_gated else ('relu',),
    logits_via_embedding='decoder/logits_dense/kernel' not in shapes,
    relative_attention_num_buckets=num_buckets,
  )


def unroll(file: str, stored: Mapping[str, Leaf]) -> tuple[dict[str, Leaf], str]:
  """Names layers one by one, and each stack's relative bias once.

  Layers of one stack are neighbours in the result, so that a chunk that holds
  them all is decoded once.
  """
  leaves: dict[str, Leaf] = {}
  biases: dict[str, list[Leaf]] = {stack: [] for stack in STACKS}
  is_scanned = False
  for name, leaf in stored.items():
    stack, _, rest = name.partition('/')
    if stack in STACKS and rest.startswith(f'{stack}/'):
      is_scanned = True
      rest = rest.removeprefix(f'{stack}/')
      layers = _layers(file, name, leaf, _scan_axis(file, stack, stored))
    elif (match := _LAYER.fullmatch(name)) and match[3] == _BIAS:
      rest, layers = match[3], [leaf]
    else:
      leaves[name] = leaf
      continue
    if rest == _BIAS:
      biases[stack] += layers
    else:
      for number, layer in enumerate(layers):
        leaves[f'{stack}/layers_{number}/{rest}'] = layer
  for name, leaf in leaves.items():
    if len(leaf.shape) == 3 and (match := _HEADS.fullmatch(name)):
      leaves[name] = _join_heads(leaf, 0 if match[1] == 'out' else 1)
  for stack, layers in biases.items():
    if layers:
      leaves[f'{stack}/{_BIAS}'] = _shared_bias(file, stack, layers)
  return leaves, 'scanned' if is_scanned else 'unrolled'


def _scan_axis(file: str, stack: str, stored: Mapping[str, Leaf]) -> int:
  """The axis of the layers, T5X's `param_scan_axis`, as a norm's scale shows it."""
  name = f'{stack}/{stack}/pre_mlp_layer_norm/scale'
  if name not in stored or _EMBEDDING not in stored:
    raise ValueError(f'weights: {file} lacks {name} or {_EMBEDDING}; {AGAIN}')
  shape, emb_dim = stored[name].shape, stored[_EMBEDDING].shape[-1]
  if len(shape) != 2 or emb_dim not in shape:
    raise ValueError(
      f'weights: {file}: {name} has shape {shape}, expected ({emb_dim}, layers); '
      f'{AGAIN}'
    )
  return 1 - shape.index(emb_dim)


def _layers(file: str, name: str, leaf: Leaf, axis: int) -> list[Leaf]:
  if len(leaf.shape) <= axis:
    raise ValueError(
      f'weights: {file}: {name} has shape {leaf.shape}, no axis {axis} of layers; '
      f'{AGAIN}'
    )
  shape = leaf.shape[:axis] + leaf.shape[axis + 1 :]

  def layer(number: int) -> Leaf:
    def read(index: Index) -> np.ndarray:
      one = slice(number, number + 1)
      return np.squeeze(leaf.read((*index[:axis], one, *index[axis:])), axis)

    return Leaf(shape, leaf.dtype, read)

  return [layer(number) for number in range(leaf.shape[axis])]


def _join_heads(leaf: Leaf, axis: int) -> Leaf:
  """Makes one axis of H heads, at `axis`, and the K numbers of each after it."""
  heads, width = leaf.shape[axis : axis + 2]

  def read(index: Index) -> np.ndarray:
    start, stop = index[axis].start, index[axis].stop
    first, last = start // width, -(-stop // width)
    whole = (slice(first, last), slice(0, width))
    block = leaf.read((*index[:axis], *whole, *index[axis + 1 :]))
    block = block.reshape(*block.shape[:axis], -1, *block.shape[axis + 2 :])
    cut = slice(start - first * width, stop - first * width)
    return block[(*(slice(None),) * axis, cut)]

  shape = (*leaf.shape[:axis], heads * width, *leaf.shape[axis + 2 :])
  return Leaf(shape, leaf.dtype, read)


def _shared_bias(file: str, stack: str, layers: Iterable[Leaf]) -> Leaf:
  first, *rest = (read_whole(layer) for layer in layers)
  if not all(np.array_equal(first, bias) for bias in rest):
    raise ValueError(
      f'weights: {file}: the layers of the {stack} differ in {_BIAS}, as in umT5; '
      'this T5 has one relative bias per stack, give a checkpoint of such a model'
    )
  return array_leaf(first)
