"""The command line: `RunConfig` from arguments, and errors in one line."""

import ast
import contextlib
import dataclasses
import io
import os
import re
import sys
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import tyro

from specjax import config as config_lib
from specjax import config_files
from specjax.config import RunConfig

PROG = 'python -m specjax.run'
USAGE_ERROR = 2
DESCRIPTION = """Exact speculative decoding of T5 pairs: a draft proposes tokens,
the target verifies them in one pass, and the output has exactly the target's law.

Without --prompt or --input: a demonstration on the embedded pair."""


@dataclasses.dataclass(frozen=True)
class _CommandLine(RunConfig):
  config: Annotated[
    str | None,
    tyro.conf.arg(
      metavar='FILE',
      help='A Python file with a RunConfig named CONFIG, FILE/NAME for one of its '
      'CONFIGS, or a shipped one: '
      f'{", ".join(config_files.shipped_configs())} (paper/ende_small_t0@v4). The '
      'other options override it.',
    ),
  ] = None


def parse(argv: Sequence[str]) -> RunConfig:
  """Arguments -> configuration: `--config` first, then the other options.

  Raises:
    ValueError: an unknown option (near names are given) or a bad value.
    SystemExit: after `--help`.
  """
  name = config_name(argv)
  base = RunConfig() if name is None else config_files.load_config(name)
  parsed = read(argv, _CommandLine(**_fields(base), config=name), PROG, DESCRIPTION)
  config = RunConfig(**_fields(parsed))
  settled = config.speculation.within(config.sampling.max_new_tokens)
  return dataclasses.replace(config, speculation=settled)


def read(argv: Sequence[str], default: Any, prog: str, description: str) -> Any:
  """Arguments -> a dataclass of the type of `default`, whose fields they override.

  Raises:
    ValueError: an unknown option (near names are given) or a bad value.
    SystemExit: after `--help`.
  """
  flat: Any = tyro.conf.OmitArgPrefixes
  errors = io.StringIO()
  try:
    with contextlib.redirect_stderr(errors), _wide(not {'-h', '--help'} & {*argv}):
      return tyro.cli(
        flat[type(default)],
        prog=prog,
        description=description,
        args=[*argv],
        default=default,
        use_underscores=True,
      )
  except SystemExit as exit_:
    if not exit_.code:
      raise
    raise ValueError(_reason(argv, errors.getvalue(), type(default), prog)) from None


def option_names(cls: type = RunConfig) -> list[str]:
  """Every `--option`, aliases included."""
  return sorted({'--help', '--config', *_options(cls)})


def fail(error: Exception, argv: Sequence[str] = (), cls: type = RunConfig) -> int:
  """Says what is wrong in one line on stderr; returns the exit code.

  A message that begins with a field names the option of `cls` that was typed for it.
  """
  message = ' '.join(str(error).split())
  field, colon, rest = message.partition(':')
  if colon:
    message = f'{typed(argv, cls).get(field, field)}:{rest}'
  print('specjax:', message, file=sys.stderr)
  return USAGE_ERROR


def typed(argv: Sequence[str], cls: type = RunConfig) -> dict[str, str]:
  """The fields that arguments set, and the name that each was given there."""
  fields = dict(_names(cls))
  names = [each.partition('=')[0][2:] for each in argv if each.startswith('--')]
  names = [name.replace('-', '_') for name in names]
  return {fields[name]: name for name in names if name in fields}


def config_name(argv: Sequence[str]) -> str | None:
  """The value of --config, which decides the other options' defaults."""
  for argument, following in zip(argv, [*argv[1:], ''], strict=False):
    option, has_value, value = argument.partition('=')
    if option != '--config':
      continue
    name = value if has_value else following
    if not name:
      raise ValueError('--config: no name; give a file or a shipped configuration')
    return name
  return None


def _fields(config: RunConfig) -> dict[str, Any]:
  return {
    field.name: getattr(config, field.name) for field in dataclasses.fields(RunConfig)
  }


def _options(cls: type) -> Iterator[str]:
  return (f'--{option}' for option, _ in _names(cls))


def _names(cls: type) -> Iterator[tuple[str, str]]:
  """(option, field), aliases included."""
  for name, hint in typing.get_type_hints(cls, include_extras=True).items():
    if dataclasses.is_dataclass(hint):
      yield from _names(typing.cast(type, hint))
      continue
    yield name, name
    if hint is bool:
      yield f'no_{name}', name
    for note in getattr(hint, '__metadata__', ()):
      for alias in getattr(note, 'aliases', None) or ():
        yield alias.removeprefix('--'), name


def _reason(argv: Sequence[str], box: str, cls: type, prog: str) -> str:
  """One line for tyro's box of many."""
  names = option_names(cls)
  known = {name.replace('_', '-') for name in names}
  for argument in argv:
    option = argument.partition('=')[0]
    if option.startswith('--') and option.replace('_', '-') not in known:
      return f'{option}: unknown option; {config_lib.suggest(option, names)}'
  lines = []
  for line in box.splitlines()[1:]:
    line = line.strip('│ ')
    if line.strip('─╭╮╰╯- '):
      lines.append(line)
    elif lines:  # where the encoding is ASCII, the title has a rule as well
      break
  reason = ' '.join(lines).replace('{None}|', '')  # said by leaving the option out
  union = re.search(r"--(\w+): no type matching (\S+) .* from \['(.*)'\]", reason)
  if union:
    field, kinds, value = union.groups()
    return f'{field}: {value!r}; give {re.sub("[{}]", "", kinds).replace("|", " or ")}'
  choice = re.match(r"invalid choice '(.*)' for argument '--(\w+)'.*(\(.*\))", reason)
  if choice:
    value, field, choices = choice.groups()
    suggestion = config_lib.suggest(value, ast.literal_eval(choices))
    return f'{field}: {value!r} is unknown; {suggestion}'
  # Checks of our own name the field and the remedy already.
  reason, is_own = re.subn(r'^Error parsing [A-Za-z_.]+: ', '', reason)
  reason = re.sub(r'^Error parsing (?:--\w+/)*', '', reason)
  return reason if is_own else f'{reason.rstrip(".")}; see {prog} --help'


@contextlib.contextmanager
def _wide(wide: bool) -> Iterator[None]:
  """Keeps tyro from breaking a message's words, which will be joined again."""
  if not wide:
    yield
    return
  columns = os.environ.get('COLUMNS')
  os.environ['COLUMNS'] = '10000'
  try:
    yield
  finally:
    if columns is None:
      del os.environ['COLUMNS']
    else:
      os.environ['COLUMNS'] = columns
