"""T5 1.1 pairs: pretrained only, to be fine-tuned.

  python -m specjax.run --config t5_1_1/xxl_small@v4-8 --input sources.txt

Names are TARGET_DRAFT@MACHINE: a target of base, large, xl, xxl, any smaller
draft, and a machine of `specjax.published` that holds both. Greedy; options override.
"""

from specjax.published import T5_1_1, family_configs

CONFIGS = family_configs(T5_1_1)
