"""Compiles a pair's programs and draws conclusions: the numbers of `specjax.aot`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import specjax
from specjax import published
from specjax.command import programs
from specjax.command.aot_config import AotConfig
from specjax.command.programs import Setup
from specjax.eval import roofline
from specjax.models.t5 import T5Config
from specjax.parallel import aot, hlo, hlo_facts, topology
from specjax.parallel.topology import Topology

MAX_WIDTHS = 4  # widths of the verification that a sweep compiles
# Leviathan et al. 2023, section 4.1: measured on one TPU v4 chip, T5-XXL's drafts.
PAPER_C = {'t5_1_1_small': 0.02, 't5_1_1_base': 0.04, 't5_1_1_large': 0.11}

Note = Callable[[str], None]


class Facts(NamedTuple):
  """What one program does.

  Attributes:
    program: compiled.
    traffic: bytes to and from main memory, per round of a loop or per call.
    collectives: likewise.
    host_transfers: likewise, names of operations.
    weight_copies: in the loop, or the whole program if there is none.
    weight_gathers: likewise, all-gathers.
    copied_before: bytes of weights that are copied before the loop, once a call.
    weights: bytes of the parameters that are read, each counted once.
    weights_read: bytes that are read of them.
    donated: arguments whose memory results take.
    cycles: the compiler's estimate.
  """

  program: aot.Program
  traffic: hlo_facts.Traffic
  collectives: tuple[hlo_facts.Collective, ...]
  host_transfers: tuple[str, ...]
  weight_copies: int
  weight_gathers: int
  copied_before: int
  weights: int
  weights_read: float
  donated: int
  cycles: int

  def work(self, flops: float) -> roofline.Work:
    return roofline.Work(flops, self.traffic.total, self.collectives)


class Study(NamedTuple):
  """Everything that was found.

  Attributes:
    config: what was asked for.
    topology: the slice.
    mesh: (data, model).
    facts: by program: 'loop', 'plain_loop', 'verify_<width>', 'plain', 'draft',
      'target_encoder', 'draft_encoder'.
    bounds: roofline of each step and encoder, and of a 'round' of the loop.
    predictions: by gamma.
  """

  config: AotConfig
  topology: Topology
  mesh: tuple[int, int]
  facts: dict[str, Facts]
  bounds: dict[str, roofline.Bound]
  predictions: list[roofline.Prediction]

  @property
  def peak(self) -> int:
    """Bytes of a device that the loop needs."""
    return self.facts['loop'].program.memory.total

  @property
  def spare(self) -> int:
    """Bytes of a device that are left; negative: it does not fit."""
    return self.topology.chip.hbm_bytes - self.peak

  @property
  def best(self) -> roofline.Prediction:
    return roofline.best(self.predictions)

  @property
  def asked(self) -> roofline.Prediction:
    gamma = self.config.num_speculative_tokens
    return next(each for each in self.predictions if each.gamma == gamma)

  @property
  def width(self) -> int:
    return self.config.num_speculative_tokens + 1

  def by_cycles(self) -> tuple[float, float]:
    """(c, v) by the compiler's own estimates."""
    plain = self.facts['plain'].cycles
    verify = self.facts[f'verify_{self.width}'].cycles
    return self.facts['draft'].cycles / plain, verify / plain


def make_setup(config: AotConfig) -> tuple[Topology, Setup]:
  """The pair on its mesh.

  Raises:
    ValueError: unknown names, a mesh that does not fit topology or shapes, or
      parameters that a chip can not hold.
  """
  place = topology.find(config.topology)
  target, draft = (
    T5Config.from_size(size, dtype=config.dtype)
    for size in (config.target, config.draft)
  )
  if abs(target.vocab_size - draft.vocab_size) >= specjax.load.MAX_PADDING:
    raise ValueError(
      f'draft: {config.draft} has {draft.vocab_size} logits, {config.target} '
      f'{target.vocab_size}; choose a draft of the same vocabulary'
    )
  data, model = config.mesh_data, config.mesh_model
  if model is None:
    rest = place.size // (data or 1)
    _, model = published.mesh_shape(config.target, max(rest, 1))
  data = data or max(place.size // model, 1)
  setup = Setup(
    target,
    draft,
    topology.make_mesh(place, data, model),
    num_draft=config.num_speculative_tokens,
    batch_size=config.batch_size,
    max_source=config.max_source,
    max_new_tokens=config.max_new_tokens,
    shard_draft=config.shard_draft,
    matrix_unit=config.matrix_unit,
  )
  short = programs.param_bytes(setup) - place.chip.hbm_bytes
  if short > 0:
    raise ValueError(
      f'{config.target} with {config.draft} does not fit {place.name}: the parameters '
      f'alone take {short} bytes more than the {place.chip.hbm_bytes} of a chip; '
      f'{aot.REMEDY}'
    )
  return place, setup


def run(config: AotConfig, note: Note) -> Study:
  """Compiles everything.

  Args:
    config: what for.
    note: told of each program before it is compiled and after.
  """
  place, setup = make_setup(config)
  gammas = config.gammas
  widths = _widths(gammas, config.num_speculative_tokens)
  jobs: dict[str, Callable[[], aot.Program]] = {
    'loop': functools.partial(programs.compile_loop, setup),
    'plain_loop': functools.partial(programs.compile_loop, setup, 0),
    'plain': functools.partial(programs.compile_target_step, setup, 1),
    **{
      f'verify_{width}': functools.partial(programs.compile_target_step, setup, width)
      for width in widths
    },
    'draft': functools.partial(programs.compile_draft_step, setup),
    'target_encoder': functools.partial(programs.compile_encoder, setup, 'target'),
    'draft_encoder': functools.partial(programs.compile_encoder, setup, 'draft'),
  }
  facts = {}
  for number, (name, job) in enumerate(jobs.items(), 1):
    note(f'[{number}/{len(jobs)}] {name.replace("_", " ")}')
    facts[name] = gather(job())
    note(f'[{number}/{len(jobs)}] {facts[name].program.seconds:.0f} s')
  return conclude(config, place, setup.mesh.devices.shape, facts, widths)


def conclude(
  config: AotConfig,
  place: Topology,
  mesh: tuple[int, ...],
  facts: dict[str, Facts],
  widths: Sequence[int],
) -> Study:
  """The roofline of what was compiled."""
  chip, gamma = place.chip, config.num_speculative_tokens
  bounds = {
    name: roofline.bound(each.work(each.program.flops), chip)
    for name, each in facts.items()
    if not name.endswith('loop')
  }
  verify, draft = facts[f'verify_{gamma + 1}'], facts['draft']
  flops = verify.program.flops + gamma * draft.program.flops
  bounds['round'] = roofline.bound(facts['loop'].work(flops), chip)
  plain = facts['plain'].program.flops
  bounds['plain_round'] = roofline.bound(facts['plain_loop'].work(plain), chip)
  seconds = [bounds[f'verify_{width}'].seconds for width in widths]
  verify_seconds = {
    each: float(np.interp(each + 1, widths, seconds)) for each in config.gammas
  }
  predictions = roofline.predict(
    config.alpha, bounds['plain'].seconds, bounds['draft'].seconds, verify_seconds
  )
  return Study(config, place, (mesh[0], mesh[1]), facts, bounds, predictions)


def _widths(gammas: Sequence[int], gamma: int) -> list[int]:
  """gamma + 1, and a few widths that span the sweep."""
  spread = np.unique(np.linspace(gammas[0], gammas[-1], MAX_WIDTHS - 1).round())
  return sorted({gamma + 1, *(int(each) + 1 for each in spread)})


def gather(program: aot.Program) -> Facts:
  """Reads what a program does in each round of its loop, or in a call."""
  module = program.module
  try:
    loop = hlo.data_loop(module)
    inside = loop.body
    parts: tuple[str, ...] = (inside, loop.condition)
  except ValueError:
    inside = module.entry
    parts = (inside,)
  copies = hlo_facts.weight_copies(module, inside)
  inner = {copy.name for copy in copies}
  everywhere = hlo_facts.weight_copies(module, module.entry)
  before = [copy for copy in everywhere if copy.name not in inner]
  sizes = {path: leaf.shapes[0].nbytes for path, leaf in hlo.parameters(module).items()}
  reads = hlo_facts.reads(module, inside)
  return Facts(
    program=program,
    traffic=hlo_facts.traffic(module, inside),
    collectives=tuple(
      each for part in parts for each in hlo_facts.collectives(module, part)
    ),
    host_transfers=tuple(
      each for part in parts for each in hlo_facts.host_transfers(module, part)
    ),
    weight_copies=len(copies),
    weight_gathers=len(hlo_facts.weight_gathers(module, inside)),
    copied_before=sum(shape.nbytes for copy in before for shape in copy.shapes),
    weights=sum(sizes[path] for path, times in reads.items() if times > 0.5),
    weights_read=sum(sizes[path] * times for path, times in reads.items()),
    donated=len(module.aliases),
    cycles=hlo_facts.cycles(module, inside),
  )


def to_dict(study: Study) -> dict[str, Any]:
  """Everything as JSON types."""
  c, v = study.by_cycles()
  return {
    'config': dataclasses.asdict(study.config),
    'versions': {
      'specjax': specjax.__version__,
      **aot.versions(study.facts['loop'].program.compiled),
    },
    'topology': {
      'name': study.topology.name,
      'chips': study.topology.size,
      'chip': study.topology.chip._asdict(),
      'mesh': {'data': study.mesh[0], 'model': study.mesh[1]},
    },
    'memory': {
      'needed': study.peak,
      'available': study.topology.chip.hbm_bytes,
      'spare': study.spare,
      'fits': study.spare >= 0,
    },
    'programs': {name: _facts_dict(each) for name, each in study.facts.items()},
    'roofline': {
      name: {**each._asdict(), 'seconds': each.seconds, 'limit': each.limit}
      for name, each in study.bounds.items()
    },
    'compiler_estimates': {'c': c, 'v': v},
    'paper_c': PAPER_C.get(study.config.draft),
    'predictions': [each._asdict() for each in study.predictions],
    'best_gamma': study.best.gamma,
  }


def _facts_dict(facts: Facts) -> dict[str, Any]:
  program = facts.program
  return {
    'name': program.name,
    'compile_seconds': program.seconds,
    'memory': {**program.memory._asdict(), 'total': program.memory.total},
    'flops': program.flops,
    'bytes_read': facts.traffic.read,
    'bytes_written': facts.traffic.written,
    'weight_bytes': facts.weights,
    'weight_bytes_read': facts.weights_read,
    'collectives': [each._asdict() for each in facts.collectives],
    'host_transfers': list(facts.host_transfers),
    'weight_copies': facts.weight_copies,
    'weight_gathers': facts.weight_gathers,
    'weight_bytes_copied_before': facts.copied_before,
    'donated': facts.donated,
    'compiler_cycles': facts.cycles,
  }
