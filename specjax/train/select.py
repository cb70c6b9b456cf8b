"""Which checkpoint of a draft is best: the one that promises most speed.

A draft is judged by alpha on held-out prompts, at the prefixes of the target's own
outputs (`eval.metrics.alpha`), and by the speedup S(alpha, c, v, gamma) that it
promises at its best gamma (`eval.theory`). The loss does not say it: a draft may
come nearer in KL while min(p, q) shrinks.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints import store
from specjax.core import autoregressive, rng, types
from specjax.core import warp as warps
from specjax.data import text
from specjax.eval import metrics, theory

_LENGTHS = (32, 64, 128)
_MAX_ROWS = 64


class Score(NamedTuple):
  """What a draft promises.

  Attributes:
    alpha: in [0, 1].
    gamma: the best one, 0 for "do not speculate".
    speedup: S at that gamma; 1 for gamma 0.
    c: time of a draft step / of a target step.
    v: time of verifying gamma + 1 tokens / of a target step.
  """

  alpha: float
  gamma: int
  speedup: float
  c: float
  v: float

  def __str__(self) -> str:
    return (
      f'alpha {self.alpha:.4f}, S {self.speedup:.3f} at gamma {self.gamma} '
      f'(c {self.c:.3f}, v {self.v:g})'
    )


def promise(alpha: float, c: float, v: float = 1.0, max_gamma: int = 16) -> Score:
  """The best gamma for alpha, c and v, and its speedup.

  Raises:
    ValueError: a value out of range.

  Example:
    >>> str(promise(0.75, 0.02))
    'alpha 0.7500, S 3.199 at gamma 9 (c 0.020, v 1)'
  """
  gamma = theory.optimal_gamma(alpha, c, v, max_gamma)
  return Score(alpha, gamma, float(theory.speedup(alpha, gamma, c, v)), c, v)


class HeldOut(NamedTuple):
  """Prompts with the target's outputs, padded alike.

  Attributes:
    inputs_BE: int32.
    tokens_BS: int32; slot 0 is the start token.
    length_B: int32; 1 for rows that fill up a batch.
    sampling: the options of the outputs.
  """

  inputs_BE: jax.Array
  tokens_BS: jax.Array
  length_B: jax.Array
  sampling: types.Sampling


def held_out(
  target: types.Model,
  params: Any,
  vocabulary: text.Vocabulary,
  sources: Sequence[Sequence[int]],
  *,
  temperature: float,
  seed: int,
  max_new_tokens: int = 127,
) -> list[HeldOut]:
  """Lets the target answer prompts, in groups of like length.

  Args:
    target: whose law counts.
    params: its parameters.
    vocabulary: of the pair.
    sources: ids with EOS.
    temperature: of the outputs, and of the alpha measured on them.
    seed: of the sampling.
    max_new_tokens: longest output.
  """
  warp = warps.make_warp(vocabulary.size, vocabulary.eos_id)
  lengths = [len(source) for source in sources]
  found = []
  for padded, rows in text.group_by_length(lengths, _MAX_ROWS, _LENGTHS):
    num_rows = text.bucket_length(len(rows), (8, 16, 32, _MAX_ROWS))
    inputs_BE = jnp.asarray(text.pad([sources[i] for i in rows], padded, num_rows))
    is_filler_B = np.arange(num_rows) >= len(rows)
    sampling = warps.make_sampling(
      num_rows,
      temperature=temperature,
      max_new_tokens=np.where(is_filler_B, 1, max_new_tokens),
    )
    state = autoregressive.decode(
      types.Params(params),
      inputs_BE,
      rng.row_keys(seed, np.resize(rows, num_rows)),
      sampling,
      target=target,
      warp=warp,
      max_len=max_new_tokens + 1,
      eos_id=vocabulary.eos_id,
    )
    length_B = np.where(is_filler_B, 1, np.asarray(state.length_B))
    num_slots = min(
      text.bucket_length(int(length_B.max()), (32, 64, 96)), state.tokens_BS.shape[1]
    )
    tokens_BS = state.tokens_BS[:, :num_slots]
    found.append(HeldOut(inputs_BE, tokens_BS, jnp.asarray(length_B), sampling))
  return found


def measure_alpha(
  params: types.Params,
  prompts: Sequence[HeldOut],
  *,
  target: types.Model,
  draft: types.Model,
  warp: warps.Warp,
) -> float:
  """`metrics.alpha` over all prefixes of all prompts, in [0, 1]."""
  parts = [
    metrics.alpha(params, *each, target=target, draft=draft, warp=warp)
    for each in prompts
  ]
  return metrics.Alpha(
    np.concatenate([part.sum_B for part in parts]),
    np.concatenate([part.count_B for part in parts]),
  ).mean


class Selection(NamedTuple):
  """Keeps the best of a run's drafts.

  Attributes:
    observe: `(params, step) -> text`: measures, if it is time, and writes the best;
      '' if it is not.
    best: `() -> (step, Score)`; raises `ValueError` before the first measurement.
  """

  observe: Callable[[Any, int], str]
  best: Callable[[], tuple[int, Score]]


def make_selection(
  folder: Path,
  measure: Callable[[Any], Mapping[str, float]],
  write: Callable[[Path, Any, Mapping[str, Any]], None],
  *,
  c: float,
  v: float,
  measure_steps: int,
  total_steps: int,
  max_gamma: int = 16,
) -> Selection:
  """Keeps the draft of the largest S; ties go to the earlier one.

  `folder/scores.jsonl` has a line for every measurement, and says after a resumption
  what was best before it; `folder/best.safetensors` is the best.

  Args:
    folder: exists.
    measure: `params -> {'all': alpha, ...}`; 'all' counts, the rest is written down.
    write: `(path, params, notes)`, saves a draft.
    c: >= 0.
    v: > 0.
    measure_steps: steps between two measurements; the last step is measured too.
    total_steps: of the run.
    max_gamma: largest gamma to consider.
  """
  path = folder / 'scores.jsonl'

  def scores() -> Iterator[tuple[int, Score]]:
    if path.is_file():
      for line in path.read_text().splitlines():
        record = json.loads(line)
        yield record['step'], Score(*(record[name] for name in Score._fields))

  def best() -> tuple[int, Score]:
    return max(scores(), key=lambda each: (each[1].speedup, each[1].alpha, -each[0]))

  def observe(params: Any, step: int) -> str:
    if step % measure_steps and step != total_steps:
      return ''
    # What is left of later steps is of an interrupted run, which measures them anew.
    before = {at: score for at, score in scores() if at < step}
    alphas = measure(params)
    score = promise(alphas['all'], c, v, max_gamma)
    record = {'step': step, **score._asdict(), 'alphas': dict(alphas)}
    lines = [] if not path.is_file() else path.read_text().splitlines()
    lines = [line for line in lines if json.loads(line)['step'] in before]
    data = '\n'.join([*lines, json.dumps(record)]) + '\n'
    is_best = all(
      (score.speedup, score.alpha) > (other.speedup, other.alpha)
      for other in before.values()
    )
    if is_best:
      write(folder / 'best.safetensors', params, record)
    store.write_atomically(path, data.encode())
    return f'step {step}: {score}' + (', the best so far' if is_best else '')

  return Selection(observe, best)
