"""T5 1.1 small from random weights, as T5 was pre-trained: span corruption.

15% of the tokens, spans of mean length 3, sources of 512 ids; Adafactor with T5's
inverse square root of the step. A text file has one document a line:

  python -m specjax.train --config configs/pretrain_spans.py \
      --data spans:text.txt --vocabulary spiece.model --folder runs/pretrain
"""

from specjax.models.t5 import T5Config
from specjax.train.config import DataConfig, EvalConfig, FitConfig, TrainConfig

CONFIG = TrainConfig(
  model=T5Config.from_size('t5_1_1_small', dtype='bfloat16'),
  fit=FitConfig(
    total_steps=524_288,
    learning_rate=1.0,  # over sqrt(max(step, 10,000))
    warmup_steps=10_000,
    schedule='rsqrt',
    checkpoint_seconds=1800.0,
    log_steps=100,
  ),
  data=DataConfig(
    mixture=(('spans:text.txt', 1.0),),
    buckets=((512, 114),),
    tokens_per_batch=128 * (512 + 114),
  ),
  eval=EvalConfig(sources=()),
)
