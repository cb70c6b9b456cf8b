"""Finds and reads configuration files: `--config NAME` or FILE."""

import difflib
import importlib.util
import re
from pathlib import Path
from typing import Any

from specjax.config import RunConfig, suggest


def load_config(name: str) -> RunConfig:
  """Reads a `RunConfig`.

  Args:
    name: a Python file that defines CONFIG, or the name of a shipped one, such
      as 'embedded'; 'paper/ende_small_t0@v4' is an entry of the CONFIGS of one.

  Returns:
    Its CONFIG, or that entry.

  Raises:
    ValueError: no such file or name (near names are given), the file fails, or
      its CONFIG is no `RunConfig`.
  """
  path = Path(name).expanduser()
  entry = ''
  if not path.is_file():
    shipped = shipped_configs()
    stem, _, entry = name.partition('/')
    if stem not in shipped:
      raise ValueError(
        f'config: {name!r} is neither a file nor a shipped configuration; '
        + suggest(stem, shipped)
      )
    path = shipped[stem]
  found = _execute(path)
  if entry or 'CONFIGS' in found:
    return _entry(path, found.get('CONFIGS', {}), entry)
  config = found.get('CONFIG')
  if not isinstance(config, RunConfig):
    raise ValueError(
      f'config: {path} defines no CONFIG of type RunConfig (found '
      f'{type(config).__name__}); see configs/embedded.py'
    )
  return config


def _entry(path: Path, configs: dict[str, RunConfig], name: str) -> RunConfig:
  if not configs:
    raise ValueError(f'config: {path} has no CONFIGS; give {path.stem} without /{name}')
  if name not in configs:
    near = difflib.get_close_matches(name, configs, n=3)
    remedy = f'did you mean {" or ".join(near)}?' if near else f'such as {min(configs)}'
    raise ValueError(
      f'config: {name!r} is none of the {len(configs)} in {path.stem}; give '
      f'{path.stem}/NAME, {remedy}'
    )
  return configs[name]


def shipped_configs() -> dict[str, Path]:
  """Names and files of the configurations of runs that come with specjax."""
  folder = Path(__file__).parent / 'configs'  # in a checkout a link to configs/
  return {
    path.stem: path
    for path in sorted(folder.glob('*.py'))
    if re.search(r'RunConfig|^CONFIGS', path.read_text(encoding='utf-8'), re.MULTILINE)
  }


def _execute(path: Path) -> dict[str, Any]:
  spec = importlib.util.spec_from_file_location(f'specjax_config_{path.stem}', path)
  if spec is None or spec.loader is None:
    raise ValueError(f'config: {path} is not a Python file (.py)')
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
  except Exception as error:
    reason = str(error).partition('\n')[0]
    raise ValueError(
      f'config: {path} fails with {type(error).__name__}: {reason}; correct the file'
    ) from error
  return vars(module)
