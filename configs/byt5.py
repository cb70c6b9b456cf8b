"""ByT5 pairs (Xue et al. 2022): bytes, deep encoders, shallow decoders.

  python -m specjax.run --config byt5/xxl_small@v6e-8 --input sources.txt

Names are TARGET_DRAFT@MACHINE: a target of base, large, xl, xxl, any smaller
draft, and a machine of `specjax.published` that holds both. Greedy; options override.
"""

from specjax.published import BYT5, family_configs

CONFIGS = family_configs(BYT5)
