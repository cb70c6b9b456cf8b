"""Configurations check themselves, and the command line is made from them."""

import dataclasses
import json

import numpy as np
import pytest

from specjax.command import cli
from specjax.config import (
  IOConfig,
  PairConfig,
  RunConfig,
  SamplingConfig,
  SpeculationConfig,
)
from specjax.config_files import load_config, shipped_configs

# Class, field, bad value, what the message must hold besides field and value.
BAD_VALUES = [
  (SamplingConfig, 'temperature', -0.5, 'give 0 (greedy) or more'),
  (SamplingConfig, 'temperature', float('nan'), 'give 0 (greedy) or more'),
  (SamplingConfig, 'temperature', float('inf'), 'give 0 (greedy) or more'),
  (SamplingConfig, 'temperature', '1', 'give 0 (greedy) or more'),
  (SamplingConfig, 'top_p', 0.0, 'more than 0 and at most 1'),
  (SamplingConfig, 'top_p', -0.1, 'more than 0 and at most 1'),
  (SamplingConfig, 'top_p', 1.0001, 'more than 0 and at most 1'),
  (SamplingConfig, 'top_p', float('nan'), 'more than 0 and at most 1'),
  (SamplingConfig, 'top_k', -1, 'give 0 (off) or more'),
  (SamplingConfig, 'top_k', 2.5, 'give 0 (off) or more'),
  (SamplingConfig, 'seed', -1, '2**32'),
  (SamplingConfig, 'seed', 2**32, '2**32'),
  (SamplingConfig, 'max_new_tokens', 0, 'give 1 or more'),
  (SamplingConfig, 'min_new_tokens', -1, 'give 0 or more'),
  (SamplingConfig, 'min_new_tokens', 129, 'max_new_tokens 128'),
  (SpeculationConfig, 'num_speculative_tokens', 0, '--method none'),
  (SpeculationConfig, 'num_speculative_tokens', -3, '--method none'),
  (SpeculationConfig, 'num_speculative_tokens', 2.0, '--method none'),
  (SpeculationConfig, 'num_speculative_tokens', True, '--method none'),
  (SpeculationConfig, 'method', 'draftmodel', 'did you mean draft_model?'),
  (SpeculationConfig, 'rejection_sample_method', 'blok', 'did you mean block?'),
  (SpeculationConfig, 'prompt_lookup_min', 4, 'prompt_lookup_max 3'),
  (SpeculationConfig, 'prompt_lookup_min', 0, '1 <= prompt_lookup_min'),
  (PairConfig, 'dtype', 'float16', 'did you mean'),
  (IOConfig, 'batch_size', 0, 'give 1 or more'),
]


@pytest.mark.parametrize(('cls', 'field', 'value', 'remedy'), BAD_VALUES)
def test_a_bad_value_is_named_with_its_remedy(cls, field, value, remedy):
  with pytest.raises(ValueError, match=field) as caught:
    cls(**{field: value})
  message = str(caught.value)
  assert message.startswith(f'{field}: {value!r}'), message
  assert remedy in message
  assert '\n' not in message


@pytest.mark.parametrize(
  ('cls', 'fields'),
  [
    (SamplingConfig, {'temperature': 0}),
    (SamplingConfig, {'temperature': np.float32(0.7), 'top_k': np.int32(3)}),
    (SamplingConfig, {'top_p': 1, 'seed': 2**32 - 1}),
    (SamplingConfig, {'max_new_tokens': 1, 'min_new_tokens': 1}),
    (SpeculationConfig, {'prompt_lookup_min': 3}),
  ],
)
def test_the_edges_of_the_ranges_are_allowed(cls, fields):
  config = cls(**fields)
  for field, value in fields.items():
    assert getattr(config, field) == value


def test_a_draft_longer_than_the_budget_is_refused():
  def config(gamma, budget, method='draft_model'):
    return RunConfig(
      speculation=SpeculationConfig(method, gamma),
      sampling=SamplingConfig(max_new_tokens=budget),
    )

  assert config(3, 4).speculation.num_speculative_tokens == 3
  assert config(9, 1, 'none').sampling.max_new_tokens == 1
  with pytest.raises(ValueError, match=r'num_speculative_tokens: 4 .* 4 .* at most 3'):
    config(4, 4)
  with pytest.raises(ValueError, match=r'max_new_tokens 1 .* --method none'):
    config(1, 1)


def test_prompts_must_have_text_and_exclude_a_file():
  with pytest.raises(ValueError, match=r'prompt: number 2 is empty; give it some text'):
    IOConfig(prompt=('a', ' \t'))
  with pytest.raises(ValueError, match=r'input: x\.txt beside --prompt'):
    IOConfig(prompt=('a',), input='x.txt')


@pytest.mark.parametrize('field', ['input', 'table_text', 'vocabulary', 'draft_model'])
def test_results_never_replace_what_is_read(field, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)

  def config(output):
    groups = {
      'input': {'io': IOConfig(input='kept.txt', output=output)},
      'table_text': {'pair': PairConfig(table_text='kept.txt')},
      'vocabulary': {'pair': PairConfig(vocabulary='kept.txt')},
      'draft_model': {'pair': PairConfig(draft_model='kept.txt')},
    }
    return RunConfig(**{'io': IOConfig(output=output), **groups[field]})

  assert config('other.txt').io.output == 'other.txt'
  with pytest.raises(ValueError, match=f'output: .* is what --{field} reads'):
    config(str(tmp_path / 'x' / '..' / 'kept.txt'))


def test_a_configuration_is_json():
  config = RunConfig(sampling=SamplingConfig(banned_ids=[3, 4]))
  fields = json.loads(json.dumps(config.to_dict()))
  assert fields['sampling']['banned_ids'] == [3, 4]
  assert fields['speculation']['num_speculative_tokens'] is None  # nobody gave it
  assert set(fields) == {field.name for field in dataclasses.fields(RunConfig)}
  assert hash(config) == hash(RunConfig(sampling=SamplingConfig(banned_ids=(3, 4))))


def test_every_shipped_configuration_loads():
  assert 'embedded' in shipped_configs()
  for name, path in shipped_configs().items():
    if 'CONFIGS' in path.read_text():
      continue  # several in a file: tests/test_published.py
    assert isinstance(load_config(name), RunConfig)
    assert load_config(name) == load_config(str(path))
  assert 'embedded_target' not in shipped_configs(), 'it configures training'


def test_a_configuration_file_that_is_none(tmp_path):
  def message(text):
    path = tmp_path / 'mine.py'
    path.write_text(text)
    with pytest.raises(ValueError, match='config: ') as caught:
      load_config(str(path))
    assert str(path) in str(caught.value)
    return str(caught.value)

  assert 'no CONFIG of type RunConfig (found NoneType)' in message('x = 1')
  assert '(found int)' in message('CONFIG = 3')
  assert 'fails with SyntaxError' in message('CONFIG = (')
  assert 'temperature: -1; give 0' in message(
    'from specjax.config import SamplingConfig\nSamplingConfig(temperature=-1)'
  )
  with pytest.raises(ValueError, match=r"config: 'embeded' .* did you mean embedded\?"):
    load_config('embeded')
  with pytest.raises(ValueError, match='choose from'):
    load_config('zzz')


def test_the_command_line_sets_every_field():
  arguments = (
    '--model m --draft_model d --table_text t --dtype bfloat16 --vocabulary v '
    '--method ngram --num_speculative_tokens 7 --rejection_sample_method block '
    '--prompt_lookup_max 5 --prompt_lookup_min 2 --temperature 0.5 --top_k 3 '
    '--top_p 0.9 --seed 8 --max_new_tokens 20 --min_new_tokens 2 --banned_ids 5 6 '
    '--prompt a --prompt bc --output o --batch_size 2 --truncate --stream '
    '--no-trace --no-compare'
  )
  config = cli.parse(arguments.split())
  assert config == RunConfig(
    PairConfig('m', 'd', 't', 'bfloat16', 'v'),
    SpeculationConfig('ngram', 7, 'block', 5, 2),
    SamplingConfig(0.5, 3, 0.9, 8, 20, 2, (5, 6)),
    IOConfig(('a', 'bc'), None, 'o', 2, True, True, False, False),
  )
  assert cli.parse(['--input', '-']).io.input == '-'
  arguments = '--task t --split s --num_examples 3 --task_module a.b'
  task = cli.parse(arguments.split()).io
  assert (task.task, task.split, task.num_examples, task.task_module) == (
    't', 's', 3, 'a.b'
  )  # fmt: skip
  settled = SpeculationConfig(num_speculative_tokens=4)
  assert cli.parse([]) == RunConfig(speculation=settled)


@pytest.mark.parametrize(
  'option', ['--gamma', '--num-speculative-tokens', '--num_assistant_tokens']
)
def test_aliases_and_hyphens(option):
  assert cli.parse([option, '6']).speculation.num_speculative_tokens == 6
  assert cli.parse([f'{option}=6']).speculation.num_speculative_tokens == 6


def test_options_override_the_configuration_file(tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text(
    'from specjax.config import *\n'
    'CONFIG = RunConfig(\n'
    "  speculation=SpeculationConfig('ngram', 6), sampling=SamplingConfig(top_k=9))\n"
  )
  config = cli.parse(['--gamma', '2', '--config', str(path)])
  assert config.speculation == SpeculationConfig('ngram', 2)
  assert config.sampling.top_k == 9
  assert cli.parse([f'--config={path}']).speculation.num_speculative_tokens == 6


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ('--gamm 3', '--gamm: unknown option; did you mean --gamma?'),
    ('--temprature 1', '--temprature: unknown option; did you mean --temperature?'),
    ('--zzzz', '--zzzz: unknown option; choose from'),
    ('--method ngrm', "method: 'ngrm' is unknown; did you mean ngram?"),
    ('--gamma x', "num_speculative_tokens: 'x'; give INT or auto"),
    ('--temperature', "Missing value for argument '--temperature'"),
    ('stray', 'Unrecognized options: stray'),
    ('--config', '--config: no name'),
    ('--config embeded', 'did you mean embedded?'),
    ('--temperature=-1', 'temperature: -1.0; give 0'),
    ('--gamma 0', 'num_speculative_tokens: 0; give an integer >= 1'),
  ],
)
def test_a_bad_option_is_one_line(arguments, message):
  with pytest.raises(ValueError, match=r'.') as caught:
    cli.parse(arguments.split())
  assert message in str(caught.value)
  assert '\n' not in str(caught.value)
  assert '│' not in str(caught.value)


@pytest.mark.parametrize('is_ascii', [False, True])
def test_a_message_is_taken_out_of_its_box(is_ascii):
  title, side, line = (' error ', ' ', '-') if is_ascii else ('╭─ error ─╮', '│', '─')
  rules = [line * 9] * is_ascii
  texts = [
    *rules,
    'Error parsing speculation: gamma: 0; why',
    line * 9,
    'For full help',
  ]
  box = '\n'.join([title, *(f'{side} {text} {side}' for text in texts)])
  reason = cli._reason(['--gamma', '0'], box, RunConfig, cli.PROG)
  assert reason == 'gamma: 0; why'


def test_help_shows_every_option(capsys):
  with pytest.raises(SystemExit) as caught:
    cli.parse(['--help'])
  assert caught.value.code == 0
  shown = capsys.readouterr().out
  for name in cli.option_names():
    assert name in shown, name


@pytest.mark.parametrize(
  ('budget', 'method', 'gamma'),
  [(1, 'none', 1), (2, 'draft_model', 1), (3, 'draft_model', 2), (9, 'draft_model', 4)],
)
def test_a_gamma_not_given_is_lowered_to_the_budget(budget, method, gamma, tmp_path):
  arguments = ['--prompt', 'a', '--max_new_tokens', str(budget)]
  speculation = cli.parse(arguments).speculation
  assert (speculation.method, speculation.num_speculative_tokens) == (method, gamma)
  too_many = rf'{budget} is more than max_new_tokens {budget} can use'
  with pytest.raises(ValueError, match=too_many):
    cli.parse([*arguments, '--gamma', str(budget)])
  path = tmp_path / 'given.py'
  path.write_text(
    'from specjax.config import RunConfig, SpeculationConfig\n'
    'CONFIG = RunConfig(speculation='
    f'SpeculationConfig(num_speculative_tokens={budget}))\n',
    encoding='utf-8',
  )
  with pytest.raises(ValueError, match=too_many):
    cli.parse([*arguments, '--config', str(path)])
