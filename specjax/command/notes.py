"""Options that were typed and change nothing: said, so that nobody waits for them."""

from collections.abc import Iterator, Mapping

from specjax.config import RunConfig

# Fields that only some methods read.
_READERS = {
  'num_speculative_tokens': ('draft_model', 'ngram', 'table'),
  'max_speculative_tokens': ('draft_model', 'ngram', 'table'),
  'rejection_sample_method': ('draft_model', 'ngram', 'table'),
  'coupling': ('draft_model', 'ngram', 'table'),
  'draft_model': ('draft_model',),
  'prompt_lookup_max': ('ngram',),
  'prompt_lookup_min': ('ngram',),
  'table_text': ('table',),
}


def notes(
  config: RunConfig, typed: Mapping[str, str], *, is_demo: bool = False
) -> Iterator[str]:
  """One line for each option without effect, and for drafts that can not be.

  Args:
    config: of the run.
    typed: `cli.typed`.
    is_demo: the demonstration has methods of its own.
  """
  if is_demo:
    if 'method' in typed:
      yield '--method has no effect without texts: the demonstration compares them'
    return
  speculation, sampling = config.speculation, config.sampling
  method = speculation.method
  if method == 'none' and sampling.max_new_tokens == 1:
    yield 'max_new_tokens 1 leaves nothing to draft: plain decoding'
  useless = {
    field: f'with --method {method}'
    for field, readers in _READERS.items()
    if method not in readers
  }
  if not speculation.is_auto:
    useless.setdefault('max_speculative_tokens', 'without --gamma auto')
  if speculation.coupling != 'none':
    why = f'with --coupling {speculation.coupling}'
    useless.setdefault('rejection_sample_method', why)
  for field, why in useless.items():
    if field in typed:
      yield f'--{typed[field]} has no effect {why}'
  if typed.get('compare') == 'compare' and config.io.compare:
    if method == 'none':
      yield '--compare has no effect with --method none'
    elif sampling.temperature > 0 and speculation.coupling == 'none':
      yield (
        '--compare has no effect on samples, which differ by chance, unless they '
        'are coupled (--coupling gumbel)'
      )
