"""Options that change nothing are named; others are not."""

import pytest

from specjax.command import cli, notes


def said(arguments, **options):
  argv = arguments.split()
  return list(notes.notes(cli.parse(argv), cli.typed(argv), **options))


@pytest.mark.parametrize(
  ('arguments', 'expected'),
  [
    ('--method none --gamma 4', '--gamma has no effect with --method none'),
    ('--method none --compare', '--compare has no effect with --method none'),
    ('--method none --coupling gumbel', '--coupling has no effect with --method none'),
    (
      '--method ngram --draft_model x',
      '--draft_model has no effect with --method ngram',
    ),
    (
      '--method=table --assistant-model=x',
      '--assistant_model has no effect with --met',
    ),
    ('--prompt_lookup_max 2', '--prompt_lookup_max has no effect with --method draft_'),
    ('--method ngram --table_text x', '--table_text has no effect with --method ngram'),
    ('--max_speculative_tokens 3', 'has no effect without --gamma auto'),
    ('--rejection_sample_method block --coupling gumbel', 'with --coupling gumbel'),
    ('--compare --temperature 1', '--compare has no effect on samples'),
    ('--max_new_tokens 1', 'max_new_tokens 1 leaves nothing to draft: plain decoding'),
  ],
)
def test_an_option_without_effect_is_named(arguments, expected):
  (note,) = said(arguments)
  assert expected in note


@pytest.mark.parametrize(
  'arguments',
  [
    '',
    '--method none --temperature 1',
    '--gamma 4 --rejection_sample_method block --draft_model x --compare',
    '--method ngram --prompt_lookup_max 2 --prompt_lookup_min 2 --gamma 3',
    '--method table --table_text x',
    '--gamma auto --max_speculative_tokens 3',
    '--compare --temperature 1 --coupling gumbel',
    '--no_compare --temperature 1',
  ],
)
def test_options_with_an_effect_are_not(arguments):
  assert said(arguments) == []


def test_the_demonstration_has_methods_of_its_own():
  assert said('--method ngram --gamma 3', is_demo=True) == [
    '--method has no effect without texts: the demonstration compares them'
  ]
  assert said('--draft_model x', is_demo=True) == []


def test_messages_name_the_option_that_was_typed(capsys):
  for argv, name in (
    (['--gamma=3'], 'gamma'),
    (['--num-speculative-tokens', '3'], 'num_speculative_tokens'),
    ([], 'num_speculative_tokens'),
  ):
    assert cli.fail(ValueError('num_speculative_tokens: 3; less'), argv) == 2
    assert capsys.readouterr().err == f'specjax: {name}: 3; less\n'
