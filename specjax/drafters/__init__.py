"""Drafters: who proposes the tokens that the target verifies.

A drafter is a `specjax.core.types.Drafter`: a static block size and three pure
functions. Any law is allowed, as long as `Draft.logq_BGV` records exactly the
law that each token was drawn from and `Draft.count_B` depends on emitted tokens
only; then the output's law is the target's whatever the drafter does.
"""

from specjax.drafters.model import model_draft
from specjax.drafters.ngram import ngram_draft
from specjax.drafters.table import bigram_draft, fit_bigram, fit_unigram, unigram_draft

__all__ = [
  'bigram_draft',
  'fit_bigram',
  'fit_unigram',
  'model_draft',
  'ngram_draft',
  'unigram_draft',
]
