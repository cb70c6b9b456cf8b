"""The throughput benchmark: both loops take as many steps, in turns."""

import pytest

from specjax.models import t5
from specjax.train import bench
from specjax.train.config import DataConfig, FitConfig, TrainConfig

CONFIG = TrainConfig(
  model=t5.T5Config(
    vocab_size=384,
    emb_dim=16,
    num_heads=2,
    head_dim=8,
    mlp_dim=32,
    num_encoder_layers=1,
    num_decoder_layers=1,
  ),
  fit=FitConfig(total_steps=3, warmup_steps=0, log_steps=2),
  data=DataConfig(
    mixture=(('pairs.tsv', 1.0),),
    buckets=((16, 8),),
    tokens_per_batch=96,
    vocabulary='bytes',
  ),
)


@pytest.mark.slow
def test_turns_have_the_same_steps_and_the_first_does_not_count(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'pairs.tsv').write_text(''.join(f'say {n}\t{n}\n' for n in range(40)))
  minimal = []

  def keep(loss_fn, optimizer, params):
    run = original(loss_fn, optimizer, params)

    def counted(batches):
      minimal.append(len(batches))
      return run(batches)

    return counted

  original = bench.minimal_loop
  monkeypatch.setattr(bench, 'minimal_loop', keep)
  turns, tokens = bench.compare(CONFIG, steps=2, turns=3)
  assert minimal == [2] * 4
  assert len(turns) == 3
  assert tokens == 4 * (16 + 8)
