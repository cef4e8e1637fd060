"""The rollouts file: one JSON line per finished rollout, appended as they finish, so that nothing is done twice."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpop_jax import jsonl
from kvpop_jax.errors import UserError


@dataclass(frozen=True)
class Rollout:
    """One completion of one problem by one policy at one budget (for a text task: one window read through the cache).

    Attributes:
        key: Identifies the rollout among all possible ones (see `rollout_key`).
        task, group, problem, policy: Names; `group` is the task's own subdivision.
        budget: Entries per KV head; null for dense.
        rollout: Number of the rollout of its problem.
        seed: What its sampling was seeded with.
        prompt: The problem's text and the answer's opening, without the chat template; of a text task, nothing.
        text: The completion.
        prompt_tokens, tokens: Lengths; `tokens` counts those generated (or scored).
        finish_reason: "stop", or "length" when it was cut at the limit.
        grade: Score by metric name: {"pass@1": 1.0}.
        extracted: What was taken for the answer.
        seconds: Time since the rollout before it was finished, so that all of them sum to the time that passed; of a
            text task, its share of its batch's time.
        cache: The budget's parts and the memory behind it, as the generator reports them.
    """

    key: str
    task: str
    group: str
    problem: str
    policy: str
    budget: int | None
    rollout: int
    seed: int
    prompt: str
    text: str
    prompt_tokens: int
    tokens: int
    finish_reason: str
    grade: dict[str, float]
    extracted: str | None
    seconds: float
    cache: dict[str, Any]


def derived_seed(seed: int, problem: str, rollout: int) -> int:
    """A rollout's own seed in [0, 2**31): the same for every policy, budget, batch and order of work."""
    digest = hashlib.blake2b(f"{seed}\0{problem}\0{rollout}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def rollout_key(conditions: Mapping[str, Any], problem: str, prompt: str, seed: int) -> str:
    """Hash of everything a rollout depends on: two rollouts with one key are the same work.

    Args:
        conditions: Model, scorer, task, policy, budget, sampling and whatever else shapes the result; JSON values.
        problem: The problem's id.
        prompt: Its text (or token ids), so that a task that changed is not mistaken for the old one.
        seed: The rollout's own seed.
    """
    described = json.dumps([dict(conditions), problem, prompt, seed], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def read_rollouts(path: Path) -> dict[str, Rollout]:
    """Finished rollouts by key; an unfinished last line (the run was killed while writing it) is cut off the file.

    Raises:
        UserError: Any other line is not a rollout.
    """
    found = {}
    for number, line in enumerate(jsonl.whole_lines(path), start=1):
        try:
            rollout = Rollout(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}: line {number} is not a rollout of this version; move the file away") from error
        found[rollout.key] = rollout
    return found


def append_rollouts(path: Path, rollouts: Iterable[Rollout]) -> None:
    """Adds the rollouts to the file's end, one line each."""
    jsonl.append(path, map(dataclasses.asdict, rollouts))
