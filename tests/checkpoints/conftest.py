"""Parameters in T5X's scanned layout."""

import re

import numpy as np
import pytest

_HEADS = 2


def _split(name, values):
  """Keeps heads apart, as examples/scalable_t5 does."""
  if name.endswith('out/kernel'):
    return values.reshape(_HEADS, -1, values.shape[-1])
  if re.search(r'(query|key|value)/kernel$', name):
    return values.reshape(values.shape[0], _HEADS, -1)
  return values


@pytest.fixture
def stack():
  """`(flat parameters, axis) -> flat parameters`, layers of 2 heads stacked."""

  def stacked(flat, axis=1):
    result, layers = {}, {}
    for name in sorted(flat):
      if match := re.fullmatch(r'(\w+)/layers_(\d+)/(.+)', name):
        key = f'{match[1]}/{match[1]}/{match[3]}'
        layers.setdefault(key, {})[int(match[2])] = _split(name, flat[name])
      elif 'relpos_bias' not in name:
        result[name] = flat[name]
    depths = {key.partition('/')[0]: len(parts) for key, parts in layers.items()}
    for one, depth in depths.items():
      bias = flat[f'{one}/relpos_bias/rel_embedding']
      layers[f'{one}/{one}/relpos_bias/rel_embedding'] = dict(enumerate([bias] * depth))
    for key, parts in layers.items():
      in_order = [parts[number] for number in range(len(parts))]
      result[key] = np.stack(in_order, axis)
    return result

  return stacked
