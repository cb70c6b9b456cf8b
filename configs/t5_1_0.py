"""T5 1.0 pairs (Raffel et al. 2020): tied embeddings, supervised tasks mixed in.

  python -m specjax.run --config t5_1_0/11b_small@v5e-8 --input sources.txt

Names are TARGET_DRAFT@MACHINE: a target of base, large, 3b, 11b, any smaller
draft, and a machine of `specjax.published` that holds both. Greedy; options override.
"""

from specjax.published import T5_1_0, family_configs

CONFIGS = family_configs(T5_1_0)
