"""Shipped test aids: exact laws, statistics, toys, adversaries and mutants.

What a new drafter, rule or model is held against:

  enumerate_law  the exact law of the whole loop, without sampling
  rational       the same in fractions, from the papers: the oracle's oracle
  quadrature     the exact law of a compiled round: midpoints for random numbers
  chi_square     one-sample tests of counts against an exact law
  evidence       e-values, and a certified bound of the total variation
  controlled     a rule that accepts at a given rate; for timing only, not exact
  drafters       drafters that try to break the loop
  mutants        known faults, which a suite that proves anything must detect
  report         `python -m specjax.testing.report`: all of this on one page
  toy            the compiled loop on tables, with its law
  loops          `while_loop` in Python, to run the loop without compiling
  tiny_t5        random T5s of a few thousand parameters
"""
