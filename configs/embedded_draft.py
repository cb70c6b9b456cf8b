"""The embedded pair's draft: 0.89M parameters, 3 encoder layers, 1 decoder layer.

A step of it costs a fraction of the target's; the encoder, which runs once per
source, has more layers. Distilled from the target's own answers.

  python -m specjax.train.distill --config configs/embedded_draft.py \
      --target specjax/assets/target.safetensors --folder runs/embedded_draft
"""

from specjax.models.t5 import T5Config
from specjax.train.config import DataConfig, DistillConfig, FitConfig

CONFIG = DistillConfig(
  model=T5Config(
    # The target's vocabulary, and the same padding.
    vocab_size=4224,
    emb_dim=96,
    num_heads=2,
    head_dim=48,
    mlp_dim=256,
    num_encoder_layers=3,
    num_decoder_layers=1,
    logits_via_embedding=True,
  ),
  fit=FitConfig(total_steps=22000, checkpoint_seconds=180.0, log_steps=500),
  data=DataConfig(
    mixture=(('ende', 1.0), ('summ', 1.0), ('fix', 1.0)), tokens_per_batch=2048
  ),
)
