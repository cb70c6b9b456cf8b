"""Fine-tunes any checkpoint on pairs of texts, as T5 does: constant rate, Adafactor.

The shape is the checkpoint's, the vocabulary what lies beside it.

  python -m specjax.train --config configs/finetune.py --init flan-t5-small \
      --data train.tsv --valid valid.tsv --folder runs/finetune
"""

from specjax.models.t5 import T5Config
from specjax.train.config import DataConfig, EvalConfig, FitConfig, TrainConfig

CONFIG = TrainConfig(
  model=T5Config.from_size('t5_1_1_small'),  # without --init
  fit=FitConfig(
    total_steps=2000,
    learning_rate=1e-3,
    warmup_steps=0,
    decay_fraction=0.0,
    checkpoint_seconds=600.0,
  ),
  data=DataConfig(
    mixture=(('train.tsv', 1.0),),
    buckets=((64, 64), (128, 128), (256, 128), (512, 128), (512, 512)),
    tokens_per_batch=16_384,
  ),
  eval=EvalConfig(decode_examples=64),
)
