"""The files of the experiment: never half a file, and a table of what is in them."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
  """Writes a file beside its place, then renames it."""
  temporary = path.with_name(f'.{path.name}.tmp')
  temporary.write_text(text, encoding='utf-8')
  os.replace(temporary, path)


def write_json(path: Path, record: dict[str, Any]) -> None:
  write_text(path, json.dumps(record, indent=1) + '\n')


def done(results: dict[str, Any], worker: str, section: str) -> dict[str, Any]:
  """The numbers of a section; empty if it was not run."""
  part = results['workers'].get(worker, {}).get('sections', {}).get(section, {})
  return part if part.get('status') == 'done' else {}


def not_run(results: dict[str, Any]) -> Iterator[tuple[str, str]]:
  """(name, reason) of each section without numbers."""
  for worker, record in results['workers'].items():
    for section, part in record['sections'].items():
      if part['status'] != 'done':
        yield f'{worker}: {section}', f'{part["status"]}, {part["reason"]}'


def markdown(results: dict[str, Any]) -> str:
  """All measurements as one page."""
  machine, arguments = results['machine'], results['arguments']
  lines = [
    f'# {arguments["target"]} with {arguments["draft"]} on one {machine.get("kind")}',
    '',
    f'Driver {machine.get("driver")}, jax {machine.get("jax")}, jaxlib '
    f'{machine.get("jaxlib")}; random bfloat16 weights, batch 1, '
    f'{results["size"]["source"]} source positions, {results["size"]["tokens"]} new '
    f'tokens, temperature {arguments["temperature"]}. Acceptance rates are imposed '
    '(timing only).',
    '',
    '| quantity | value |',
    '|---|---|',
    *(f'| {name} | {value} |' for name, value in _quantities(results)),
    '',
    '| command buffers | alpha | tokens per call | ms per token | plain ms per token |'
    ' speedup | predicted |',
    '|---|---|---|---|---|---|---|',
    *_loop_rows(results),
  ]
  missing = [f'- {name}: {reason}' for name, reason in not_run(results)]
  if missing:
    lines += ['', 'Not run:', '', *missing]
  return '\n'.join(lines) + '\n'


def _quantities(results: dict[str, Any]) -> Iterator[tuple[str, str]]:
  if part := done(results, 'main', 'bandwidth'):
    yield 'copy bandwidth', f'{part["bytes_per_second"] / 1e9:.0f} GB/s'
  if part := done(results, 'main', 'plain'):
    yield 'autoregressive', f'{part["ms"]:.3f} ms/token'
    yield 'bytes read per token', f'{part["bytes"] / 1e9:.2f} GB'
    if 'floor_ms' in part:
      yield 'bytes / bandwidth', f'{part["floor_ms"]:.3f} ms'
      yield 'autoregressive / that', f'{part["over_floor"]:.2f}'
  if part := done(results, 'main', 'draft'):
    yield 'draft step', f'{part["ms"]:.3f} ms'
    yield 'c', f'{part["c"]:.3f}'
  for gamma in sorted(results['size']['gammas']):
    if part := done(results, 'main', f'verify_{gamma}'):
      yield f'v({gamma})', f'{part["v"]:.3f} ({part["ms"]:.3f} ms)'
  for alpha, part in done(results, 'main', 'best_gamma').get('alpha', {}).items():
    promise = f'{part["gamma"]}: {part["predicted"]:.2f} times as fast'
    yield f'best gamma at alpha {alpha}, predicted', promise
  if part := done(results, 'main', 'encoder'):
    yield 'encoders', f'{part["target_ms"]:.2f} + {part["draft_ms"]:.2f} ms'
  peaks = [
    part.get('peak_bytes') or 0
    for part in results['workers'].get('main', {}).get('sections', {}).values()
  ]
  if any(peaks):
    yield 'peak memory', f'{max(peaks) / 1e9:.1f} GB'
  if part := done(results, 'exactness', 'tables'):
    passed = 'pass' if part['passed'] else 'FAIL'
    yield f'exactness on tables, {part["samples"]} outputs a rule', passed
  if part := done(results, 'exactness', 'identity'):
    equal = f'{part["equal_rows"]}/{part["rows"]} outputs'
    rate = f'{part["accepted"]} of {part["drafted"]} drafts accepted'
    yield 'greedy identity, float32', f'{equal} equal ({rate})'
  if part := done(results, 'int8', 'int8'):
    size = f'{part["target_bytes"] / 1e9:.1f} GB'
    yield 'int8 target, autoregressive', f'{part["ms"]:.3f} ms/token ({size})'


def _loop_rows(results: dict[str, Any]) -> Iterator[str]:
  for worker, name in (
    ('main', "XLA's default"),
    ('buffers_off', 'none'),
    ('buffers_while', 'while and conditional too'),
  ):
    plain = done(results, worker, 'plain')
    for alpha, part in done(results, worker, 'loop').get('alpha', {}).items():
      predicted = f'{part["predicted"]:.2f}' if 'predicted' in part else ''
      yield (
        f'| {name} | {alpha} | {part["tokens_per_call"]:.2f} | {part["ms"]:.3f} | '
        f'{plain["ms"]:.3f} | {part["speedup"]:.2f} | {predicted} |'
      )
