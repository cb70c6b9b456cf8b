"""The example of docs/adding-a-drafter.md: it runs, it is exact, and faults show.

The protocol's tests have it among their cases (`test_protocol.py`).
"""

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'adding-a-drafter.md'
DRAFTER, CHECK = re.findall(r'```python\n(.*?)```', PAGE.read_text(), re.DOTALL)
# Rows of the table of faults: the line, the broken line.
FAULTS = re.findall(
  r'^\| `([^`]+)` \| `([^`]+)` \| .*caught \|$', PAGE.read_text(), re.MULTILINE
)


def run(drafter: str) -> dict:
  found: dict = {}
  exec(drafter, found)
  exec(CHECK, found)
  return found


def test_the_example_is_exact(capsys):
  found = run(DRAFTER)
  assert found['result'].num_samples == 2**15
  assert 'p-value' in capsys.readouterr().out
  accepted_BG = found['state'].trace.accepted_BG
  assert 0.05 < accepted_BG.sum() / found['state'].trace.drafted_BG.sum() < 0.95


def test_there_are_faults():
  assert len(FAULTS) == 3


# Each compiles a loop of its own; the third is left to the long run.
@pytest.mark.parametrize(
  ('line', 'broken'),
  [
    *FAULTS[:2],
    *(pytest.param(*fault, marks=pytest.mark.slow) for fault in FAULTS[2:]),
  ],
  ids=['law', 'count', 'keys'][: len(FAULTS)],
)
def test_a_fault_is_caught(line, broken):
  assert DRAFTER.count(line) == 1
  with pytest.raises(AssertionError, match='chi-square'):
    run(DRAFTER.replace(line, broken))
