"""The notebooks, without running them: `.ci/run` does that (`colab/execute.py`)."""

import ast
import importlib
import importlib.util
import json
import pathlib
import re

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / 'colab'
PATHS = sorted(FOLDER.glob('*.ipynb'))
NAMES = {
  'bring_your_own_t5', 'exactness', 'gamma_and_alpha', 'quickstart', 'tpu_aot'
}  # fmt: skip
MAX_BYTES = 300_000
# Folders of somebody's machine, and hosts of packages.
PRIVATE = re.compile(r'/(home|root|work|tmp|Users|mnt|opt)/|pypi|index-url|localhost:')


def read(path):
  return json.loads(path.read_text(encoding='utf-8'))


def code(notebook):
  """Sources of the code cells as Python: lines of the shell and magics pass."""
  for cell in notebook['cells']:
    if cell['cell_type'] == 'code':
      yield re.sub(r'^(\s*)[!%].*$', r'\1pass', ''.join(cell['source']), flags=re.M)


def modules(tree):
  """name -> module, and the missing ones, of what is imported from specjax."""
  found, missing = {}, []
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        if alias.name.split('.')[0] == 'specjax':
          found[alias.name] = importlib.import_module(alias.name)
    elif isinstance(node, ast.ImportFrom) and node.module.startswith('specjax'):
      for alias in node.names:
        try:
          parent = importlib.import_module(node.module)
          is_there = hasattr(parent, alias.name)
          found[alias.asname or alias.name] = (
            getattr(parent, alias.name)
            if is_there
            else importlib.import_module(f'{node.module}.{alias.name}')
          )
        except ImportError:
          missing.append(f'{node.module}.{alias.name}')
  return found, missing


def unknown_names(source):
  """Everything of specjax that a program uses and that is not there."""
  tree = ast.parse(source)
  found, missing = modules(tree)
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
      owner = found.get(node.value.id)
      is_ours = getattr(owner, '__name__', '').startswith('specjax')
      if owner is not None and is_ours and not hasattr(owner, node.attr):
        missing.append(f'{node.value.id}.{node.attr}')
  return missing


def test_all_are_there():
  assert {path.stem for path in PATHS} == NAMES


def test_unknown_names_are_found():
  program = (
    'import specjax\nfrom specjax.eval import theory, nothing\n'
    'specjax.load_pair()\nspecjax.lode_pair()\ntheory.speedup(1, 2, 3)\ntheory.slow()\n'
  )
  assert sorted(unknown_names(program)) == [
    'specjax.eval.nothing', 'specjax.lode_pair', 'theory.slow'
  ]  # fmt: skip


@pytest.mark.parametrize('path', PATHS, ids=lambda path: path.stem)
def test_notebook_is_fit_to_be_published(path):
  text = path.read_text(encoding='utf-8')
  notebook = json.loads(text)
  assert (notebook['nbformat'], notebook['nbformat_minor']) >= (4, 5)
  assert notebook['metadata']['kernelspec']['name'] == 'python3'
  assert notebook['metadata']['language_info'] == {'name': 'python'}
  assert len(text.encode()) < MAX_BYTES
  assert not PRIVATE.search(text), PRIVATE.search(text)
  identifiers = [cell['id'] for cell in notebook['cells']]
  assert len({*identifiers}) == len(identifiers)
  assert notebook['cells'][0]['cell_type'] == 'markdown'
  has_output = False
  for cell in notebook['cells']:
    for output in cell.get('outputs', ()):
      has_output = True
      assert output['output_type'] != 'error'
      assert output.get('name') != 'stderr', output['text']
  assert has_output  # it is to be read on the web, too


def test_all_begin_with_the_same_installation():
  first = {next(code(read(path))) for path in PATHS}
  assert len(first) == 1
  assert "find_spec('specjax') is None" in first.pop()


@pytest.mark.parametrize('path', PATHS, ids=lambda path: path.stem)
def test_cells_compile_and_name_what_exists(path):
  cells = list(code(read(path)))
  assert len(cells) >= 5
  for number, source in enumerate(cells):
    compile(source, f'{path.name}, code cell {number}', 'exec')
  assert unknown_names('\n'.join(cells)) == []
  commands = re.findall(r'python -m (specjax[.\w]*)', path.read_text(encoding='utf-8'))
  for module in commands:
    assert importlib.util.find_spec(module) is not None, module
