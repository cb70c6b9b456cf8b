"""What XLA's TPU compiler makes of the loop: checked on its text, for chips not here.

Needs libtpu, the extra `aot`; `pytest -m aot` runs it. Two decoder layers of T5-XXL's
width stand for all: a layer is like the next.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from specjax import aot as command
from specjax.command import aot_study, programs
from specjax.command.aot_config import AotConfig
from specjax.command.programs import Setup
from specjax.core.types import Model
from specjax.core.warp import make_warp
from specjax.models.t5 import T5Config, Transformer, t5_model
from specjax.models.t5 import model as model_lib
from specjax.parallel import aot, hlo, hlo_facts, topology

pytestmark = [
  pytest.mark.aot,
  pytest.mark.skipif(not topology.has_compiler(), reason=f'needs {topology.INSTALL}'),
  pytest.mark.usefixtures('optimised'),
]
LAYERS = 2


def make_setup(place='v4:1x1x1', model=1, **options):
  def config(size, layers):
    return T5Config.from_size(
      size, dtype='bfloat16', num_encoder_layers=1, num_decoder_layers=layers
    )

  return Setup(
    config('t5_1_1_xxl', LAYERS),
    config('t5_1_1_small', 1),
    topology.make_mesh(topology.find(place), 1, model),
    **options,
  )


def body_reads(program, *, also=''):
  """Reads a round of the target's weights whose path contains a word."""
  loop = hlo.data_loop(program.module)
  reads = hlo_facts.reads(program.module, loop.body)
  leaves = hlo.parameters(program.module)
  return {
    path: times
    for path, times in reads.items()
    if 'params.target' in path and also in path and len(leaves[path].shapes[0].dims) > 1
  }


@pytest.fixture(scope='module')
def loop(optimised):
  return programs.compile_loop(make_setup())


@pytest.fixture(scope='module')
def plain_step(optimised):
  return programs.compile_target_step(make_setup(), 1)


def test_the_loop_never_waits_for_the_host(loop):
  assert aot_study.gather(loop).host_transfers == ()


def test_every_weight_is_read_once_a_round_from_where_it_lies(loop):
  facts = aot_study.gather(loop)
  assert facts.copied_before == 0
  decoder = body_reads(loop, also='decoder')
  read = {path for path, times in decoder.items() if times > 0.5}
  # Query, key, value, out; query, out; wi_0, wi_1, wo; and the head. One of them may
  # stay in a scratchpad from round to round.
  kernels = {path for path in read if 'kernel' in path}
  assert LAYERS * 9 <= len(kernels) <= LAYERS * 9 + 1
  # The compiler may fetch the first layer's once more.
  assert sum(decoder.values()) <= len(read) + 1
  assert facts.weights_read < 1.15 * facts.weights


def test_the_source_is_projected_before_the_loop(loop):
  source = "encoder_decoder_attention']"
  for path in ("['encoder']", f"{source}['key']", f"{source}['value']"):
    found = body_reads(loop, also=path)
    assert len(found) >= LAYERS
    assert set(found.values()) == {0.0}


def cache_writes(program):
  body = hlo.data_loop(program.module).body
  assert hlo_facts.count(program.module, body, 'scatter') == 0
  return hlo_facts.count(
    program.module, body, 'dynamic-update-slice', 'self_attention'
  )  # fmt: skip


def test_the_cache_is_updated_in_place(loop, plain_step):
  # Keys and values of each layer; the draft's one layer writes in each of 7 steps.
  assert cache_writes(loop) == 2 * (LAYERS + 7)
  # The encoder's attention takes most of it.
  assert loop.memory.temporaries < 300e6
  # A step alone is given its cache, and every leaf of it is written over.
  assert len(plain_step.module.aliases) == 2 * 2 * LAYERS + 1


def test_a_plain_step_moves_weights_and_caches(plain_step):
  facts = aot_study.gather(plain_step)
  caches = plain_step.memory.aliased
  assert facts.weights_read < 1.1 * facts.weights
  assert facts.weights < facts.traffic.total < 1.1 * (facts.weights + 2 * caches)


# The same program made worse: each fault must show.


def test_default_layouts_show(monkeypatch):
  monkeypatch.setattr(aot, 'automatic', lambda shardings: shardings)
  facts = aot_study.gather(programs.compile_loop(make_setup()))
  assert facts.copied_before > 100e6


def test_a_callback_shows(monkeypatch):
  def noting_warp(*arguments):
    warp = make_warp(*arguments)

    def noted(logits_BTV, *rest):
      jax.debug.callback(lambda x: None, logits_BTV[0, 0, 0])
      return warp(logits_BTV, *rest)

    return noted

  monkeypatch.setattr(programs, 'make_warp', functools.cache(noting_warp))
  facts = aot_study.gather(programs.compile_loop(make_setup(), 0))
  assert facts.host_transfers


def test_a_source_projected_in_every_step_shows(monkeypatch):
  """As stock T5X decodes."""

  @functools.cache
  def projecting(config):
    model, module = t5_model(config), Transformer(config)

    def init(params, inputs_BE, *, num_slots):
      encoded = module.apply({'params': params}, inputs_BE, method=module.encode)
      cache = model.init(params, inputs_BE, num_slots=num_slots)
      return cache._replace(sources=(encoded,))

    def extend(params, cache, tokens_BT, start_B):
      # Otherwise the compiler takes it out of the loop.
      encoded, start_B = jax.lax.optimization_barrier((cache.sources[0], start_B))
      sources = module.apply(
        {'params': params},
        encoded,
        method=lambda module, encoded: module.decoder.source_key_values(encoded),
      )
      given = cache._replace(sources=sources)
      output, new = model.extend(params, given, tokens_BT, start_B)
      return output, new._replace(sources=cache.sources)

    return Model(init, extend)

  monkeypatch.setattr(programs, 't5_model', projecting)
  loop = programs.compile_loop(make_setup(), 0)
  found = body_reads(loop, also="encoder_decoder_attention']['key")
  assert set(found.values()) == {1.0}


def test_a_cache_that_is_written_whole_shows(monkeypatch):
  def write(slots_HSK, new_BHTK, start_B):
    slot_S11 = jnp.arange(slots_HSK.shape[1])[None, :, None]
    return jnp.where(slot_S11 == start_B[0], new_BHTK[0], slots_HSK)

  monkeypatch.setattr(model_lib, 'write_slots', write)
  # Models are kept by their shape: this one must be neither found nor kept.
  monkeypatch.setattr(model_lib, '_t5_model', model_lib._t5_model.__wrapped__)
  assert cache_writes(programs.compile_loop(make_setup(), 0)) == 0


def test_four_chips_gather_no_weights():
  program = programs.compile_loop(make_setup('v4-8', 4), 0)
  facts = aot_study.gather(program)
  assert facts.weight_gathers == 0
  wide = [each for each in facts.collectives if each.nbytes >= 4096 * 2]
  # After self-attention, cross-attention and mlp of each layer, and the embedding.
  assert [each.kind for each in wide] == ['all-reduce'] * (3 * LAYERS + 1)
  assert {each.group for each in wide} == {4}


def test_a_program_for_a_chip_that_is_not_here(plain_step, tmp_path):
  path = tmp_path / 'step.bin'
  aot.save(plain_step, path, 'v4:1x1x1')
  with pytest.raises(
    ValueError, match="v4:1x1x1, 1 devices 'TPU v4'; here are 8 'cpu'"
  ):
    aot.load(path)


def test_parameters_that_no_chip_holds(capsys):
  assert command.main(['--topology', 'v5e-1']) == 2
  error = capsys.readouterr().err
  assert (
    't5_1_1_xxl with t5_1_1_small does not fit v5e:1x1: the parameters alone' in error
  )
  assert 'bytes more than the 17179869184 of a chip; split' in error


def test_a_mesh_that_does_not_divide_heads(capsys):
  assert command.main(['--target', 't5_1_1_small', '--topology', 'v4-8',
                       '--mesh_model', '4']) == 2  # fmt: skip
  assert 'mesh: the axis heads of' in capsys.readouterr().err


def test_xxl_on_one_v4_chip():
  """The paper's set-up: T5 1.1 XXL and small, batch 1, 512 in, 128 out, gamma 7."""
  config = AotConfig()
  place, setup = aot_study.make_setup(config)
  facts = {
    name: aot_study.gather(program)
    for name, program in {
      'loop': programs.compile_loop(setup),
      'plain': programs.compile_target_step(setup, 1),
      'verify_8': programs.compile_target_step(setup, 8),
      'draft': programs.compile_draft_step(setup),
    }.items()
  }
  loop = facts['loop']
  assert loop.program.memory.total < 32e9
  assert loop.program.memory.temporaries < 1e9
  assert loop.host_transfers == ()
  assert loop.weight_gathers == 0
  assert loop.copied_before == 0
  assert loop.weight_copies == 0
  facts['plain_loop'] = loop  # its bound is not looked at
  study = aot_study.conclude(config, place, (1, 1), facts, [8])
  assert study.asked.v <= 1.1
  assert study.asked.c <= 0.03
  # A plain step streams the decoder and the caches, and little else.
  plain = facts['plain']
  assert plain.weights_read < 1.02 * plain.weights
  assert plain.traffic.total < 1.05 * plain.weights
  c, v = study.by_cycles()
  print(f'c {study.asked.c:.4f} by bandwidth, {c:.4f} by estimate; '
        f'v {study.asked.v:.3f}, {v:.3f}')  # fmt: skip
