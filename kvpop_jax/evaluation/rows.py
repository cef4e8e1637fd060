"""From rollouts to results: one row per task, policy, budget and metric, and comparisons at equal budgets."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvpop_jax.evaluation import statistics
from kvpop_jax.evaluation.records import Rollout
from kvpop_jax.evaluation.statistics import Estimate

LOWER_IS_BETTER = ("nll", "kl")  # in nats: no zero to divide from
TOKEN_METRICS = ("nll", "agreement", "kl")


@dataclass(frozen=True)
class Row:
    """One result.

    Attributes:
        model: What was evaluated.
        task, group: The task, and the part of it this row is about; an empty group is the whole task.
        policy: The eviction policy.
        budget: Entries per KV head, everything counted; null for dense.
        compression: 1 - budget / context; 0 for dense.
        context: The task's recorded constant that compression is measured against, in tokens.
        metric: `nll` or `kl` (nats per token); any other (`pass@1`, `recall`, `agreement`, ...) is better when higher.
        value, low, high: The estimate and its 95 % interval; null where there is none.
        n: Problems (or text windows) behind it.
        retained, retained_low, retained_high: `value` over the dense model's on the same problems, with the interval of
            that ratio; null for metrics that have no zero to divide from, and without a dense row.
        tokens: Tokens generated (or scored) in all.
        seconds: Time that took, compilation included.
        mean_length: Mean tokens of a completion.
        cut_share: Share of completions cut at the length limit.
        prompt_survival: Mean share of the prompt's tokens still cached at the end, over layers and heads.
        pin_prompt: Whether the prompt was exempt from eviction.
        sinks, window, pool, state_entries: What the budget was spent on, in entries per KV head; they add up to it.
        scratch: Slots a step needs beyond the budget.
        peak_live, allocated: Most entries per KV head that were ever live, and slots allocated.
        cache_bytes: Bytes of one sequence's cache with scales and the policy's state, all layers.
        cache_dtype: Type of the cached keys and values.
        total_budget: Entries per KV head, summed over layers: two rows are compared only at equal totals.
        layer_budget, layer_peak_live, layer_allocated, layer_bytes: The same by layer.
    """

    model: str
    task: str
    group: str
    policy: str
    budget: int | None
    compression: float
    context: int
    metric: str
    value: float
    low: float | None
    high: float | None
    n: int
    retained: float | None
    retained_low: float | None
    retained_high: float | None
    tokens: int
    seconds: float
    mean_length: float
    cut_share: float
    prompt_survival: float
    pin_prompt: bool
    sinks: int
    window: int
    pool: int
    state_entries: int
    scratch: int
    peak_live: int
    allocated: int
    cache_bytes: int
    cache_dtype: str
    total_budget: int
    layer_budget: tuple[int, ...]
    layer_peak_live: tuple[int, ...]
    layer_allocated: tuple[int, ...]
    layer_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Difference:
    """`reference` minus `policy` at one budget on the same problems, with its paired 95 % interval."""

    task: str
    budget: int
    metric: str
    reference: str
    policy: str
    value: float
    low: float
    high: float
    n: int


def summarise(
    rollouts: Sequence[Rollout], *, model: str, contexts: dict[str, int], pin_prompt: bool, seed: int
) -> list[Row]:
    """The rows of all rollouts, whole tasks before their groups, dense first and then by falling budget.

    Args:
        rollouts: In the order of the policies asked for.
        model: Name for the `model` column.
        contexts: Context of each task.
        pin_prompt: As the rollouts were made.
        seed: Seed of the bootstrap.
    """
    rows = []
    for task in dict.fromkeys(rollout.task for rollout in rollouts):
        of_task = [rollout for rollout in rollouts if rollout.task == task]
        groups = sorted({rollout.group for rollout in of_task} - {""}, key=_natural)
        for group in ["", *(groups if len(groups) > 1 else [])]:
            part = [rollout for rollout in of_task if group in ("", rollout.group)]
            for metric in part[0].grade:
                dense_P = _means_by_problem([rollout for rollout in part if rollout.budget is None], metric)
                for chosen in _by_contestant(part):
                    rows.append(_row(chosen, metric, dense_P, model, group, contexts[task], pin_prompt, seed))
    return rows


def differences(rollouts: Sequence[Rollout], *, seed: int) -> list[Difference]:
    """Paired differences of every bounded policy from the reference, task by task and only at equal budgets.

    The reference is `kvpop` where it was run, else the first bounded policy.
    """
    bounded = [rollout for rollout in rollouts if rollout.budget is not None]
    policies = list(dict.fromkeys(rollout.policy for rollout in bounded))
    if not policies:
        return []
    reference = "kvpop" if "kvpop" in policies else policies[0]
    found = []
    for task, budget in dict.fromkeys((rollout.task, rollout.budget or 0) for rollout in bounded):
        part = [rollout for rollout in bounded if (rollout.task, rollout.budget) == (task, budget)]
        for metric in part[0].grade:
            first = _means_by_problem([rollout for rollout in part if rollout.policy == reference], metric)
            for policy in policies:
                second = _means_by_problem([rollout for rollout in part if rollout.policy == policy], metric)
                shared = [problem for problem in first if problem in second]
                if policy == reference or not shared:
                    continue
                first_P, second_P = (np.array([means[problem] for problem in shared]) for means in (first, second))
                estimate = statistics.paired_difference(first_P, second_P, seed=seed)
                found.append(
                    Difference(
                        task, budget, metric, reference, policy, estimate.value, estimate.low, estimate.high, estimate.n
                    )
                )
    return found


def _row(
    rollouts: list[Rollout],
    metric: str,
    dense_P: dict[str, float],
    model: str,
    group: str,
    context: int,
    pin_prompt: bool,
    seed: int,
) -> Row:
    first = rollouts[0]
    estimate = _estimate(rollouts, metric, seed)
    retained = _retained(rollouts, metric, dense_P, seed)
    return Row(
        model=model,
        task=first.task,
        group=group,
        policy=first.policy,
        budget=first.budget,
        compression=0.0 if first.budget is None else 1 - first.budget / context,
        context=context,
        metric=metric,
        value=estimate.value,
        low=None if math.isnan(estimate.low) else estimate.low,
        high=None if math.isnan(estimate.high) else estimate.high,
        n=estimate.n,
        retained=None if retained is None else retained.value,
        retained_low=None if retained is None else retained.low,
        retained_high=None if retained is None else retained.high,
        tokens=sum(rollout.tokens for rollout in rollouts),
        seconds=sum(rollout.seconds for rollout in rollouts),
        mean_length=float(np.mean([rollout.tokens for rollout in rollouts])),
        cut_share=float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
        prompt_survival=float(np.mean([rollout.cache["prompt_survival"] for rollout in rollouts])),
        pin_prompt=pin_prompt,
        sinks=first.cache["sinks"],
        window=first.cache["window"],
        pool=first.cache["pool"],
        state_entries=first.cache["state_entries"],
        scratch=first.cache["scratch"],
        peak_live=max(rollout.cache["peak_live"] for rollout in rollouts),
        allocated=max(rollout.cache["allocated"] for rollout in rollouts),
        cache_bytes=max(rollout.cache["bytes"] for rollout in rollouts),
        cache_dtype=first.cache["cache_dtype"],
        total_budget=first.cache["total_budget"],
        layer_budget=tuple(first.cache["layer_budget"]),
        **{part: _largest(rollouts, part) for part in ("layer_peak_live", "layer_allocated", "layer_bytes")},
    )


def _largest(rollouts: list[Rollout], part: str) -> tuple[int, ...]:
    """Layer by layer the largest of any rollout."""
    return tuple(map(max, zip(*(rollout.cache[part] for rollout in rollouts), strict=True)))


def _estimate(rollouts: list[Rollout], metric: str, seed: int) -> Estimate:
    if metric not in TOKEN_METRICS:
        return statistics.pass_at_1(list(_by_problem(rollouts, metric).values()), seed=seed)
    estimate = statistics.mean_interval(np.array(list(_means_by_problem(rollouts, metric).values())))
    if metric == "agreement":  # a share: Student's interval does not know that it ends at 0 and 1
        return replace(estimate, low=max(0.0, estimate.low), high=min(1.0, estimate.high))
    return estimate


def _retained(rollouts: list[Rollout], metric: str, dense: dict[str, float], seed: int) -> Estimate | None:
    if metric in LOWER_IS_BETTER:
        return None
    own = _means_by_problem(rollouts, metric)
    shared = [problem for problem in own if problem in dense]
    if not shared:
        return None
    own_P, dense_P = (np.array([means[problem] for problem in shared]) for means in (own, dense))
    return statistics.paired_ratio(own_P, dense_P, seed=seed)


def _by_problem(rollouts: list[Rollout], metric: str) -> dict[str, list[float]]:
    scores = defaultdict(list)
    for rollout in rollouts:
        scores[rollout.problem].append(rollout.grade[metric])
    return scores


def _means_by_problem(rollouts: list[Rollout], metric: str) -> dict[str, float]:
    return {problem: float(np.mean(values)) for problem, values in _by_problem(rollouts, metric).items()}


def _by_contestant(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """The rollouts of each (policy, budget): dense first, then by falling budget in the order of the policies."""
    found: dict[tuple[str, int | None], list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        found[rollout.policy, rollout.budget].append(rollout)
    ordered = sorted(found, key=lambda contestant: -math.inf if contestant[1] is None else -contestant[1])
    return [found[contestant] for contestant in ordered]


def _natural(group: str) -> list[tuple[bool, int, str]]:
    """Orders "length 512" before "length 1024"."""
    return [(word.isdigit(), int(word) if word.isdigit() else 0, word) for word in group.split()]
