"""How a draft learns from a frozen target: what it is told, checked."""

import dataclasses
from typing import Literal

DIVERGENCES = (
  'cross_entropy', 'forward_kl', 'reverse_kl', 'jsd', 'tvd', 'kl_then_tvd'
)  # fmt: skip
DATA = ('fixed', 'target', 'draft', 'mixed', 'online')


@dataclasses.dataclass(frozen=True)
class Recipe:
  """A divergence, the texts at whose prefixes it is taken, and what counts as best.

  Attributes:
    divergence: of the draft's law from the target's, over the whole vocabulary
      (`train.divergences`). 'cross_entropy' is that to the text's own token: on
      data 'fixed', ordinary training; on 'target', sequence-level distillation
      (Kim and Rush 2016).
    data: whose texts.
      'fixed': the corpus' targets.
      'target': the target's answers, sampled once.
      'draft': the draft's own, sampled from its present parameters (on-policy).
      'mixed': a batch is 'draft' with probability `draft_fraction`, else 'target'.
      'online': what speculative decoding with the present draft emits, with the
        laws that its verification computed anyway (Liu et al. 2023, arXiv
        2310.07177): no further pass of the target.
    beta: of 'jsd', in (0, 1).
    warm_fraction: 'kl_then_tvd' passes from KL to TVD, linearly, over that part of
      the steps.
    draft_fraction: of 'mixed', in [0, 1].
    temperature: > 0; of both laws, of the samples, and of the alpha that counts.
    num_draft: gamma of 'online'.
    start: 'random', or 'target': layers and slices of the target's weights
      (`train.slicing`).
    encoder_layers: with start 'target', which of its layers the draft begins with;
      empty: evenly spaced.
    decoder_layers: likewise.
    num_prompts: held-out sources of each task, on which alpha is measured.
    measure_steps: steps between two measurements.
    c: >= 0, time of a draft step / of a target step; None: by the roofline of
      `topology` (`train.shapes`).
    v: > 0, time of verifying gamma + 1 tokens / of a target step.
    topology: a chip or slice, for c.
    max_gamma: largest gamma to consider.
  """

  divergence: Literal[DIVERGENCES] = 'kl_then_tvd'  # type: ignore[valid-type]
  data: Literal[DATA] = 'target'  # type: ignore[valid-type]
  beta: float = 0.5
  warm_fraction: float = 0.5
  draft_fraction: float = 0.5
  temperature: float = 1.0
  num_draft: int = 4
  start: Literal['random', 'target'] = 'random'
  encoder_layers: tuple[int, ...] = ()
  decoder_layers: tuple[int, ...] = ()
  num_prompts: int = 96
  measure_steps: int = 500
  c: float | None = None
  v: float = 1.0
  topology: str = 'v4'
  max_gamma: int = 16

  def __post_init__(self):
    for field, choices in (
      ('divergence', DIVERGENCES), ('data', DATA), ('start', ('random', 'target'))
    ):  # fmt: skip
      value = getattr(self, field)
      if value not in choices:
        raise ValueError(f'{field}: {value!r}; give one of {", ".join(choices)}')
    if not 0 < self.beta < 1:
      raise ValueError(f'beta: {self.beta}; give a number between 0 and 1')
    for field in ('warm_fraction', 'draft_fraction'):
      if not 0 <= getattr(self, field) <= 1:
        raise ValueError(f'{field}: {getattr(self, field)}; give one from 0 to 1')
    for field in ('temperature', 'v'):
      if not 0 < getattr(self, field) < float('inf'):
        raise ValueError(f'{field}: {getattr(self, field)}; give a number above 0')
    if self.c is not None and not 0 <= self.c < float('inf'):
      raise ValueError(f'c: {self.c}; give 0 or more')
    for field in ('num_draft', 'num_prompts', 'measure_steps', 'max_gamma'):
      if getattr(self, field) < 1:
        raise ValueError(f'{field}: {getattr(self, field)}; give 1 or more')
    if self.start == 'random' and (self.encoder_layers or self.decoder_layers):
      raise ValueError(
        f'encoder_layers, decoder_layers: {self.encoder_layers}, {self.decoder_layers} '
        "with start 'random'; they choose layers of the target, give start 'target'"
      )

  def tvd_weight(self, step: int, total_steps: int) -> float:
    """w of `divergences.kl_then_tvd` in a step, in [0, 1].

    Example:
      >>> [Recipe(warm_fraction=0.5).tvd_weight(step, 100) for step in (0, 25, 50, 99)]
      [0.0, 0.5, 1.0, 1.0]
    """
    warm_steps = self.warm_fraction * total_steps
    return min(1.0, step / warm_steps) if warm_steps else 1.0
