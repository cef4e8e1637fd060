"""The rollouts file survives being killed, and a rollout's seed and key depend on the right things."""

import dataclasses

import pytest

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation.records import Rollout, append_rollouts, derived_seed, read_rollouts, rollout_key


@pytest.mark.core
def test_rollouts_come_back_as_they_were_written(a_rollout, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    append_rollouts(path, [a_rollout("a"), a_rollout("b")])
    append_rollouts(path, [a_rollout("c")])
    assert read_rollouts(path) == {key: a_rollout(key) for key in "abc"}


@pytest.mark.core
def test_a_line_cut_by_a_kill_is_dropped_and_the_next_one_starts_fresh(a_rollout, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    append_rollouts(path, [a_rollout("a"), a_rollout("b")])
    path.write_bytes(path.read_bytes()[:-30])
    assert set(read_rollouts(path)) == {"a"}
    append_rollouts(path, [a_rollout("b")])
    assert set(read_rollouts(path)) == {"a", "b"}


def test_a_foreign_line_is_refused_by_number(a_rollout, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    append_rollouts(path, [a_rollout("a")])
    with path.open("a") as file:
        file.write('{"some": "thing"}\n')
    with pytest.raises(UserError, match="line 2"):
        read_rollouts(path)


def test_no_file_means_nothing_is_finished(tmp_path):
    assert read_rollouts(tmp_path / "rollouts.jsonl") == {}


@pytest.mark.core
def test_seeds_differ_between_problems_and_rollouts_and_stay_fixed():
    seeds = {derived_seed(0, problem, rollout) for problem in ("a", "b") for rollout in range(50)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert derived_seed(0, "a", 0) == derived_seed(0, "a", 0) != derived_seed(1, "a", 0)


def test_every_condition_and_the_prompt_change_the_key():
    conditions = {"model": "m", "policy": "kvpop", "budget": 128, "sampling": {"temperature": 0.6}}
    base = rollout_key(conditions, "p", "text", 1)
    assert base == rollout_key(dict(reversed(conditions.items())), "p", "text", 1)
    others = [
        rollout_key(conditions | {"budget": 64}, "p", "text", 1),
        rollout_key(conditions | {"sampling": {"temperature": 0.0}}, "p", "text", 1),
        rollout_key(conditions, "q", "text", 1),
        rollout_key(conditions, "p", "another text", 1),
        rollout_key(conditions, "p", "text", 2),
    ]
    assert len({base, *others}) == 6


def test_fields_named_in_the_documentation_are_in_the_file():
    names = {field.name for field in dataclasses.fields(Rollout)}
    assert {"problem", "prompt", "text", "tokens", "seed", "grade"} <= names
