"""What benchmarks of many tasks are summed up by: the mean of a group's task means, as RULER and LongBench print it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvpop_jax.evaluation import statistics
from kvpop_jax.evaluation.records import Rollout


@dataclass(frozen=True)
class Average:
    """The mean over the tasks of a group of a policy's mean grades, every task with the same weight.

    `tasks` says how many there are: fewer than the group has, when not all were run. The 95 % interval resamples the
    problems of each task apart.
    """

    group: str
    policy: str
    budget: int | None
    value: float
    low: float
    high: float
    tasks: int


def averages(rollouts: Sequence[Rollout], groups: Mapping[str, Sequence[str]], *, seed: int) -> list[Average]:
    """An average for each group of which at least two tasks were run, and each contestant that ran all of those.

    Args:
        rollouts: With one metric a task, in the order of the policies asked for.
        groups: The tasks of each group.
        seed: Seed of the bootstrap.
    """
    scores: dict[tuple[str, int | None], dict[str, dict[str, list[float]]]] = {}
    for rollout in rollouts:
        of_task = scores.setdefault((rollout.policy, rollout.budget), {}).setdefault(rollout.task, {})
        of_task.setdefault(rollout.problem, []).append(next(iter(rollout.grade.values())))
    run = {rollout.task for rollout in rollouts}
    found = []
    for group, members in groups.items():
        names = [name for name in members if name in run]
        for (policy, budget), by_task in scores.items():
            if len(names) < 2 or any(name not in by_task for name in names):
                continue
            means = [np.array([np.mean(values) for values in by_task[name].values()]) for name in names]
            estimate = statistics.mean_of_means(means, seed=seed)
            found.append(Average(group, policy, budget, estimate.value, estimate.low, estimate.high, len(names)))
    return found
