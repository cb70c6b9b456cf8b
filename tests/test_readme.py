"""What the README shows runs as it is written."""

import pathlib
import re

import pytest

README = (pathlib.Path(__file__).parent.parent / 'README.md').read_text()
PYTHON = re.findall(r'```python\n(.*?)```', README, re.DOTALL)


def test_there_are_examples():
  assert len(PYTHON) == 2


@pytest.mark.parametrize('block', PYTHON, ids=['pair', 'loop'])
def test_example_runs_and_prints(block, capsys):
  exec(block, {})
  assert capsys.readouterr().out.strip()
