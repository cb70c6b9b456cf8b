"""The verdict names the right term and follows the paper's formulas."""

import pytest

from specjax.eval import diagnose, metrics, theory


def test_a_copy_of_the_target_as_draft_gets_gamma_0():
  found = diagnose.diagnose(alpha=1.0, c=1.0, v=1.2, gamma=4, measured=0.8)
  assert found.best_gamma == 0
  assert found.best == 1.0
  assert found.blame == 'c'
  assert not found.pays
  text = diagnose.explain(alpha=1.0, c=1.0, v=1.2, gamma=4, measured=0.8)
  assert 'does not pay: 0.80x measured' in text
  assert 'costs 1.00 target steps (c)' in text
  assert 'Use gamma 0' in text


def test_verification_is_to_blame_on_a_cpu():
  found = diagnose.diagnose(alpha=0.62, c=0.22, v=2.1, gamma=4, measured=0.9)
  assert found.blame == 'v'
  assert found.predicted == pytest.approx(theory.speedup(0.62, 4, 0.22, 2.1))
  assert found.best_at_v1 == pytest.approx(
    theory.speedup(0.62, found.best_gamma_at_v1, 0.22)
  )
  text = diagnose.explain(alpha=0.62, c=0.22, v=2.1, gamma=4, measured=0.9)
  assert 'Verifying 5 tokens costs 2.10 one-token steps on this machine (v)' in text
  assert f'gamma {found.best_gamma_at_v1} the same pair would give' in text
  assert f'{found.best_at_v1:.2f}x' in text
  assert f'Gamma {found.best_gamma} would be better: {found.best:.2f}x' in text


def test_the_best_gamma_uses_the_measured_v_of_every_gamma():
  steep = [1.0, 3.0, 3.0, 3.0, 3.1]
  found = diagnose.diagnose(alpha=0.62, c=0.02, v=steep, gamma=4)
  assert found.best_gamma == 0  # one number for v would recommend 1 or 2
  assert diagnose.diagnose(alpha=0.62, c=0.02, v=3.1, gamma=4).best_gamma > 0
  text = diagnose.explain(alpha=0.62, c=0.02, v=steep, gamma=4)
  assert 'Use gamma 0 (plain decoding), or prompt lookup' in text


@pytest.mark.parametrize(
  ('alpha', 'c', 'v', 'gamma', 'excess', 'blame'),
  [
    (0.1, 0.2, 1.0, 4, 1.0, 'alpha'),  # alpha <= c, and a free draft would not do
    (0.9, 0.95, 1.0, 4, 1.0, 'c'),  # alpha <= c, and a perfect draft would not do
    (0.0, 0.0, 1.0, 4, 1.0, 'alpha'),
    (0.2, 0.02, 1.0, 4, 1.0, 'alpha'),  # no more than 1.25 whatever the rest
    (0.9, 0.6, 1.0, 3, 1.0, 'c'),
    (0.8, 0.05, 1.0, 5, 1.9, 'loop'),
    (0.75, 0.02, 1.0, 7, 1.0, 'nothing'),  # the paper's pair
    (1.0, 0.0, 1.0, 7, 1.0, 'nothing'),
  ],
)
def test_blame(alpha, c, v, gamma, excess, blame):
  found = diagnose.diagnose(alpha, c, v, gamma, excess=excess)
  assert found.blame == blame
  assert diagnose.explain(alpha, c, v, gamma, excess=excess).count('\n') >= 1


@pytest.mark.parametrize('alpha', [0.0, 0.1, 0.35, 0.62, 0.9, 1.0])
@pytest.mark.parametrize('c', [0.0, 0.02, 0.22, 1.0])
@pytest.mark.parametrize('v', [0.9, 1.0, 2.1, 4.0])
def test_advice_is_never_worse_and_a_loss_is_always_explained(alpha, c, v):
  found = diagnose.diagnose(alpha, c, v, gamma=4)
  assert found.best >= max(1.0, theory.speedup(alpha, 4, c, v)) - 1e-12
  if found.best_gamma == 0:
    assert found.best == 1.0
  if found.predicted < 1:
    assert found.blame != 'nothing'
  assert found.pays == (found.predicted > 1)


def test_counted_tokens_replace_eq_1_in_prediction_and_advice():
  """Prompt lookup: a draft in two calls of five, and then most of it accepted."""
  counts = metrics.Summary(
    num_target_calls=100,
    num_drafts=40,
    num_draft_tokens=160,
    num_accepted_tokens=98,
    num_corrections=14,
    num_emitted_tokens=198,
    num_eos_accepted=0,
    draft_tokens_per_position=(40, 40, 40, 40),
    accepted_tokens_per_position=(28, 25, 24, 21),
  )
  alpha, v = counts.alpha_estimate, [1.0, 2.0, 2.5, 2.7, 3.0, 3.0]
  found = diagnose.diagnose(alpha, 0.0, v, 4, tokens=counts.block_efficiency_at)
  assert found.predicted == pytest.approx(1.98 / 3.0)
  # One token is emitted where nothing is drafted, so no gamma reaches plain decoding.
  assert found.best_gamma == 0
  assert theory.speedup(alpha, 4, 0.0, v) > 1  # were every call to draft
  text = diagnose.explain(alpha, 0.0, v, 4, tokens=counts.block_efficiency_at)
  assert '0.66x predicted' in text
  assert 'Use gamma 0 (plain decoding)' in text
  # Another gamma is judged by the same counts.
  cheap = [1.0, 1.0, 1.1, 2.0, 3.0]
  found = diagnose.diagnose(alpha, 0.0, cheap, 4, tokens=counts.block_efficiency_at)
  assert found.best_gamma == 2
  assert found.best == pytest.approx(1.53 / 1.1)
  text = diagnose.explain(alpha, 0.0, cheap, 4, tokens=counts.block_efficiency_at)
  assert 'Gamma 2 would be better: 1.39x by theory, where gamma 4 gives 0.66x' in text


def test_a_measurement_far_below_the_prediction_is_said():
  text = diagnose.explain(0.8, 0.05, 1.0, 5, measured=1.5)
  assert 'Measured is 51% of predicted' in text
  assert 'Measured is' not in diagnose.explain(0.8, 0.05, 1.0, 5, measured=2.9)


def test_another_gamma_is_recommended_only_if_it_gains():
  assert 'Gamma 8 would be better' in diagnose.explain(0.8, 0.05, 1.0, 1)
  assert 'Gamma 7 is a good choice' in diagnose.explain(0.8, 0.05, 1.0, 7)


def test_gamma_0_has_nothing_to_diagnose():
  with pytest.raises(ValueError, match='gamma: 0'):
    diagnose.diagnose(0.5, 0.1, 1.0, 0)


def test_the_advice_never_contradicts_the_measured_verdict():
  text = diagnose.explain(0.5, 0.2, 2.5, 4, measured=1.2)
  assert 'Speculation pays: 1.20x measured, 0.59x predicted' in text
  assert 'Gamma 4 pays all the same' in text
  assert 'plain decoding' not in text
  text = diagnose.explain(0.8, 0.05, 1.0, 7, measured=0.9)
  assert 'does not pay: 0.90x measured' in text
  assert 'use plain decoding here' in text
  assert 'good choice' not in text
