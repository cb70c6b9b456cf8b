"""The command line: what it writes where, and how it answers bad input."""

import dataclasses
import io
import json
import pathlib
import subprocess
import sys
import types

import pytest

from specjax import run
from specjax.command import session
from specjax.data import tasks
from specjax.pair import Pair
from specjax.testing import tiny_pair

TEXTS = ['hello hello hello', 'ab']
# What the tiny pair answered when this was written (`specjax.testing.tiny_pair`).
GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'cli' / 'prompts.txt'
SHORT = ['--max_new_tokens', '12', '--batch_size', '2']


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tiny_pair.write_tiny_pair(tmp_path_factory.mktemp('pair'))


@pytest.fixture
def cli(folder, capsys):
  """`cli(*arguments)` -> (exit code, stdout, stderr)."""

  def call(*arguments, model=folder):
    code = run.main(['--model', str(model), *SHORT, *map(str, arguments)])
    return code, *capsys.readouterr()

  return call


def prompts(texts=TEXTS):
  return [argument for text in texts for argument in ('--prompt', text)]


def records(path):
  return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]


def files(tmp_path):
  return sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--prompt', ''], 'prompt: number 1 is empty'),
    (['--prompt', 'a' * 40], 'source 1 has 41 tokens, the limit is 40; '),
    (['--prompt', 'a' * 40], '--truncate'),
    (['--input', 'missing.txt'], 'no file missing.txt'),
    (['--input', 'latin1.txt'], 'latin1.txt'),
    (['--input', 'gap.txt'], 'gap.txt, line 2 is empty'),
    (['--input', 'empty.txt'], 'empty.txt'),
    (['--config', 'embeded'], 'did you mean embedded?'),
    (['--prompts', 'a'], '--prompts: unknown option; did you mean --prompt?'),
    (['--prompt', 'a', '--gamma', '0'], 'specjax: gamma: 0; give an integer'),
    (['--prompt', 'a', '--num_speculative_tokens=0'], ': num_speculative_tokens: 0;'),
    (['--prompt', 'a', '--gamma', 'x'], "specjax: gamma: 'x'; give INT or auto"),
    (['--prompt', 'a', '--assistant_model', 'narrow'], 'specjax: assistant_model: '),
    (
      ['--prompt', 'a', '--draft_model', 'nowhere'],
      "draft_model: 'nowhere' is neither",
    ),
    (['--gamma', 'auto'], "gamma: 'auto' without texts; give --prompt, --input or"),
    (['--max_new_tokens', '1'], 'max_new_tokens: 1 leaves nothing to draft'),
    (['--prompt', 'a', '--gamma', '12'], 'more than max_new_tokens 12 can use'),
    (['--prompt', 'a', '--temperature=-1'], 'temperature: -1.0'),
    (['--prompt', 'a', '--temperature', 'nan'], 'temperature: nan'),
    (['--prompt', 'a', '--top_p', '0'], 'top_p: 0.0'),
    (['--prompt', 'a', '--top_p', '1.1'], 'top_p: 1.1'),
    (['--prompt', 'a', '--banned_ids', '359'], 'banned_ids: 359 is outside'),
    (['--prompt', 'a', '--draft_model', 'narrow'], "300 logits, the target's"),
    (['--prompt', 'a', '--draft_model', 'narrow'], '359 ids'),
    (['--prompt', 'a', '--model', 'damaged'], 'damaged or cut'),
    (['--prompt', 'a', '--model', 'nowhere'], "'nowhere' is neither"),
    (['--prompt', 'a', '--method', 'table'], '--table_text'),
    (['--prompt', 'a', '--output', 'no/such/folder.jsonl'], 'output: cannot write'),
    (['--prompt', 'a', '--output', '.'], 'output: cannot write'),
    (['--model', 'bad_samples'], 'samples: line 1 of'),
    (['--task', 'fixx'], "task: 'fixx' is unknown; did you mean fix? (others are"),
    (['--task', 'fix', '--split', 'x'], "split: 'x' is none of train, valid, test"),
    (['--task', 'fix', '--num_examples', '0'], 'num_examples: 0; give 1 or more'),
    (['--task', 'fix', '--prompt', 'a'], 'task: fix beside --prompt or --input'),
    (['--num_examples', '3'], 'they belong to --task'),
    (['--task_module', 'os'], 'they belong to --task'),
  ],
)
def test_bad_input_is_one_line_and_writes_nothing(
  cli, tmp_path, monkeypatch, arguments, message
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'latin1.txt').write_bytes('Käse'.encode('latin-1'))
  (tmp_path / 'gap.txt').write_text('one\n\nthree\n')
  (tmp_path / 'empty.txt').write_text('')
  narrow = tiny_pair.blank_t5(300)
  tiny_pair.write_tiny_pair(tmp_path / 'narrow', draft=narrow)
  damaged = tiny_pair.write_tiny_pair(tmp_path / 'damaged') / 'target.safetensors'
  damaged.write_bytes(damaged.read_bytes()[:-9])
  bad = tiny_pair.write_tiny_pair(tmp_path / 'bad_samples') / 'samples.jsonl'
  bad.write_text('[]\n')
  if '--output' not in arguments:
    arguments = [*arguments, '--output', 'results.jsonl']
  before = files(tmp_path)

  code, out, err = cli(*arguments)
  assert code == 2
  assert out == ''
  assert message in err
  assert err.startswith('specjax: ')
  assert err.count('\n') == 1
  assert err.endswith('\n')
  assert files(tmp_path) == before


def test_outputs_go_to_stdout_and_the_rest_to_stderr(cli, tmp_path):
  path = tmp_path / 'results.jsonl'
  code, out, err = cli(*prompts(), '--output', path)
  assert code == 0
  first, *texts, summary, comparison = records(path)
  assert out.splitlines() == [session._one_line(each['text']) for each in texts]
  # Seconds differ from run to run; everything else is the golden file's.
  timed = ('with compilation', 'times as fast')
  steady = [x for x in err.splitlines() if not any(part in x for part in timed)]
  shown = ''.join(
    f'{line}\n' for line in ['# stdout', out.rstrip(), '# stderr', *steady]
  )
  assert shown == GOLDEN.read_text(encoding='utf-8')
  assert 'times as fast as plain decoding' in err
  assert 'with compilation' in err
  for number, text in enumerate(TEXTS, 1):
    assert f'{number}  {text}' in err

  assert first['record'] == 'run'
  assert first['config']['sampling']['max_new_tokens'] == 12
  assert first['config']['io']['prompt'] == TEXTS
  assert {'specjax', 'jax', 'flax'} <= set(first['versions'])
  assert first['device']['platform'] == 'cpu'
  assert first['matmul_precision'] == 'highest'
  for index, (text, record) in enumerate(zip(TEXTS, texts, strict=True)):
    assert (record['record'], record['index'], record['source']) == (
      'text',
      index,
      text,
    )
    assert record['finish_reason'] in ('eos', 'length')
    count = len(record['ids'])
    assert len(record['logprobs']) == len(record['sources']) == count
    assert record['block_efficiency'] == count / record['num_target_calls']
  assert summary['num_emitted_tokens'] == sum(len(each['ids']) for each in texts)
  assert comparison['identical'] == comparison['compared'] == 2
  assert comparison['speedup'] > 0
  assert comparison['differences'] == []


def test_the_same_texts_by_file_stdin_and_stream(cli, tmp_path, monkeypatch):
  code, expected, _ = cli(*prompts(), '--no-trace', '--no-compare')
  assert code == 0
  assert len(expected.splitlines()) == 2
  path = tmp_path / 'texts.txt'
  path.write_bytes('\ufeffhello hello hello\r\nab\r\n'.encode())
  code, out, err = cli('--input', path, '--no-trace', '--no-compare')
  assert (code, out) == (0, expected)
  assert '[accepted draft]' not in err
  assert 'identical' not in err
  stdin = types.SimpleNamespace(buffer=io.BytesIO(path.read_bytes()))
  monkeypatch.setattr(sys, 'stdin', stdin)
  assert cli('--input', '-', '--no-trace', '--no-compare')[:2] == (0, expected)
  options = ('--stream', '--no-trace', '--no-compare')
  assert cli(*prompts(), *options)[:2] == (0, expected)


def test_sampling_is_reproducible_and_not_compared(cli):
  options = (*prompts(['ab', 'ab']), '--temperature', '1', '--no-trace')
  code, out, err = cli(*options)
  first, second = out.splitlines()
  assert code == 0
  assert first != second, 'two texts share their random stream'
  assert 'identical' not in err
  assert cli(*options)[1] == out
  assert cli(*options, '--seed', '1')[1] != out
  assert cli(*options, '--seed', '0')[1] == out, 'the documented default is seed 0'


def test_a_difference_is_shown_and_decides_the_exit_code(cli, monkeypatch):
  generate = Pair.generate

  def wrong(self, texts, **options):
    results = generate(self, texts, **options)
    if options['method'] != 'none':
      return results
    return [dataclasses.replace(each, ids=(3, *each.ids[1:])) for each in results]

  monkeypatch.setattr(Pair, 'generate', wrong)
  code, out, err = cli(*prompts(), '--no-trace')
  assert code == 1
  assert len(out.splitlines()) == 2
  assert "output identical to the target's: no 0/2" in err
  assert 'text 1 differs at token 1' in err
  assert 'logit gap' in err


def test_interrupting_keeps_what_is_finished(cli, tmp_path, monkeypatch):
  texts = ['ab', 'a text that is longer', 'cd', 'ef']
  path = tmp_path / 'results.jsonl'
  path.write_text('an older result\n')
  generate_batches = Pair.generate_batches

  def interrupted(self, *arguments, **options):
    batches = generate_batches(self, *arguments, **options)
    yield next(batches)
    assert path.read_text() == 'an older result\n', 'half a file is in its place'
    raise KeyboardInterrupt

  monkeypatch.setattr(Pair, 'generate_batches', interrupted)
  code, out, err = cli(*prompts(texts), '--output', path, '--no-trace')
  assert code == 130
  assert f'interrupted: 2 of 4 texts are finished and kept in {path}' in ' '.join(
    err.split()
  )
  _, *kept = records(path)
  assert [each['source'] for each in kept] == texts[:2]
  assert out.splitlines() == [session._one_line(each['text']) for each in kept]
  assert files(tmp_path) == ['results.jsonl']


def test_devices_are_written_not_replaced(cli):
  code, out, _ = cli(
    *prompts(), '--no-trace', '--no-compare', '--output', '/dev/stderr'
  )
  assert code == 0
  assert len(out.splitlines()) == 2


def test_the_demonstration(cli, tmp_path):
  path = tmp_path / 'results.jsonl'
  code, out, err = cli('--output', path)
  assert code == 0, out + err
  lines = out.splitlines()
  assert 'greedy, gamma 4, batch 1' in ' '.join(lines[:3])
  assert '[accepted draft]  *correction*' in out
  for task in ('copy', 'more'):
    assert f'{task}: abcabc' in out
    assert any(line.startswith(f'{task} ') and ' yes' in line for line in lines)
  for method in ('draft_model', 'ngram'):
    assert f"{method}: output identical to the target's: yes 4/4" in out
    assert f'{method}, all tasks together' in out
    assert any(f' {method} ' in line for line in lines)
  assert 'compilation included' in out
  assert 'Speculation ' in out
  assert 'Best here: copy by ' in out.replace('\n', ' ')

  first, *texts, summary = records(path)
  assert first['record'] == 'run'
  assert [each['method'] for each in texts] == ['draft_model'] * 4 + ['ngram'] * 4
  for drafted, looked_up in zip(texts[:4], texts[4:], strict=True):
    assert drafted['ids'] == looked_up['ids']
  for row in summary['results']:
    assert row['identical'] is True
    assert 0 <= row['acceptance_rate'] <= 1
    assert 0 <= row['alpha'] <= 1
    assert 1 <= row['tokens_per_call'] <= 5
    assert row['c'] >= 0
    assert row['v'] > 0
    assert row['predicted'] > 0
    assert row['measured'] > 0


def test_help_and_bad_options_start_no_jax():
  code = (
    'import sys; from specjax import run; code = run.main(["--gamm", "3"]); '
    'sys.exit(9 if "jax" in sys.modules else code)'
  )
  result = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
  assert result.returncode == 2
  assert result.stdout == ''
  assert result.stderr == 'specjax: --gamm: unknown option; did you mean --gamma?\n'


def test_the_embedded_pair_translates():
  from specjax.load import load_pair

  pair = load_pair()
  texts = ['ende: Click the button to open the dialog.']
  plain = pair.generate(texts, method='none')
  results = pair.generate(texts)
  assert results[0].ids == plain[0].ids
  assert results[0].finish_reason == 'eos'
  assert 'Klicken Sie' in results[0].text
  assert results[0].block_efficiency > 1


def test_a_task_is_decoded_and_scored(cli, tmp_path, monkeypatch):
  for name in ('seqio', 'tensorflow', 'tensorflow_datasets'):
    monkeypatch.setitem(sys.modules, name, None)
  path = tmp_path / 'results.jsonl'
  task = ['--task', 'fix', '--split', 'valid', '--num_examples', 3]
  code, out, err = cli(*task, '--no_compare', '--output', path)
  assert code == 0
  head, *texts, summary = map(json.loads, path.read_text('utf-8').splitlines())
  data = tasks.read_task('fix', 'valid', num_examples=3)
  assert head['config']['io']['task'] == 'fix'
  # In batches, longest last; the index says which.
  texts.sort(key=lambda record: record['index'])
  assert [record['source'] for record in texts] == data.sources
  assert [record['target'] for record in texts] == data.targets
  expected = tasks.score(data, [record['text'] for record in texts])
  assert summary['task'] == 'fix'
  assert summary['split'] == 'valid'
  assert summary['scores'] == expected
  assert set(expected) == {'bleu', 'chrf', 'exact_match'}
  line = next(line for line in err.splitlines() if line.startswith('fix valid: '))
  assert f'chrf {expected["chrf"]:.2f}' in line
  assert '3 texts' in line
  assert len(out.splitlines()) == 3
