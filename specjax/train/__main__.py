"""`python -m specjax.train`: trains a T5, see docs/training.md."""

from specjax.train.config import run_command
from specjax.train.train import main

if __name__ == '__main__':
  run_command(main)
