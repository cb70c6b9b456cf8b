"""Several processes that run one program: joining them, and reading what they made.

On a TPU slice each host runs the same command. All read the same texts and make the
same batches; each transfers the rows of its own devices; the decoded rows are
gathered, and process 0 alone prints and writes.
"""

import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from specjax.core.types import PyTree

_ENVIRONMENT = {
  'coordinator_address': 'JAX_COORDINATOR_ADDRESS',
  'num_processes': 'JAX_NUM_PROCESSES',
  'process_id': 'JAX_PROCESS_ID',
}
_FAILED = 2
# JAX aborts with a stack trace when its own time is over; ours is over before.
_GRACE_SECONDS = 60


def initialize(
  coordinator_address: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  *,
  timeout: int = 300,
) -> None:
  """Joins the other processes; before anything else asks JAX for a device.

  What is not given is looked up in JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
  JAX_PROCESS_ID. If none of the three is known, JAX finds the processes of a TPU
  slice, a Slurm or an Open MPI job.

  Args:
    coordinator_address: host:port of process 0, where it listens.
    num_processes: of all hosts together.
    process_id: from 0.
    timeout: seconds to wait for the others; then the process says so in one line
      and ends with exit code 2, since the waiting can not be interrupted.

  Raises:
    ValueError: some of the three are missing or wrong, or no processes are found.
  """
  given = {
    'coordinator_address': coordinator_address,
    'num_processes': num_processes,
    'process_id': process_id,
  }
  for name, variable in _ENVIRONMENT.items():
    if given[name] is None and variable in os.environ:
      given[name] = os.environ[variable]
  missing = [name for name, value in given.items() if value is None]
  if 0 < len(missing) < len(given):
    raise ValueError(
      f'{missing[0]}: missing; give all of {", ".join(given)}, or none on a TPU slice'
    )
  arguments = {} if missing else _checked(**given)
  where = f' at {arguments["coordinator_address"]}' if arguments else ''
  waits = threading.Timer(timeout, _give_up, (timeout, where))
  waits.daemon = True
  waits.start()
  try:
    jax.distributed.initialize(
      **arguments, initialization_timeout=timeout + _GRACE_SECONDS
    )
  except (ValueError, RuntimeError, OSError, ImportError) as error:
    if arguments:
      raise ValueError(f'coordinator_address: {_first_line(error)}') from error
    raise ValueError(
      'multi_host: no TPU slice, Slurm or Open MPI job is found here '
      f'({_first_line(error)}{_tpu_variables(error)}); give --coordinator_address, '
      '--num_processes and --process_id, or leave --multi_host out'
    ) from error
  finally:
    waits.cancel()


def is_main() -> bool:
  """Whether this process prints and writes."""
  return jax.process_index() == 0


@contextlib.contextmanager
def only_main_speaks() -> Iterator[None]:
  """Sends what other processes print nowhere; their exceptions pass."""
  if is_main():
    yield
    return
  with (
    open(os.devnull, 'w', encoding='utf-8') as nowhere,
    contextlib.redirect_stdout(nowhere),
    contextlib.redirect_stderr(nowhere),
  ):
    yield


def check_equal(field: str, value: object) -> None:
  """Compares a value among processes, which would wait for each other for ever.

  Raises:
    ValueError: the processes have different values (compared by `repr`).
  """
  if jax.process_count() == 1:
    return
  digest = hashlib.sha256(repr(value).encode()).digest()
  ours = np.frombuffer(digest, np.uint32)
  all_of_them = multihost_utils.process_allgather(ours)
  if not (all_of_them == ours[None]).all():
    raise ValueError(
      f'{field}: differs between the processes; give all of them the same command and '
      'the same files'
    )


def to_host(tree: PyTree) -> PyTree:
  """NumPy arrays of a tree, whole in every process."""
  leaves = jax.tree.leaves(tree)
  if all(not isinstance(x, jax.Array) or x.is_fully_addressable for x in leaves):
    return jax.device_get(tree)
  return multihost_utils.process_allgather(tree, tiled=True)


def _checked(coordinator_address, num_processes, process_id) -> dict:
  host, _, port = str(coordinator_address).rpartition(':')
  if not host or not port.isdigit():
    raise ValueError(
      f'coordinator_address: {coordinator_address!r}; give host:port of process 0'
    )
  try:
    count, index = int(num_processes), int(process_id)
  except ValueError as error:
    raise ValueError(f'num_processes, process_id: {error}; give integers') from error
  if count < 1:
    raise ValueError(f'num_processes: {count}; give 1 or more')
  if not 0 <= index < count:
    raise ValueError(f'process_id: {index}; give 0 to {count - 1}, each to one process')
  return {
    'coordinator_address': str(coordinator_address),
    'num_processes': count,
    'process_id': index,
  }


def _give_up(timeout: int, where: str) -> None:
  print(
    f'specjax: multi_host: the processes did not meet{where} within {timeout} s; '
    'start all of them with the same command, check that process 0 can be reached, '
    'or give a longer --join_seconds',
    file=sys.stderr,
    flush=True,
  )
  os._exit(_FAILED)


def _tpu_variables(error: Exception) -> str:
  """Says which variables look like a TPU's, where JAX finds none."""
  names = ('TPU_WORKER_HOSTNAMES', 'TPU_NAME', 'CLOUD_TPU_TASK_ID', 'TPU_WORKER_ID')
  found = [name for name in names if name in os.environ]
  reason = f'; {", ".join(found)} set, but no TPU is attached'
  return '' if isinstance(error, ImportError) or not found else reason


def _first_line(error: Exception) -> str:
  return str(error).partition('\n')[0].rstrip('.')
