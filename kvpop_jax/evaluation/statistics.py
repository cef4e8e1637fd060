"""How sure a mean is: bootstrap intervals over problems, paired comparisons, Student intervals for token metrics."""

from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95
RESAMPLES = 10_000
_CHUNK = 2**22  # resampled indices held at a time: 32 MB


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval and the number of independent units (problems, text windows) behind it."""

    value: float
    low: float
    high: float
    n: int


def pass_at_1(scores: list[list[float]], *, seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """Mean over problems of the mean score of a problem's rollouts, with a percentile bootstrap interval.

    Problems are resampled, each with all its rollouts, because rollouts of one problem are not independent. Problems
    that all score the same give an interval of zero width: resampling cannot see what it never drew.

    Args:
        scores: For each problem, the score in [0, 1] of each of its rollouts; at least one each.
        seed: Seed of the resampling.
        resamples: Number of bootstrap samples.
    """
    mean_P = np.array([np.mean(rollouts) for rollouts in scores])
    resampled_R = _resampled_means(mean_P[:, None], seed, resamples)[:, 0]
    return _percentile_estimate(float(mean_P.mean()), resampled_R, mean_P.size)


def paired_difference(
    first_P: np.ndarray, second_P: np.ndarray, *, seed: int = 0, resamples: int = RESAMPLES
) -> Estimate:
    """Mean of `first_P - second_P` over problems both were measured on, with a percentile bootstrap interval.

    Pairing removes the spread between easy and hard problems, so it tells two policies apart sooner than their own
    intervals do.

    Args:
        first_P: A problem's mean score (or any per-problem value), one a problem.
        second_P: The same of the other policy, the same problems in the same order.
    """
    difference_P = np.asarray(first_P, np.float64) - np.asarray(second_P, np.float64)
    resampled_R = _resampled_means(difference_P[:, None], seed, resamples)[:, 0]
    return _percentile_estimate(float(difference_P.mean()), resampled_R, difference_P.size)


def paired_ratio(
    first_P: np.ndarray, second_P: np.ndarray, *, seed: int = 0, resamples: int = RESAMPLES
) -> Estimate | None:
    """Ratio of the two means ("retained accuracy": a policy over dense), both resampled on the same problems.

    None where the second mean is 0 and the ratio is therefore undefined.
    """
    pair_P2 = np.stack([np.asarray(first_P, np.float64), np.asarray(second_P, np.float64)], axis=1)
    mean_2 = pair_P2.mean(axis=0)
    if mean_2[1] == 0:
        return None
    resampled_R2 = _resampled_means(pair_P2, seed, resamples)
    resampled_R2 = resampled_R2[resampled_R2[:, 1] != 0]
    ratio_R = resampled_R2[:, 0] / resampled_R2[:, 1]
    return _percentile_estimate(float(mean_2[0] / mean_2[1]), ratio_R, len(pair_P2))


def mean_of_means(tasks: list[np.ndarray], *, seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """Mean of the tasks' means, each resampled over its own problems; `n` counts all problems.

    Args:
        tasks: For each task, a score a problem.
    """
    value_TP = [np.asarray(value_P, np.float64) for value_P in tasks]
    resampled_TR = [
        _resampled_means(value_P[:, None], seed + task, resamples)[:, 0] for task, value_P in enumerate(value_TP)
    ]
    value = float(np.mean([value_P.mean() for value_P in value_TP]))
    return _percentile_estimate(value, np.mean(resampled_TR, axis=0), sum(value_P.size for value_P in value_TP))


def mean_interval(value_P: np.ndarray, *, level: float = LEVEL) -> Estimate:
    """Mean with the Student t interval of independent values (for token metrics: the means of whole text windows).

    Tokens of one window share their context and are not independent, so the window is the unit. A single value has no
    interval: low and high are NaN.
    """
    value_P = np.asarray(value_P, np.float64)
    mean = float(value_P.mean())
    if value_P.size < 2:
        return Estimate(mean, float("nan"), float("nan"), value_P.size)
    half = float(stats.t.ppf((1 + level) / 2, value_P.size - 1) * value_P.std(ddof=1) / np.sqrt(value_P.size))
    return Estimate(mean, mean - half, mean + half, value_P.size)


def _percentile_estimate(value: float, resampled_R: np.ndarray, n: int) -> Estimate:
    low, high = np.quantile(resampled_R, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high), n)


def _resampled_means(value_PM: np.ndarray, seed: int, resamples: int) -> np.ndarray:
    """Means of `resamples` draws of the P rows with replacement: [R, M]."""
    rng = np.random.default_rng(seed)
    count = len(value_PM)
    rows = max(1, _CHUNK // count)
    means = []
    for start in range(0, resamples, rows):
        drawn_RP = rng.integers(count, size=(min(rows, resamples - start), count))
        means.append(value_PM[drawn_RP].mean(axis=1))
    return np.concatenate(means)
