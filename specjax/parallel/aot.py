"""Programs compiled ahead of time, for devices that need not be there.

  mesh = topology.make_mesh(topology.find('v4:1x1x1'), data=1, model=1)
  program = compile_program('step', step, arguments, placements(arguments, mesh))
  program.memory.total, hlo_facts.traffic(program.module, program.module.entry)

Parameters should lie as the program reads them. On TPUs the layouts that arrays
have by default make XLA transpose most of a T5's weights before a loop, and keep the
copies: `automatic` leaves the choice to the compiler, and `Program.formats` says how
it chose.
"""

import os
import pickle
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.experimental.layout import Format, Layout

from specjax.core.types import PyTree
from specjax.parallel import hlo

_FILE_KIND = 'specjax executable 1'
REMEDY = (
  'split the target among more chips (--mesh_model), take chips with more memory, or '
  'lower --batch_size'
)


class Memory(NamedTuple):
  """Main memory of one device while a program runs, in bytes, padding included."""

  arguments: int
  outputs: int
  temporaries: int
  aliased: int
  code: int

  @property
  def total(self) -> int:
    used = self.arguments + self.outputs + self.temporaries + self.code
    return used - self.aliased


class Program(NamedTuple):
  """A compiled function.

  Attributes:
    name: for people.
    compiled: JAX's; callable where its devices are.
    module: its text, read.
    memory: of one device.
    flops: as XLA counts them for one device: loops count once.
    seconds: lowering and compiling took.
  """

  name: str
  compiled: jax.stages.Compiled
  module: hlo.Module
  memory: Memory
  flops: float
  seconds: float

  @property
  def formats(self) -> PyTree:
    """Layouts and shardings that the positional arguments must have."""
    return self.compiled.input_formats[0]


def automatic(shardings: PyTree) -> PyTree:
  """Shardings with layouts that the compiler chooses."""
  return jax.tree.map(lambda sharding: Format(Layout.AUTO, sharding), shardings)


def compile_program(
  name: str,
  function: Callable[..., PyTree],
  arguments: tuple[PyTree, ...],
  in_shardings: tuple[PyTree, ...],
  *,
  out_shardings: PyTree = None,
  donate: tuple[int, ...] = (),
  options: Mapping[str, Any] | None = None,
) -> Program:
  """Compiles a function for the devices of its shardings; nothing runs.

  Args:
    name: for people.
    function: of positional arguments.
    arguments: `jax.ShapeDtypeStruct`s.
    in_shardings: `Sharding`s or `Format`s, one for each argument or subtree.
    out_shardings: likewise for the results; None: the compiler chooses.
    donate: numbers of arguments whose memory the results may take.
    options: for the compiler, by the names of XLA's flags.

  Raises:
    ValueError: it does not fit a device's memory; the message says by how much.
  """
  begin = time.perf_counter()
  jitted = jax.jit(
    function,
    in_shardings=in_shardings,
    donate_argnums=donate,
    **({} if out_shardings is None else {'out_shardings': out_shardings}),
  )
  lowered = jitted.lower(*arguments)
  try:
    compiled = lowered.compile(dict(options) if options else None)
  except jax.errors.JaxRuntimeError as error:
    raise without_room(name, error) from error
  found: Any = compiled.memory_analysis()
  memory = Memory(
    found.argument_size_in_bytes,
    found.output_size_in_bytes,
    found.temp_size_in_bytes,
    found.alias_size_in_bytes,
    found.generated_code_size_in_bytes,
  )
  flops = float((compiled.cost_analysis() or {}).get('flops', 0.0))
  module = hlo.parse(compiled.as_text() or '')
  seconds = time.perf_counter() - begin
  return Program(name, compiled, module, memory, flops, seconds)


def without_room(name: str, error: Exception) -> Exception:
  """XLA's error as a line of our own, if it is about memory."""
  sizes = re.search(r'([\d.]+)G\) exceeds available HBM \(([\d.]+)G', str(error))
  if sizes is None:
    return error
  needed, there = float(sizes[1]), float(sizes[2])
  return ValueError(
    f'{name} does not fit: it needs {needed} GiB of each device, which leaves programs '
    f'{there} GiB, about {round((needed - there) * 2**30)} bytes too few; {REMEDY}'
  )


def save(program: Program, path: str | Path, topology: str) -> None:
  """Writes a program to a file, whole or not at all.

  Args:
    program: of `compile_program`.
    path: a file, which is replaced.
    topology: what it was compiled for; `load` names it where it does not run.
  """
  path = Path(path)
  record = {
    'kind': _FILE_KIND,
    'topology': topology,
    'versions': versions(program.compiled),
    'devices': _devices(program.compiled),
    'executable': serialize_executable.serialize(program.compiled),
  }
  temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
  try:
    temporary.write_bytes(pickle.dumps(record))
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def load(path: str | Path) -> jax.stages.Compiled:
  """Reads a program that `save` wrote, onto this process's devices.

  Opening a file runs code that it holds: open only what you wrote.

  Args:
    path: the file.

  Returns:
    The compiled function; `input_formats` says how its arguments must lie.

  Raises:
    ValueError: no such file, another version of JAX or of the compiler than it was
      written with, or devices of another kind or number.
  """
  try:
    record = pickle.loads(Path(path).read_bytes())
  except (OSError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
    raise ValueError(f'executable: {path} can not be read ({error})') from error
  if not isinstance(record, dict) or record.get('kind') != _FILE_KIND:
    raise ValueError(f'executable: {path} is none of ours; write it with --serialize')
  kind, count = record['devices']
  here = jax.devices()
  if here[0].device_kind != kind or len(here) != count:
    raise ValueError(
      f'executable: {path} is for {record["topology"]}, {count} devices {kind!r}; here '
      f'are {len(here)} {here[0].device_kind!r}; compile with --topology for these'
    )
  found = _versions(here[0])
  for name, version in record['versions'].items():
    if found[name] != version:
      raise ValueError(
        f'executable: {path} was written with {name} {version!r}, here is '
        f'{found[name]!r}; install that version or compile anew'
      )
  return serialize_executable.deserialize_and_load(*record['executable'])


def _devices(compiled: jax.stages.Compiled) -> tuple[str, int]:
  devices = _device_list(compiled)
  return devices[0].device_kind, len(devices)


def versions(compiled: jax.stages.Compiled) -> dict[str, str]:
  """Of JAX and of the compiler that made a program."""
  return _versions(_device_list(compiled)[0])


def _versions(device: jax.Device) -> dict[str, str]:
  client: Any = device.client
  return {
    'jax': jax.__version__,
    'jaxlib': jaxlib.__version__,
    'compiler': client.platform_version,
  }


def _device_list(compiled: jax.stages.Compiled) -> list[jax.Device]:
  (formats, _) = compiled.input_formats
  leaf = jax.tree.leaves(formats)[0]
  return sorted(leaf.sharding.device_set, key=lambda device: device.id)
