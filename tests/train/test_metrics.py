"""Event files hold what metrics.jsonl holds, framed as TensorBoard reads them."""

import struct

import pytest

from specjax.train import metrics

events = pytest.importorskip(
  'tensorboardX.proto.event_pb2', reason='needs the extra tensorboard'
)


def _crc(data):
  """CRC-32C, masked as TFRecord does it."""
  crc = 0xFFFFFFFF
  for byte in data:
    crc ^= byte
    for _ in range(8):
      crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
  crc ^= 0xFFFFFFFF
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _read(path):
  """The events of a file: length, its checksum, data, their checksum."""
  data, found = path.read_bytes(), []
  while data:
    (length,) = struct.unpack('<Q', data[:8])
    head, body, tail = data[8:12], data[12 : 12 + length], data[12 + length :][:4]
    assert struct.unpack('<I', head) == (_crc(data[:8]),)
    assert struct.unpack('<I', tail) == (_crc(body),)
    found.append(events.Event.FromString(body))
    data = data[16 + length :]
  return found


def test_event_files_hold_the_same_numbers(tmp_path):
  lines = [(2, {'loss': 3.5}), (4, {'loss': 2.25, 'eval/ende/bleu': 12.0})]
  with metrics.MetricsWriter(tmp_path, 0) as writer:
    for step, values in lines:
      writer.write(step, values)
  (path,) = tmp_path.glob('events.out.tfevents.*')
  first, *rest = _read(path)
  assert first.file_version == 'brain.Event:2'
  found = {
    (event.step, value.tag): value.simple_value
    for event in rest
    for value in event.summary.value
  }
  expected = {(step, k): v for step, values in lines for k, v in values.items()}
  assert found == expected


def test_a_run_that_goes_on_tells_tensorboard_what_to_forget(tmp_path):
  with metrics.MetricsWriter(tmp_path, 4):
    pass
  (path,) = tmp_path.glob('events.out.tfevents.*')
  starts = [event.step for event in _read(path) if event.session_log.status == 1]
  assert starts == [5]
