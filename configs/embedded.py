"""The embedded pair, greedy, four drafted tokens, one text at a time.

python -m specjax.run --config embedded --prompt "ende: Click the button."
"""

from specjax.config import (
  IOConfig,
  PairConfig,
  RunConfig,
  SamplingConfig,
  SpeculationConfig,
)

CONFIG = RunConfig(
  pair=PairConfig(model='embedded'),
  speculation=SpeculationConfig(method='draft_model', num_speculative_tokens=4),
  sampling=SamplingConfig(temperature=0.0, max_new_tokens=128),
  io=IOConfig(batch_size=1),
)
