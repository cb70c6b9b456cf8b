"""A compiled program, read off its text.

XLA prints a compiled module as computations of named instructions, with the shapes,
layouts and memory spaces that it chose. `hlo_facts` draws conclusions from them.

  module = hlo.parse(compiled.as_text())
  hlo_facts.traffic(module, hlo.data_loop(module).body)
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_ITEM_BITS = {'pred': 8, 's4': 4, 'u4': 4}
_HEADER = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\{$')
_ASSIGNMENT = re.compile(r'\s+(ROOT )?%?([\w.\-]+) = ')
_BRANCHES = ('branch_computations', 'true_computation', 'false_computation')
# The functions of these are scalar arithmetic.
_ELEMENTWISE = frozenset({
  'reduce', 'reduce-window', 'scatter', 'sort', 'map', 'select-and-scatter',
  'all-reduce', 'all-reduce-start', 'reduce-scatter',
})  # fmt: skip


class Shape(NamedTuple):
  """An array's type.

  Attributes:
    dtype: XLA's name, such as 'bf16'.
    dims: sizes.
    minor_to_major: order of the axes in memory, fastest first.
    tile: sizes that the fastest axes are padded to, slowest first; TPUs only.
    space: memory space: 0 is main memory, 5 the host's, others are scratchpads.
  """

  dtype: str
  dims: tuple[int, ...]
  minor_to_major: tuple[int, ...] = ()
  tile: tuple[int, ...] = ()
  space: int = 0

  @property
  def size(self) -> int:
    """Elements, padding excluded."""
    return math.prod(self.dims)

  @property
  def nbytes(self) -> int:
    """Bytes, the padding of tiles included."""
    dims = [self.dims[axis] for axis in self.minor_to_major] or list(self.dims)
    for place, multiple in enumerate(reversed(self.tile[: len(dims)])):
      dims[place] = -(-dims[place] // multiple) * multiple
    digits = re.search(r'\d+', self.dtype)
    bits = _ITEM_BITS.get(self.dtype, int(digits[0]) if digits else 0)
    return math.prod(dims) * bits // 8


class Instruction(NamedTuple):
  """One line of a computation.

  Attributes:
    name: unique in the module.
    opcode: such as 'fusion'.
    shapes: the arrays of its result, a tuple's flattened.
    operands: names; of a parameter its number, of a constant its value.
    rest: the attributes as text.
  """

  name: str
  opcode: str
  shapes: tuple[Shape, ...]
  operands: tuple[str, ...]
  rest: str

  def called(self, *attributes: str) -> list[str]:
    """Names of the computations in attributes such as 'body'."""
    found = []
    for attribute in attributes:
      match = re.search(rf'\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)', self.rest)
      found += re.findall(r'[\w.\-]+', match[1]) if match else []
    return found

  @property
  def callees(self) -> list[str]:
    """Computations that run when it does, but for loops and scalar functions."""
    if self.opcode in _ELEMENTWISE:
      return []
    return self.called('calls', 'to_apply', *_BRANCHES)

  @property
  def op_name(self) -> str:
    """The path of the JAX operation that it comes from; '' if unknown."""
    match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
    return match[1].replace("\\'", "'") if match else ''

  @property
  def number(self) -> int:
    """Of a parameter or a tuple's element."""
    match = re.search(r'\bindex=(\d+)', self.rest)
    return int(match[1]) if match else int(self.operands[0])


class Computation(NamedTuple):
  """A list of instructions.

  Attributes:
    name: unique in the module.
    instructions: by name, in order of execution.
    root: the one whose result is the computation's.
    users: by name, the instructions that use a result.
  """

  name: str
  instructions: Mapping[str, Instruction]
  root: Instruction
  users: Mapping[str, list[Instruction]]

  def parameter(self, number: int) -> Instruction:
    """The parameter of that number."""
    every = self.instructions.values()
    return next(i for i in every if i.opcode == 'parameter' and i.number == number)

  @property
  def opcodes(self) -> set[str]:
    return {instruction.opcode for instruction in self.instructions.values()}


class Loop(NamedTuple):
  """A while loop.

  Attributes:
    name: of its instruction.
    body: name of a computation.
    condition: likewise.
    trips: iterations, or None when data decide.
  """

  name: str
  body: str
  condition: str
  trips: int | None


class Module(NamedTuple):
  """A compiled program.

  Attributes:
    computations: by name.
    entry: name of the one that runs.
    aliases: results that are written over an argument: (result, argument) numbers.
  """

  computations: Mapping[str, Computation]
  entry: str
  aliases: tuple[tuple[int, int], ...]

  def loop(self, instruction: Instruction) -> Loop:
    """What a 'while' instruction says."""
    (body,), (condition,) = instruction.called('body'), instruction.called('condition')
    trips = _trips(instruction, self.computations[condition])
    return Loop(instruction.name, body, condition, trips)

  def walk(self, computation: str, times: int = 1, *, into_fusions: bool = False):
    """Yields (instruction, its computation, times) for all that one run executes.

    Inner loops multiply `times`, loops of unknown length count once, and every
    branch of a conditional counts.

    Args:
      computation: name.
      times: of the run.
      into_fusions: whether a fusion's parts follow it.
    """
    within = self.computations[computation]
    for instruction in within.instructions.values():
      yield instruction, within, times
      if instruction.opcode == 'while':
        loop = self.loop(instruction)
        count = times * (1 if loop.trips is None else loop.trips)
        for name in (loop.body, loop.condition):
          yield from self.walk(name, count, into_fusions=into_fusions)
      elif instruction.opcode != 'fusion' or into_fusions:
        for name in instruction.callees:
          yield from self.walk(name, times, into_fusions=into_fusions)


def parse(text: str) -> Module:
  """Reads `compiled.as_text()`.

  Raises:
    ValueError: no module in the text.
  """
  lines = text.splitlines()
  if not lines or not lines[0].startswith('HloModule'):
    raise ValueError(f'hlo: {text[:40]!r}; give the text of a compiled module')
  pairs = re.findall(r'\{(\d*)\}: \((\d+), \{\}, \w+-alias\)', lines[0])
  computations: dict[str, Computation] = {}
  entry = name = ''
  body: list[Instruction] = []
  root = None
  for line in lines:
    if header := _HEADER.match(line):
      name, body, root = header[2], [], None
      entry = name if header[1] else entry
    elif line.startswith('}') and body:
      computations[name] = _computation(name, body, root or body[-1])
    elif match := _ASSIGNMENT.match(line):
      body.append(_instruction(match[2], line[match.end() :]))
      root = body[-1] if match[1] else root
  return Module(computations, entry, tuple((int(a or 0), int(b)) for a, b in pairs))


def data_loop(module: Module) -> Loop:
  """The outermost loop that ends when the data say so: the decode loop.

  Raises:
    ValueError: there is none, or several.
  """
  entry = module.computations[module.entry]
  found = [module.loop(i) for i in entry.instructions.values() if i.opcode == 'while']
  found = [loop for loop in found if loop.trips is None]
  if len(found) != 1:
    raise ValueError(f'hlo: {len(found)} loops that data end; one is needed')
  return found[0]


def parameters(module: Module, prefix: str = 'params') -> dict[str, Instruction]:
  """The arguments below a name of the Python function, by their paths."""
  return {
    instruction.op_name: instruction
    for instruction in module.computations[module.entry].instructions.values()
    if instruction.opcode == 'parameter' and instruction.op_name.startswith(prefix)
  }


def _trips(loop: Instruction, condition: Computation) -> int | None:
  """Iterations, if the condition counts up to a constant (from 0, as XLA's do)."""
  known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest)
  if known:
    return int(known[1])
  root = condition.root
  if root.opcode != 'compare' or 'direction=LT' not in root.rest:
    return None
  count, limit = (condition.instructions[name] for name in root.operands)
  counts = count.opcode == 'get-tuple-element' and limit.opcode == 'constant'
  return int(limit.operands[0]) if counts else None


def _computation(name: str, body: list[Instruction], root: Instruction) -> Computation:
  users: dict[str, list[Instruction]] = {}
  for instruction in body:
    for operand in dict.fromkeys(instruction.operands):
      users.setdefault(operand, []).append(instruction)
  return Computation(name, {i.name: i for i in body}, root, users)


def _instruction(name: str, text: str) -> Instruction:
  end = _matching(text, 0) if text[0] == '(' else text.index(' ')
  types, text = text[:end], text[end:].lstrip()
  opcode, _, _ = text.partition('(')
  end = _matching(text, len(opcode))
  inside = text[len(opcode) + 1 : end - 1]
  is_leaf = opcode in ('parameter', 'constant')
  operands = (inside,) if is_leaf else tuple(re.findall(r'%([\w.\-]+)', inside))
  return Instruction(name, opcode, tuple(_shapes(types)), operands, text[end:])


def _matching(text: str, start: int) -> int:
  """The place after the bracket that closes the one at `start`."""
  depth = 0
  for match in re.compile(r'[()]').finditer(text, start):
    depth += 1 if match[0] == '(' else -1
    if depth == 0:
      return match.end()
  raise ValueError(f'hlo: unclosed bracket in {text[:60]!r}')


def _shapes(types: str) -> Iterator[Shape]:
  for dtype, dims, layout in re.findall(r'(\w+)\[([\d,]*)\](?:\{([^}]*)\})?', types):
    order, _, rest = layout.partition(':')
    tile = re.search(r'T\(([\d,]+)\)', rest)
    space = re.search(r'S\((\d+)\)', rest)
    yield Shape(
      dtype,
      _numbers(dims),
      _numbers(order),
      _numbers(tile[1]) if tile else (),
      int(space[1]) if space else 0,
    )


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(int(number) for number in text.split(',') if number)
