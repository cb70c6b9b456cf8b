"""The paper's pairs: T5 1.1 XXL with small, base and large, gammas of its Table 2.

  python -m specjax.run --config paper/ende_small_t0@v4 --input sources.txt

Names are TASK_DRAFT_TEMPERATURE@MACHINE: ende (WMT English to German) or cnndm (CNN /
Daily Mail); t0 is greedy, t1 samples; machines are those of `specjax.published`. The
paper has one v4 chip and batch size 1. Its checkpoints were fine-tuned on each task
and are not public: the addresses are of the public ones that fine-tuning starts from,
so name your own with --model and --draft_model.

Leviathan, Kalman, Matias, ICML 2023, Table 2 (arXiv 2211.17192).
"""

from specjax.published import MACHINES, T5_1_1, run_config

# Task, draft, temperature, gamma.
ROWS = (
  ('ende', 'small', 0, 7),
  ('ende', 'base', 0, 7),
  ('ende', 'large', 0, 7),
  ('ende', 'small', 1, 7),
  ('ende', 'base', 1, 5),
  ('ende', 'large', 1, 3),
  ('cnndm', 'small', 0, 5),
  ('cnndm', 'base', 0, 5),
  ('cnndm', 'large', 0, 3),
  ('cnndm', 'small', 1, 5),
  ('cnndm', 'base', 1, 3),
  ('cnndm', 'large', 1, 3),
)

CONFIGS = {
  f'{task}_{draft}_t{temperature}@{name}': run_config(
    T5_1_1['t5_1_1_xxl'],
    T5_1_1[f't5_1_1_{draft}'],
    machine,
    num_draft=num_draft,
    temperature=float(temperature),
  )
  for task, draft, temperature, num_draft in ROWS
  for name, machine in MACHINES.items()
}
