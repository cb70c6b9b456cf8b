"""Facts about a compiled program: what it moves, reads, copies and waits for.

Main memory is what counts. A TPU's scratchpads are its own: what moves among them is
not counted, and a weight that is fetched into one and used there is read once.
`compiled.cost_analysis()` counts it each time, and loops once, however long.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from specjax.parallel.hlo import Computation, Instruction, Module, Shape, parameters

HOST_SPACE = 5
MIN_WEIGHT = 2**14  # elements; smaller arrays are no weights, or do not matter

# Instructions that move nothing: names for what is there, or the ends of what was
# started.
_FREE = frozenset({
  'parameter', 'get-tuple-element', 'tuple', 'bitcast', 'constant', 'after-all',
  'opt-barrier', 'partition-id', 'replica-id', 'iota', 'copy-done', 'slice-done',
  'all-reduce-done', 'all-gather-done', 'collective-permute-done', 'async-done',
  'async-update', 'send-done', 'recv-done', 'add-dependency',
})  # fmt: skip
_SLICES = frozenset(['slice', 'dynamic-slice', 'gather', 'slice-start'])
_NAMES = frozenset(['bitcast', 'copy-done', 'slice-done', 'optimization-barrier'])
_PREFETCHES = frozenset(['slice-start', 'copy-start'])
_PRODUCTS = frozenset(['dot', 'convolution'])
_UPDATES = frozenset(['dynamic-update-slice', 'scatter'])
_COLLECTIVES = frozenset({
  'all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute',
  'collective-broadcast', 'ragged-all-to-all',
})  # fmt: skip
_HOST = frozenset(['infeed', 'outfeed', 'send', 'recv'])


class Traffic(NamedTuple):
  """Bytes to and from main memory."""

  read: int = 0
  written: int = 0

  @property
  def total(self) -> int:
    return self.read + self.written

  def plus(self, other: 'Traffic', times: int = 1) -> 'Traffic':
    return Traffic(self.read + times * other.read, self.written + times * other.written)


class Collective(NamedTuple):
  """Communication between devices.

  Attributes:
    kind: such as 'all-reduce'.
    nbytes: of its result on one device.
    group: devices that take part; 0 if the text does not say.
    times: how often it runs, inner loops counted.
    op_name: the JAX operation that it serves.
  """

  kind: str
  nbytes: int
  group: int
  times: int
  op_name: str


def traffic(module: Module, computation: str) -> Traffic:
  """Bytes that one run of a computation moves to and from main memory.

  What an instruction uses in main memory it reads once; slices and gathers read what
  they return, and updates in place write what they are given. Of a conditional's
  branches the one with least traffic counts: filters are off, say.
  """
  total = Traffic()
  within = module.computations[computation]
  for instruction in within.instructions.values():
    if instruction.opcode == 'while':
      loop = module.loop(instruction)
      times = 1 if loop.trips is None else loop.trips
      total = total.plus(traffic(module, loop.body), times)
    elif instruction.opcode in ('conditional', 'call', 'async-start'):
      branches = [traffic(module, name) for name in instruction.callees]
      total = total.plus(min(branches, key=lambda branch: branch.total))
    elif not _is_free(instruction):
      read = sum(
        _bytes_read(module, within, instruction, operand)
        for operand in dict.fromkeys(instruction.operands)
      )
      written = _bytes_written(module, within, instruction)
      total = total.plus(Traffic(read, written))
  return total


def reads(module: Module, computation: str) -> dict[str, float]:
  """How often one run reads each parameter from main memory.

  Args:
    module: the program.
    computation: the entry, or the body of a loop that data end.

  Returns:
    By path, bytes read over the parameter's bytes; 0 for those that are not read.
  """
  inside = {within.name for _, within, _ in module.walk(computation)}
  entry = module.computations[module.entry]
  return {
    path: sum(
      times * _bytes_read(module, within, user, name)
      for within, user, name, times in _uses(module, entry, parameter.name)
      if within.name in inside
    )
    / parameter.shapes[0].nbytes
    for path, parameter in parameters(module).items()
  }


def collectives(module: Module, computation: str, times: int = 1) -> list[Collective]:
  """All communication of one run; of branches the one with least, as for `traffic`."""
  found = []
  for instruction in module.computations[computation].instructions.values():
    kind = instruction.opcode.removesuffix('-start')
    if kind in _COLLECTIVES:
      nbytes = sum(shape.nbytes for shape in _result(instruction))
      group = _group_size(instruction.rest)
      found.append(Collective(kind, nbytes, group, times, instruction.op_name))
    elif instruction.opcode == 'while':
      loop = module.loop(instruction)
      trips = 1 if loop.trips is None else loop.trips
      for name in (loop.body, loop.condition):
        found += collectives(module, name, times * trips)
    elif instruction.callees:
      parts = [collectives(module, name, times) for name in instruction.callees]
      found += min(parts, key=lambda part: sum(each.times for each in part))
  return found


def host_transfers(module: Module, computation: str) -> list[str]:
  """Names of the operations of one run that wait for the host."""

  def waits(instruction: Instruction) -> bool:
    spaces = {shape.space for shape in instruction.shapes}
    is_callback = instruction.opcode == 'custom-call' and 'callback' in instruction.rest
    return instruction.opcode in _HOST or is_callback or HOST_SPACE in spaces

  return [
    instruction.op_name or instruction.name
    for instruction, _, _ in module.walk(computation)
    if waits(instruction)
  ]


def weight_gathers(module: Module, computation: str) -> list[Instruction]:
  """All-gathers of one run that put a weight's shards together."""
  weights = {
    leaf.shapes[0].size
    for leaf in parameters(module).values()
    if _is_weight(leaf.shapes[0])
  }
  return [
    instruction
    for instruction, _, _ in module.walk(computation, into_fusions=True)
    if instruction.opcode.removesuffix('-start') == 'all-gather'
    and any(
      shape.size == size * max(_group_size(instruction.rest), 1)
      for shape in _result(instruction)
      for size in weights
    )
  ]


def weight_copies(module: Module, computation: str) -> list[Instruction]:
  """What one run makes of a weight that is as large as it: copies, transposes, casts.

  Fetching a weight into a scratchpad as it lies is no copy.
  """
  inside = {within.name for _, within, _ in module.walk(computation)}
  found: dict[str, Instruction] = {}

  def is_copy(user: Instruction, weight: Shape) -> bool:
    parts = [i for name in user.callees for i in module.computations[name].opcodes]
    return (
      user.opcode not in _UPDATES | {'custom-call'}
      and not _PRODUCTS & {*parts, user.opcode}
      and any(s.size == weight.size and len(s.dims) > 1 for s in _result(user))
    )

  def follow(within: Computation, name: str, weight: Shape) -> None:
    for place, user, _, _ in _uses(module, within, name):
      layouts = {shape.minor_to_major for shape in _result(user)}
      if user.opcode in _PREFETCHES and layouts == {weight.minor_to_major}:
        follow(place, user.name, weight)
      elif place.name in inside and is_copy(user, weight):
        found[user.name] = user

  for parameter in parameters(module).values():
    if _is_weight(parameter.shapes[0]):
      follow(module.computations[module.entry], parameter.name, parameter.shapes[0])
  return list(found.values())


def _is_weight(shape: Shape) -> bool:
  return len(shape.dims) > 1 and shape.size >= MIN_WEIGHT


def count(module: Module, computation: str, opcode: str, path: str = '') -> int:
  """How many instructions of a kind one run executes, those in fusions included.

  Args:
    module: the program.
    computation: what runs.
    opcode: the kind.
    path: a part of the JAX operation's path.
  """
  return sum(
    times
    for instruction, _, times in module.walk(computation, into_fusions=True)
    if instruction.opcode == opcode and path in instruction.op_name
  )


def cycles(module: Module, computation: str) -> int:
  """The TPU compiler's own estimate of one run, in cycles; 0 where it gives none.

  Of a conditional's branches the cheapest counts, as for `traffic`.
  """
  total = 0
  for instruction in module.computations[computation].instructions.values():
    estimate = re.search(r'"estimated_cycles":"(\d+)"', instruction.rest)
    total += int(estimate[1]) if estimate else 0
    if instruction.opcode == 'while':
      loop = module.loop(instruction)
      total += (1 if loop.trips is None else loop.trips) * cycles(module, loop.body)
    elif instruction.opcode in ('conditional', 'call'):
      total += min(cycles(module, name) for name in instruction.callees)
  return total


def _is_free(instruction: Instruction) -> bool:
  return instruction.opcode in _FREE or 'ConcatBitcast' in instruction.rest


def _in_main(shapes: tuple[Shape, ...]) -> int:
  return sum(shape.nbytes for shape in shapes if shape.space == 0)


def _result(instruction: Instruction) -> tuple[Shape, ...]:
  """What it computes, less the bookkeeping of asynchronous starts."""
  shapes, count = instruction.shapes, len(instruction.operands)
  if instruction.opcode == 'slice-start':
    return shapes[1:2]
  if instruction.opcode in ('copy-start', 'send', 'recv'):
    return shapes[:1]
  if instruction.opcode in ('all-gather-start', 'collective-permute-start'):
    return shapes[count : 2 * count]
  return shapes


def _bytes_read(
  module: Module, within: Computation, user: Instruction, operand: str
) -> int:
  """What `user` reads of an operand in main memory."""
  whole = _in_main(within.instructions[operand].shapes)
  is_first = operand == user.operands[0]
  if whole == 0 or (user.opcode in _UPDATES and is_first):
    return 0
  if user.opcode in _SLICES and is_first:
    return min(whole, sum(shape.nbytes for shape in _result(user)))
  if user.opcode != 'fusion':
    return whole
  inner = module.computations[user.callees[0]]
  parameter = inner.parameter(user.operands.index(operand)).name
  users = inner.users.get(parameter, [])
  if users and all(inside.opcode in _SLICES | _UPDATES for inside in users):
    parts = (_bytes_read(module, inner, inside, parameter) for inside in users)
    return min(whole, sum(parts))
  return whole


def _bytes_written(module: Module, within: Computation, user: Instruction) -> int:
  if user.opcode in _UPDATES:
    return min(_in_main(user.shapes), _update_bytes(within, user))
  if user.opcode != 'fusion':
    return _in_main(_result(user))
  inner = module.computations[user.callees[0]]
  results = inner.root.operands if inner.root.opcode == 'tuple' else [inner.root.name]
  total = 0
  for name, shape in zip(results, user.shapes, strict=False):
    result = inner.instructions[name]
    while result.opcode == 'bitcast':
      result = inner.instructions[result.operands[0]]
    is_update = result.opcode in _UPDATES
    nbytes = _update_bytes(inner, result) if is_update else shape.nbytes
    total += min(shape.nbytes, nbytes) if shape.space == 0 else 0
  return total


def _update_bytes(within: Computation, update: Instruction) -> int:
  place = 1 if update.opcode == 'dynamic-update-slice' else 2
  return within.instructions[update.operands[place]].shapes[0].nbytes


def _uses(
  module: Module, within: Computation, name: str, times: int = 1
) -> Iterator[tuple[Computation, Instruction, str, int]]:
  """Follows a value through tuples, loops and calls to what computes with it.

  Yields:
    (computation, user, the value's name there, times).
  """
  for user in within.users.get(name, []):
    if user.opcode in _NAMES or 'ConcatBitcast' in user.rest:
      yield from _uses(module, within, user.name, times)
    elif user.opcode == 'tuple':
      for place, operand in enumerate(user.operands):
        if operand == name:
          yield from _tuple_uses(module, within, user.name, place, times)
    elif user.opcode in ('call', 'async-start'):
      inner = module.computations[user.callees[0]]
      parameter = inner.parameter(user.operands.index(name))
      yield from _uses(module, inner, parameter.name, times)
    elif not _is_free(user):
      yield within, user, name, times


def _tuple_uses(
  module: Module, within: Computation, name: str, place: int, times: int
) -> Iterator[tuple[Computation, Instruction, str, int]]:
  for user in within.users.get(name, []):
    if user.opcode == 'while':
      loop = module.loop(user)
      receivers, count = [loop.body], 1 if loop.trips is None else loop.trips
    elif user.opcode == 'conditional':
      branches = zip(user.operands[1:], user.callees, strict=True)
      receivers, count = [branch for given, branch in branches if given == name], 1
    else:
      receivers, count = [], 0
    for receiver in receivers:
      inner = module.computations[receiver]
      for element in inner.users.get(inner.parameter(0).name, []):
        if element.opcode == 'get-tuple-element' and element.number == place:
          yield from _uses(module, inner, element.name, times * count)


def _group_size(rest: str) -> int:
  """From a list of groups, from their number and size, or from a mesh's axes."""
  listed = re.search(r'replica_groups=\{\{([\d,]+)\}', rest)
  if listed:
    return len(listed[1].split(','))
  table = re.search(r'replica_groups=\[\d+,(\d+)\]', rest)
  if table:
    return int(table[1])
  mesh = re.search(r'replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}', rest)
  if mesh is None:
    return 0
  sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
  return math.prod(int(sizes[axis]) for axis in re.findall(r'\w+', mesh[2]))
