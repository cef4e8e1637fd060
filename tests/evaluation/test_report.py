"""Rows, comparisons, tables and plots from rollouts of known grades."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest

from kvpop_jax.evaluation.averages import averages
from kvpop_jax.evaluation.records import Rollout
from kvpop_jax.evaluation.report import format_results, format_table, write_report
from kvpop_jax.evaluation.rows import differences, summarise

CACHE = {
    "sinks": 4,
    "window": 16,
    "pool": 44,
    "state_entries": 0,
    "scratch": 0,
    "peak_live": 64,
    "allocated": 64,
    "bytes": 4096,
    "cache_dtype": "float32",
    "prompt_survival": 0.25,
    "total_budget": 128,
    "layer_budget": (80, 48),
    "layer_peak_live": (80, 47),
    "layer_allocated": (80, 48),
    "layer_bytes": (2560, 1536),
}
DENSE = CACHE | {"prompt_survival": 1.0, "peak_live": 300, "bytes": 8192}


@pytest.fixture
def rollouts_of(a_rollout) -> Callable[..., list[Rollout]]:
    """Makes one rollout per score, on problems p0, p1, ... in two alternating groups."""

    def make(policy: str, budget: int | None, scores: list[float], **changes: object) -> list[Rollout]:
        return [
            dataclasses.replace(
                a_rollout(f"{policy}-{budget}-{number}"),
                policy=policy,
                budget=budget,
                problem=f"p{number}",
                group=f"length {512 * (1 + number % 2)}",
                grade={"pass@1": score},
                cache=DENSE if budget is None else CACHE,
                **changes,
            )
            for number, score in enumerate(scores)
        ]

    return make


@pytest.fixture
def rollouts(rollouts_of) -> list[Rollout]:
    right = [1.0] * 9 + [0.0]
    return list(
        itertools.chain(
            rollouts_of("streaming_llm", 64, [1.0, 0.0] * 5, finish_reason="length"),
            rollouts_of("streaming_llm", 128, [1.0, 1.0, 0.0, 1.0, 0.0] * 2),
            rollouts_of("kvpop", 64, right),
            rollouts_of("dense", None, right),
        )
    )


def whole(rollouts: list[Rollout]):
    return summarise(rollouts, model="m", contexts={"tiny_math": 256}, pin_prompt=False, seed=0)


@pytest.mark.core
def test_rows_state_value_compression_retained_and_costs(rollouts):
    rows = [row for row in whole(rollouts) if not row.group]
    assert [(row.policy, row.budget) for row in rows] == [
        ("dense", None),
        ("streaming_llm", 128),
        ("streaming_llm", 64),
        ("kvpop", 64),
    ]
    dense, _, streaming, kvpop = rows
    assert dense.value == pytest.approx(0.9)
    assert (dense.compression, dense.retained) == (0.0, 1.0)
    assert (streaming.value, streaming.compression) == (pytest.approx(0.5), 0.75)
    assert streaming.retained == pytest.approx(0.5 / 0.9)
    assert (kvpop.retained, kvpop.retained_low, kvpop.retained_high) == (1.0, 1.0, 1.0)
    assert (streaming.cut_share, kvpop.cut_share) == (1.0, 0.0)
    assert (kvpop.n, kvpop.tokens, kvpop.seconds, kvpop.mean_length) == (10, 200, 5.0, 20.0)
    assert (kvpop.cache_bytes, kvpop.prompt_survival, kvpop.peak_live, kvpop.allocated) == (4096, 0.25, 64, 64)
    assert (kvpop.total_budget, kvpop.layer_budget, kvpop.layer_peak_live) == (128, (80, 48), (80, 47))
    assert (kvpop.layer_allocated, kvpop.layer_bytes) == ((80, 48), (2560, 1536))


def test_groups_get_rows_of_their_own_in_natural_order(rollouts):
    groups = list(dict.fromkeys(row.group for row in whole(rollouts)))
    assert groups == ["", "length 512", "length 1024"]


@pytest.mark.core
def test_policies_are_compared_only_at_equal_budgets(rollouts):
    found = differences(rollouts, seed=0)
    assert [(d.reference, d.policy, d.budget) for d in found] == [("kvpop", "streaming_llm", 64)]
    assert found[0].value == pytest.approx(0.4)
    assert 0 < found[0].low < 0.4 < found[0].high


def test_nothing_is_compared_when_only_the_dense_model_ran(rollouts_of):
    assert differences(rollouts_of("dense", None, [1.0]), seed=0) == []


def test_text_metrics_have_window_intervals_and_no_retained_likelihood(rollouts_of):
    rollouts = [
        dataclasses.replace(rollout, task="lm", grade={"nll": 2.0 + 0.1 * number, "agreement": 0.5, "kl": 0.0})
        for number, rollout in enumerate(rollouts_of("dense", None, [0.0] * 4))
    ]
    rows = summarise(rollouts, model="m", contexts={"lm": 512}, pin_prompt=False, seed=0)
    by_metric = {row.metric: row for row in rows if not row.group}
    assert by_metric["nll"].value == pytest.approx(2.15)
    assert by_metric["nll"].retained is None
    assert by_metric["agreement"].retained == 1.0
    assert by_metric["nll"].low < 2.15 < by_metric["nll"].high


def test_the_terminal_table_is_aligned_and_names_pinning(rollouts):
    rows = summarise(rollouts, model="m", contexts={"tiny_math": 256}, pin_prompt=True, seed=0)
    lines = format_table(rows[:4]).splitlines()
    assert len(lines) == 6
    assert "kvpop (prompt pinned)" in lines[5]
    assert "dense  " in lines[2]
    column = lines[0].index("compression") + len("compression")
    assert all(line[column - 1] == "%" for line in lines[2:])


def test_what_a_run_prints_says_what_every_budget_was_spent_on(rollouts):
    text = format_results(whole(rollouts))
    accounts = text.split("\n\n")[1].splitlines()
    assert accounts[0].split()[:7] == ["policy", "budget", "sinks", "window", "pool", "state", "scratch"]
    spent = [line.split() for line in accounts[2:]]
    assert [cells[:2] for cells in spent] == [
        ["dense", "-"],
        ["streaming_llm", "128"],
        ["streaming_llm", "64"],
        ["kvpop", "64"],
    ]
    assert sum(map(int, spent[-1][2:6])) == 64
    assert "equal budgets" in text


def test_the_report_holds_the_table_the_comparison_and_a_plot(rollouts, tmp_path):
    path = write_report(tmp_path, whole(rollouts), differences(rollouts, seed=0), "Conditions.")
    text = path.read_text()
    assert "equal budgets" in text
    assert "| tiny_math | 64 | pass@1 | streaming_llm | +0.400 |" in text
    assert "(tiny_math.png)" in text
    assert (tmp_path / "tiny_math.png").read_bytes().startswith(b"\x89PNG")


def test_a_group_is_averaged_over_its_tasks_that_were_run_by_those_who_ran_them(rollouts_of, tmp_path):
    rollouts = [
        *rollouts_of("dense", None, [1.0, 1.0], task="one"),
        *rollouts_of("dense", None, [1.0, 0.0, 0.0, 1.0], task="two"),
        *rollouts_of("tova", 64, [0.0, 1.0], task="one"),
    ]
    groups = {"both": ("one", "two", "three"), "single": ("one",)}
    (average,) = averages(rollouts, groups, seed=0)
    assert (average.group, average.policy, average.budget) == ("both", "dense", None)
    assert (average.value, average.tasks) == (0.75, 2)
    assert 0.5 <= average.low < 0.75 < average.high <= 1.0
    rows = summarise(rollouts, model="m", contexts={"one": 256, "two": 256}, pin_prompt=False, seed=0)
    text = write_report(tmp_path, rows, [], "Conditions.", [average]).read_text()
    assert "## Averages over tasks" in text and "| both | dense | - | 0.750 |" in text
