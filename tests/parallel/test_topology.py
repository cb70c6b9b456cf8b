"""Names of TPU slices, and what is published of their chips."""

import pytest

from specjax import published
from specjax.parallel import topology


def test_names():
  assert topology.find('v4-8') is topology.find('v4:2x2x1')
  assert topology.find('v5litepod-8') is topology.find('v5e:2x4')
  for name, place in topology.TOPOLOGIES.items():
    assert place.name == name
    assert place.chip.name == name.partition(':')[0]
  assert set(topology.ALIASES.values()) <= set(topology.TOPOLOGIES)


def test_machines_of_the_configurations_are_known():
  for name, machine in published.MACHINES.items():
    if name.startswith('v'):
      place = topology.find(name)
      assert place.size == machine.num_devices
      assert place.chip.hbm_bytes / 2**30 == machine.gigabytes


def test_unknown_name_lists_the_known():
  with pytest.raises(
    ValueError, match=r"^topology: 'v4-9' is unknown; did you mean "
  ) as e:
    topology.find('v4-9')
  assert all(name in str(e.value) for name in topology.TOPOLOGIES)
  with pytest.raises(ValueError, match="'h100' is unknown; known: v4:1x1x1, "):
    topology.find('h100')


def test_without_compiler_says_what_to_install(monkeypatch):
  monkeypatch.setattr(topology, 'has_compiler', lambda: False)
  with pytest.raises(ValueError, match=r"pip install 'specjax\[aot\]'"):
    topology.make_mesh(topology.find('v4'), 1, 1)


@pytest.mark.parametrize('shape', [(1, 1), (2, 4), (0, 4)])
def test_a_mesh_uses_every_chip(shape):
  with pytest.raises(ValueError, match='product is 4'):
    topology.make_mesh(topology.find('v4-8'), *shape)
