"""The architecture, read off the imports.

Layers: 0 `shapes, config, config_files` -> 1 `core` -> 2 `drafters, models, tree,
parallel` (not each other) -> 3 `checkpoints, data, interop, train, eval` -> 4 all
others.
"""

import ast
import pathlib
import subprocess
import sys

import pytest

import specjax

ROOT = pathlib.Path(specjax.__file__).parent
LAYER = {
  'shapes': 0,
  'config': 0,
  'config_files': 0,
  'core': 1,
  'drafters': 2,
  'models': 2,
  'tree': 2,
  'parallel': 2,
  'checkpoints': 3,
  'data': 3,
  'interop': 3,
  'train': 3,
  'eval': 3,
}
TOP = 4
CORE_MAY_IMPORT = {'jax', 'numpy', 'jaxtyping', 'specjax'} | set(
  sys.stdlib_module_names
)


def _imports(path):
  """Yields the dotted names that a file imports, at any depth of the code."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: relative import'
      yield node.module
      yield from (f'{node.module}.{alias.name}' for alias in node.names)


def _room(dotted):
  """The room of a dotted name below specjax: `specjax.core.loop` -> `core`."""
  parts = dotted.split('.')
  return parts[1] if len(parts) > 1 else None


FILES = sorted(ROOT.rglob('*.py'))


def _room_of(path):
  return path.relative_to(ROOT).with_suffix('').parts[0]


def breaches(files, root=ROOT):
  """Every import that goes up, or sideways between the rooms of layer 2."""
  found = []
  for path in files:
    room = path.relative_to(root).with_suffix('').parts[0]
    if room == '__init__':
      continue
    layer = LAYER.get(room, TOP)
    for name in _imports(path):
      if not name.startswith('specjax.'):
        continue
      other = _room(name)
      if other == room or not _exists(root, other):
        continue
      other_layer = LAYER.get(other, TOP)
      sideways = other_layer == layer == 2
      if other_layer > layer or sideways:
        found.append(f'{path.relative_to(root)}: imports {name}')
  return found


def _exists(root, room):
  return (root / room).is_dir() or (root / f'{room}.py').is_file()


def test_imports_go_down():
  assert len(FILES) > 20
  assert breaches(FILES) == []


def test_a_breach_is_found(tmp_path):
  for room in ('core', 'drafters', 'models', 'run'):
    (tmp_path / room).mkdir()
  up, sideways, down = (
    tmp_path / 'core' / 'x.py', tmp_path / 'models' / 'x.py', tmp_path / 'run' / 'x.py'
  )  # fmt: skip
  up.write_text('def f():\n  from specjax.models import t5\n')
  sideways.write_text('import specjax.drafters.ngram\n')
  down.write_text('from specjax.core import loop\n')
  found = breaches([up, sideways, down], tmp_path)
  assert {line.split(':')[0] for line in found} == {'core/x.py', 'models/x.py'}


@pytest.mark.parametrize(
  'path', sorted((ROOT / 'core').glob('*.py')), ids=lambda p: p.stem
)
def test_core_is_pure(path):
  """jax and numpy only, and not a word about a kind of model."""
  assert {name.split('.')[0] for name in _imports(path)} <= CORE_MAY_IMPORT
  assert 'isinstance' not in path.read_text()


def test_sizes():
  """core under 600 lines without docstrings and comments; no file over 400."""

  def code_lines(path):
    tree = ast.parse(path.read_text())
    return len(ast.unparse(_without_docstrings(tree)).splitlines())

  assert sum(code_lines(p) for p in (ROOT / 'core').glob('*.py')) < 600
  too_long = [
    str(p.relative_to(ROOT)) for p in FILES if len(p.read_text().splitlines()) > 400
  ]
  assert too_long == []
  assert len((ROOT / 'run.py').read_text().splitlines()) < 100


def _without_docstrings(tree):
  for node in ast.walk(tree):
    body = getattr(node, 'body', None)
    first = body[0] if isinstance(body, list) and body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
      node.body = body[1:] or [ast.Pass()]
  return tree


def test_import_touches_no_backend_and_needs_no_framework():
  program = (
    'import sys, specjax\n'
    'names = [name for name in dir(specjax) if not name.startswith("_")]\n'
    '[getattr(specjax, name) for name in names]\n'
    'from jax._src import xla_bridge\n'
    'assert not xla_bridge.backends_are_initialized(), "backend"\n'
    'heavy = {"tensorflow", "torch", "seqio", "t5x", "transformers"}\n'
    'assert not heavy & set(sys.modules), heavy & set(sys.modules)\n'
    'print(len(names))\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', program], capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  assert 5 < int(done.stdout) < 40
