"""Intervals against closed forms."""

import numpy as np
import pytest

from kvpop_jax.evaluation import statistics


@pytest.mark.core
def test_the_bootstrap_interval_of_a_rate_matches_the_binomial_one():
    problems, successes = 400, 300
    scores = [[1.0]] * successes + [[0.0]] * (problems - successes)
    estimate = statistics.pass_at_1(scores, seed=3)
    half = 1.96 * np.sqrt(0.75 * 0.25 / problems)
    assert estimate.value == 0.75
    assert estimate.n == problems
    # A 2.5 % quantile of 10,000 resamples is itself known to about 0.03 standard errors; 1/400 is the grid.
    assert estimate.low == pytest.approx(0.75 - half, abs=0.004)
    assert estimate.high == pytest.approx(0.75 + half, abs=0.004)


@pytest.mark.core
def test_rollouts_are_averaged_within_a_problem_before_problems_are_averaged():
    assert statistics.pass_at_1([[1.0, 0.0, 0.0, 0.0], [1.0]]).value == pytest.approx(0.625)


def test_more_rollouts_of_the_same_problems_do_not_narrow_the_interval():
    once = statistics.pass_at_1([[1.0]] * 30 + [[0.0]] * 30, seed=1)
    often = statistics.pass_at_1([[1.0] * 50] * 30 + [[0.0] * 50] * 30, seed=1)
    assert (once.low, once.high) == (often.low, often.high)


def test_the_same_seed_gives_the_same_interval_and_chunking_does_not_matter(monkeypatch):
    scores = [[float(index % 3 == 0)] for index in range(50)]
    whole = statistics.pass_at_1(scores, seed=7)
    assert statistics.pass_at_1(scores, seed=7) == whole
    monkeypatch.setattr(statistics, "_CHUNK", 50 * 1000)
    assert statistics.pass_at_1(scores, seed=7) == whole


def test_problems_that_all_score_the_same_give_a_point():
    estimate = statistics.pass_at_1([[1.0]] * 8)
    assert (estimate.value, estimate.low, estimate.high) == (1.0, 1.0, 1.0)


@pytest.mark.core
def test_a_paired_difference_is_tighter_than_its_parts_when_problems_decide():
    rng = np.random.default_rng(0)
    easy_P = (rng.random(300) < 0.5).astype(float)
    better_P = np.maximum(easy_P, rng.random(300) < 0.1)
    difference = statistics.paired_difference(better_P, easy_P, seed=2)
    spread = (better_P - easy_P).std(ddof=0) / np.sqrt(300)
    assert difference.value == pytest.approx((better_P - easy_P).mean())
    assert difference.high - difference.low == pytest.approx(2 * 1.96 * spread, rel=0.06)
    assert difference.low > 0


def test_a_policy_equal_to_dense_retains_exactly_everything():
    dense_P = np.array([1.0, 0.0, 1.0, 1.0, 0.0])
    ratio = statistics.paired_ratio(dense_P, dense_P)
    assert ratio == statistics.Estimate(1.0, 1.0, 1.0, 5)


def test_retained_of_a_dense_model_that_solves_nothing_is_undefined():
    assert statistics.paired_ratio(np.ones(4), np.zeros(4)) is None


def test_the_interval_of_window_means_is_students():
    estimate = statistics.mean_interval(np.array([1.0, 2.0, 3.0]))
    half = 4.302652729911275 / np.sqrt(3)  # t with 2 degrees of freedom at 0.975
    assert estimate.value == 2.0
    assert estimate.low == pytest.approx(2 - half, rel=1e-6)
    assert estimate.high == pytest.approx(2 + half, rel=1e-6)


def test_a_single_window_has_no_interval():
    estimate = statistics.mean_interval(np.array([1.5]))
    assert estimate.value == 1.5
    assert np.isnan([estimate.low, estimate.high]).all()


def test_tasks_weigh_the_same_however_many_problems_they_have():
    many_P, few_P = np.repeat([0.0, 1.0], 200), np.ones(10)
    estimate = statistics.mean_of_means([many_P, few_P])
    assert (estimate.value, estimate.n) == (0.75, 410)
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * 0.5 / np.sqrt(400) / 2, rel=0.06)
