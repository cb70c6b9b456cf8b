"""The embedded pair's target: 6.1M parameters, 2 encoder and 4 decoder layers.

Deep rather than wide in the decoder, so that a draft of one layer is cheap
beside it; the tied embedding saves a sixth of the parameters.

  python -m specjax.train --config configs/embedded_target.py \
      --folder runs/embedded_target
"""

from specjax.models.t5 import T5Config
from specjax.train.config import DataConfig, FitConfig, TrainConfig

CONFIG = TrainConfig(
  model=T5Config(
    # 4096 pieces and 100 sentinels, rounded up to a multiple of 128.
    vocab_size=4224,
    emb_dim=256,
    num_heads=4,
    head_dim=64,
    mlp_dim=512,
    num_encoder_layers=2,
    num_decoder_layers=4,
    logits_via_embedding=True,
  ),
  fit=FitConfig(total_steps=3700),
  data=DataConfig(mixture=(('ende', 1.0), ('summ', 2.0), ('fix', 1.0))),
)
