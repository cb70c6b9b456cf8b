"""`gs://` checkpoints, against a server in this process that speaks JSON as GCS."""

import http.server
import json
import os
import threading
import urllib.parse

import numpy as np
import pytest

from specjax.checkpoints import files, leaves, t5x
from specjax.models import t5

CONFIG = t5.T5Config(
  vocab_size=8,
  emb_dim=4,
  num_heads=1,
  head_dim=4,
  mlp_dim=4,
  num_encoder_layers=1,
  num_decoder_layers=1,
)
NAME = 'decoder/layers_0/mlp/wo/kernel'
SCALE = 'encoder/encoder_norm/scale'


class Bucket(http.server.BaseHTTPRequestHandler):
  """Objects of one bucket: list, read (with ranges), write, delete."""

  objects: dict[str, bytes] = {}
  protocol_version = 'HTTP/1.1'

  def answer(self, status, data=b'', **headers):
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name.replace('_', '-'), value)
    self.send_header('Content-Length', str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def answer_metadata(self, name):
    size = str(len(self.objects[name]))
    data = json.dumps({'name': name, 'generation': '1', 'size': size}).encode()
    self.answer(200, data, Content_Type='application/json')

  def target(self):
    url = urllib.parse.urlsplit(self.path)
    query = dict(urllib.parse.parse_qsl(url.query))
    _, found, name = url.path.partition('/b/a-bucket/o/')
    return (urllib.parse.unquote(name) if found else None), query

  def do_GET(self):
    name, query = self.target()
    if name is None:
      prefix, start = query.get('prefix', ''), query.get('startOffset', '')
      stop = query.get('endOffset')
      items = [
        {'name': key, 'size': str(len(value)), 'generation': '1'}
        for key, value in sorted(self.objects.items())
        if key.startswith(prefix) and key >= start and (stop is None or key < stop)
      ]
      data = json.dumps({'items': items}).encode()
      self.answer(200, data, Content_Type='application/json')
    elif name not in self.objects:
      self.answer(404)
    elif query.get('alt') == 'json':
      self.answer_metadata(name)
    else:
      data = self.objects[name]
      asked = self.headers.get('Range')
      size = len(data)
      first, last = 0, size - 1
      if asked:
        start, _, stop = asked.removeprefix('bytes=').partition('-')
        first, last = int(start), min(int(stop or size), last)
      self.answer(
        206 if asked else 200,
        data[first : last + 1],
        Content_Range=f'bytes {first}-{last}/{size}',
        x_goog_generation='1',
        x_goog_stored_content_length=str(size),
      )

  def do_POST(self):
    _, query = self.target()
    data = self.rfile.read(int(self.headers['Content-Length']))
    self.objects[query['name']] = data
    self.answer_metadata(query['name'])

  def do_DELETE(self):
    name, _ = self.target()
    self.objects.pop(name, None)
    self.answer(204)

  def log_message(self, *args):
    pass


@pytest.fixture(scope='module')
def bucket():
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Bucket)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  address = f'http://127.0.0.1:{server.server_address[1]}'
  settings = {
    'TENSORSTORE_GCS_HTTP_URL': address,
    'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'none',
  }
  with pytest.MonkeyPatch.context() as patch:
    for name, value in settings.items():
      patch.setitem(os.environ, name, value)
    yield Bucket.objects
  server.shutdown()
  server.server_close()


def weights_of(flat):
  arrays = {name: leaves.array_leaf(values) for name, values in flat.items()}
  return leaves.Weights(CONFIG, arrays, {})


def test_round_trip_through_a_bucket(bucket):
  rng = np.random.default_rng(0)
  flat = {
    name: rng.normal(size=shape).astype(np.float32)
    for name, shape in leaves.expected_shapes(CONFIG).items()
  }
  for step in (3, 20):
    t5x.write(f'gs://a-bucket/a run/checkpoint_{step}', weights_of(flat), step=step)
  assert 'a run/checkpoint_3/checkpoint' in bucket
  for path in ('gs://a-bucket/a run', 'gs://a-bucket/a run/checkpoint_20/'):
    weights = t5x.open_weights(path)
    assert weights.notes['step'] == 20
    for name, leaf in weights.leaves.items():
      np.testing.assert_array_equal(leaves.read_whole(leaf), flat[name])
  with pytest.raises(ValueError, match='checkpoint_3 exists; choose another place'):
    t5x.write('gs://a-bucket/a run/checkpoint_3', weights)
  with pytest.raises(ValueError, match='gs://a-bucket/none holds no T5X checkpoint'):
    t5x.open_weights('gs://a-bucket/none')
  del bucket['a run/checkpoint_20/target.decoder.layers_0.mlp.wo.kernel/.zarray']
  with pytest.raises(ValueError, match=f'cannot read {NAME} '):
    t5x.open_weights('gs://a-bucket/a run')


def test_a_failed_write_leaves_nothing_in_the_bucket(bucket):
  def read(index):
    raise ValueError('weights: the source is damaged')

  shapes = leaves.expected_shapes(CONFIG)
  weights = weights_of({name: np.ones(shape, 'f4') for name, shape in shapes.items()})
  weights.leaves[NAME] = weights.leaves[NAME]._replace(read=read)
  with pytest.raises(ValueError, match='the source is damaged'):
    t5x.write('gs://a-bucket/failed/checkpoint_1', weights)
  assert not [name for name in bucket if name.startswith('failed/')]


def test_a_bucket_that_does_not_answer_is_given_up(monkeypatch):
  monkeypatch.setenv('TENSORSTORE_GCS_HTTP_URL', 'http://127.0.0.1:9')
  monkeypatch.setenv('GOOGLE_AUTH_TOKEN_FOR_TESTING', 'none')
  monkeypatch.setitem(files._RETRIES, 'max_retries', 1)
  for call in (files.exists, files.read, files.names):
    with pytest.raises(ValueError, match=r'cannot read gs://b/t5.*check the address'):
      call('gs://b/t5')
