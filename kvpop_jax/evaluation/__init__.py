"""Evaluation: tasks, rollouts under a cache budget, grades, statistics, report.

In the order in which work passes through:

- `settings`: what is asked for (`EvalSettings`).
- `tasks`: one file per family of tasks, and a registry that finds them; `corpus` cuts running text for them, `files`
  reads their data.
- `contestants`: the policies at their budgets, each with its generator.
- `jobs`, `generation`, `reading`: what there is to do; tasks that generate, tasks that read text.
- `records`: the rollouts file, from which an interrupted evaluation goes on.
- `grading`, `code_running`, `statistics`: is an answer right; does a program pass its tests; how sure is a mean.
- `rows`, `averages`, `report`: results, comparisons, means over tasks; the terminal's tables, report.md, plots.
- `runner`: all of that in order (`run_evaluation`).
- `command`: what `eval.py` calls.

Only the settings are imported here, so that reading a configuration does not start everything else.
"""

from kvpop_jax.evaluation.settings import EvalSettings

__all__ = ["EvalSettings"]
