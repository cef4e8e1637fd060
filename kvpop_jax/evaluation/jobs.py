"""One unit of work: one problem, or one text window, under one policy at one budget."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from kvpop_jax.evaluation.contestants import Contestant
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.evaluation.tasks import Problem, Window
from kvpop_jax.inference import BatchStatistics
from kvpop_jax.models import LoadedModel

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What one rollout needs.

    Attributes:
        key: The rollout's key in rollouts.jsonl.
        contestant: Policy and budget.
        item: The problem or the text window.
        prompt: Its token ids; of a window, the prefix only.
        rollout: Number of the rollout of its problem.
        seed: Seed of its sampling.
    """

    key: str
    contestant: Contestant
    item: Problem | Window
    prompt: tuple[int, ...]
    rollout: int
    seed: int


class Progress(Protocol):
    """What is told of work under way."""

    def tokens(self, count: int) -> None:
        """So many tokens were scored."""

    def batch(self, contestant: Contestant, statistics: BatchStatistics) -> None:
        """How the contestant's batch stands."""


def conditions(contestant: Contestant, task: str, model: LoadedModel, settings: EvalSettings) -> dict[str, Any]:
    """Everything but the problem and the seed that a rollout of the contestant depends on, as JSON values."""
    found: dict[str, Any] = {"model": model.fingerprint, "task": task, "policy": contestant.policy}
    found |= {"dtype": model.dtype.name, "cache_dtype": contestant.generator.cache_dtype}
    if contestant.budget is None:
        return found
    return found | {
        "budget": contestant.budget,
        "sinks": contestant.sinks,
        "window": contestant.window,
        "pin_prompt": settings.pin_prompt,
        "scorer": contestant.scorer_fingerprint,
        "methods": dataclasses.asdict(settings.methods),
    }


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items in runs of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
