"""The embedded pair's draft, second stage: from KL to TVD, which is 1 - alpha itself.

`embedded_draft` learns from a file of answers, which is cheap a step; here the
target runs along and gives its whole law, and the draft of the largest promised
speedup is kept.

  python -m specjax.train.distill --config configs/embedded_draft_tvd.py \
      --target specjax/assets/target.safetensors \
      --init runs/embedded_draft/model.safetensors --folder runs/embedded_draft_tvd
"""

from specjax.models.t5 import T5Config
from specjax.train.config import DataConfig, DistillConfig, FitConfig
from specjax.train.recipe import Recipe

CONFIG = DistillConfig(
  model=T5Config(
    # `embedded_draft`'s.
    vocab_size=4224,
    emb_dim=96,
    num_heads=2,
    head_dim=48,
    mlp_dim=256,
    num_encoder_layers=3,
    num_decoder_layers=1,
    logits_via_embedding=True,
  ),
  # A quarter of the first stage's rate, so that it is not unlearnt; falling soon.
  fit=FitConfig(
    total_steps=2000,
    learning_rate=2.5e-3,
    warmup_steps=100,
    decay_fraction=0.8,
    checkpoint_seconds=120.0,
    log_steps=50,
  ),
  data=DataConfig(
    # Corrections are nearly always accepted already.
    mixture=(('ende', 1.0), ('summ', 1.0), ('fix', 0.25)),
    tokens_per_batch=2048,
  ),
  recipe=Recipe(
    divergence='kl_then_tvd',
    data='fixed',
    warm_fraction=0.1,
    measure_steps=250,
    num_prompts=96,
  ),
)
