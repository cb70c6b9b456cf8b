"""docs/metrics.md names every field of the records that a run writes."""

import dataclasses
import pathlib

import pytest

from specjax.command.compare import Difference
from specjax.command.results import run_record, total
from specjax.config import RunConfig
from specjax.eval import report
from specjax.generation import Generation

PAGE = (pathlib.Path(__file__).parents[1] / 'docs' / 'metrics.md').read_text()
GENERATION = Generation(0, 'a', (5, 1), (0.0, 0.0), 'eos', ('accepted', 'accepted'),
                        (1, 1), 1, (1, 1), (1, 1))  # fmt: skip
FIELDS = {
  'run': run_record(RunConfig()),
  'text': GENERATION.to_dict(),
  'summary': total([GENERATION]).as_dict(),
  'results': report.Result._fields,
  'differences': [field.name for field in dataclasses.fields(Difference)],
}
# Counts that are described together with their totals.
BESIDE = {'draft_tokens_per_position', 'accepted_tokens_per_position'}


@pytest.mark.parametrize('record', FIELDS)
def test_every_field_is_described(record):
  names = {*FIELDS[record]} - BESIDE
  assert names
  assert {name for name in names if f'`{name}`' not in PAGE} == set()
