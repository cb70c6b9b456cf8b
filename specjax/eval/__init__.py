"""Measuring: what speculation promises, what it does, and why.

  theory    the paper's formulas: E[tokens], speedup, the best gamma
  variants  lenience, beams, dependent acceptances, drafts of drafts
  metrics   counts from the loop's trace, alpha from the text, latencies
  steps     c, v and the loop's overhead, from the steps timed alone
  interleave  whole runs timed in turns, and the types of measurements
  diagnose  does it pay, what is to blame, what would be better
  trace     coloured text: which token came from where
  report    tables

`bench` is a command: ours, T5X and Hugging Face side by side (`cases` makes what
they decode, `systems` runs them).
`pair_report` is a command: alpha and quality of a pair on the embedded corpus.

Names are defined in docs/metrics.md.
"""
