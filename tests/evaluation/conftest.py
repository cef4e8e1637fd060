"""Shared by the evaluation tests: a rollout to vary."""

from collections.abc import Callable

import pytest

from kvpop_jax.evaluation.records import Rollout


@pytest.fixture
def a_rollout() -> Callable[..., Rollout]:
    """Makes a graded rollout with the given key."""
    return _rollout


def _rollout(key: str = "k") -> Rollout:
    return Rollout(
        key=key,
        task="tiny_math",
        group="chain",
        problem="chain-0",
        policy="kvpop",
        budget=128,
        rollout=0,
        seed=5,
        prompt="find x — ☃\n",
        text="answer : 0 0 1\u2028",
        prompt_tokens=10,
        tokens=20,
        finish_reason="stop",
        grade={"pass@1": 1.0},
        extracted="0 0 1",
        seconds=0.5,
        cache={"bytes": 1024},
    )
