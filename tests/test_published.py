"""Every shipped configuration loads and is what it says."""

import math
import re

import pytest

from specjax import published
from specjax.checkpoints.leaves import expected_shapes
from specjax.config import RunConfig
from specjax.config_files import load_config, shipped_configs
from specjax.models.t5 import T5Config

FILES = {
  't5_1_0': (published.T5_1_0, 70),
  't5_1_1': (published.T5_1_1, 70),
  'flan_t5': (published.FLAN_T5, 70),
  'byt5': (published.BYT5, 69),
  'paper': (published.T5_1_1, 84),
}
CHECKPOINTS = {
  each.path: each for family, _ in FILES.values() for each in family.values()
}
# Table 2 of the paper: task, draft, temperature -> gamma.
TABLE_2 = {
  ('ende', 'small', 0): 7,
  ('ende', 'base', 0): 7,
  ('ende', 'large', 0): 7,
  ('ende', 'small', 1): 7,
  ('ende', 'base', 1): 5,
  ('ende', 'large', 1): 3,
  ('cnndm', 'small', 0): 5,
  ('cnndm', 'base', 0): 5,
  ('cnndm', 'large', 0): 3,
  ('cnndm', 'small', 1): 5,
  ('cnndm', 'base', 1): 3,
  ('cnndm', 'large', 1): 3,
}


def names(stem):
  """The names that a message about a bad one can only hint at."""
  namespace = {}
  exec(shipped_configs()[stem].read_text(encoding='utf-8'), namespace)
  return list(namespace['CONFIGS'])


@pytest.mark.parametrize('stem', FILES)
def test_every_configuration_fits_its_machine(stem):
  family, count = FILES[stem]
  found = names(stem)
  assert len(found) == count
  for name in found:
    machine = published.MACHINES[name.partition('@')[2]]
    config = load_config(f'{stem}/{name}')
    target, draft = (
      CHECKPOINTS[path] for path in (config.pair.model, config.pair.draft_model)
    )
    assert {target, draft} <= {*family.values()}
    sizes = list(family.values())
    assert sizes.index(draft) < sizes.index(target)
    assert config.pair.dtype == 'bfloat16'
    mesh = config.parallel
    assert mesh.mesh_data * mesh.mesh_model == machine.num_devices
    assert config.io.batch_size % mesh.mesh_data == 0
    shape = T5Config.from_size(target.size)
    for size in (shape.num_heads, shape.mlp_dim, shape.vocab_size):
      assert size % mesh.mesh_model == 0, name
    assert published.fits(target, draft, machine), name


def test_a_pair_that_does_not_fit_is_not_offered():
  """ByT5 XXL with XL: 25.9 and 7.5 GB; a v4 chip has 32."""
  assert 'xxl_xl@v4' not in names('byt5')
  assert {'xxl_large@v4', 'xxl_xl@v4-8'} <= {*names('byt5')}


@pytest.mark.parametrize('size', ['t5_1_0_small', 't5_1_1_small', 'byt5_small'])
def test_parameters_are_counted(size):
  shapes = expected_shapes(T5Config.from_size(size)).values()
  exact = sum(math.prod(shape) for shape in shapes)
  assert 0 < exact - published.num_parameters(size) < exact / 1000


def test_parameters_of_the_papers_target():
  """11,135,332,352 in all, of which 122 norms and 2 tables of biases."""
  rest = (24 * 2 + 24 * 3 + 2) * 4096 + 2 * 64 * 32
  assert published.num_parameters('t5_1_1_xxl') + rest == 11_135_332_352


def test_the_papers_rows():
  found = {name for name in names('paper') if name.endswith('@v4')}
  assert found == {f'{task}_{draft}_t{t}@v4' for task, draft, t in TABLE_2}
  for (task, draft, temperature), gamma in TABLE_2.items():
    config = load_config(f'paper/{task}_{draft}_t{temperature}@v4')
    assert config.speculation.num_speculative_tokens == gamma
    assert config.sampling.temperature == temperature
    assert config.io.batch_size == 1
    assert config.pair.model.endswith('/t5_1_1_xxl/checkpoint_1000000')
    assert f'/t5_1_1_{draft}/' in config.pair.draft_model
    assert config.parallel.mesh_data * config.parallel.mesh_model == 1


@pytest.mark.parametrize('stem', [*FILES, 'embedded'])
def test_launch_lines_load(stem):
  text = shipped_configs()[stem].read_text(encoding='utf-8')
  (name,) = re.findall(r'python -m specjax.run --config (\S+)', text)
  assert isinstance(load_config(name), RunConfig)


@pytest.mark.parametrize(
  ('name', 'words'),
  [
    ('paper', r'none of the 84 in paper; give paper/NAME, such as cnndm_base_t0@h100'),
    ('paper/ende_smal_t0@v4', r'did you mean ende_small_t0@v4 or'),
    ('flan_t5/xxl_small@v9', r'did you mean xxl_small@v4 or'),
    ('papr/ende_small_t0@v4', r'did you mean paper\?'),
    ('embedded/x', r'has no CONFIGS; give embedded without /x'),
  ],
)
def test_a_name_that_is_none(name, words):
  with pytest.raises(ValueError, match=words) as caught:
    load_config(name)
  assert str(caught.value).startswith('config: ')
