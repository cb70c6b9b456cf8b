"""experiments/README.md names every experiment, and every README its command."""

import pathlib
import re

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / 'experiments'
READMES = sorted(FOLDER.glob('*/README.md'))
INDEX = (FOLDER / 'README.md').read_text()


def test_every_experiment_is_in_the_index():
  linked = re.findall(r'^\| \[\w+\]\((\w+)/\) \|', INDEX, re.MULTILINE)
  assert linked == sorted(set(linked), key=linked.index)
  assert sorted(linked) == [path.parent.name for path in READMES]


@pytest.mark.parametrize('path', READMES, ids=lambda path: path.parent.name)
def test_a_readme_has_its_command_and_pictures(path):
  text, name = path.read_text(), path.parent.name
  assert text.startswith('# ')
  assert f'python -m experiments.{name}' in text
  for picture in re.findall(r'!\[.+?\]\((.+?)\)', text):
    assert (path.parent / picture).is_file()
