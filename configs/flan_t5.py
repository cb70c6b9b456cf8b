"""Flan-T5 pairs (Chung et al. 2022): follow instructions as they are.

  python -m specjax.run --config flan_t5/xxl_small@h100 --input sources.txt

Names are TARGET_DRAFT@MACHINE: a target of base, large, xl, xxl, any smaller
draft, and a machine of `specjax.published` that holds both. Greedy; options override.
"""

from specjax.published import FLAN_T5, family_configs

CONFIGS = family_configs(FLAN_T5)
