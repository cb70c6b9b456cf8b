"""Shipped test aids: exact laws, statistics, toys, adversaries and mutants.

What a new drafter, rule or model is held against:

  enumerate_law  the exact law of the whole loop, without sampling
  chi_square     one-sample tests of counts against an exact law
  drafters       drafters that try to break the loop
  mutants        known faults, which a suite that proves anything must detect
  loops          `while_loop` in Python, to run the loop without compiling
  tiny_t5        random T5s of a few thousand parameters
"""
