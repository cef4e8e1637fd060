"""What a task is: problems, prompts and grades, or text to read. The runner knows nothing else about it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.models import Style, encode_prompt


@dataclass(frozen=True)
class Problem:
    """One question.

    Attributes:
        id: Names the problem within its task, the same in every run with the same settings.
        prompt: The user's message, before the chat template.
        answer: The reference answer, in whatever form the task's `grade` reads (JSON where there are several).
        group: Part of the task that gets a row of its own in the report (a problem family, a length); may be empty.
        opening: What the assistant's turn begins with, for the model to go on from; may be empty.
        style: How the prompt is put to the model, see `encode_prompt`.
    """

    id: str
    prompt: str
    answer: str
    group: str = ""
    opening: str = ""
    style: Style = "chat"


@dataclass(frozen=True)
class Grade:
    """A score in [0, 1] (0 or 1 where an answer is right or wrong) and what was taken for the answer."""

    score: float
    extracted: str | None


@dataclass(frozen=True)
class GenerationTask:
    """A task whose problems are answered by generated text.

    Attributes:
        name: What `--tasks` calls it.
        metric: Name of the mean grade, higher being better: `pass@1`, `recall`, ...
        max_new_tokens: Longest completion unless the settings say otherwise.
        context: The recorded constant in tokens that compression is measured against.
        check: Raises `UserError` when a data file is missing; called before the model is loaded.
        problems: The problems, in a fixed order, at most `settings.problems` of them; the tokenizer is for tasks that
            are made to a length in tokens.
        grade: Judges one completion's text.
    """

    name: str
    metric: str
    max_new_tokens: Callable[[EvalSettings], int]
    context: Callable[[EvalSettings], int]
    check: Callable[[EvalSettings], None]
    problems: Callable[[EvalSettings, Any], list[Problem]]
    grade: Callable[[Problem, str], Grade]


@dataclass(frozen=True)
class Window:
    """A stretch of text: `tokens[:prefix]` is the prompt, the rest is predicted token by token."""

    id: str
    tokens: tuple[int, ...]
    prefix: int
    group: str = ""


@dataclass(frozen=True)
class TextTask:
    """A task that reads text through the policy's cache and compares the predictions with the dense model's.

    Metrics: `nll` (nats per token), `agreement` (share of tokens where the likeliest token is the dense model's) and
    `kl` (nats per token, of the dense distribution from the policy's).

    Attributes: as `GenerationTask`; `windows` gives the text, windows of one group all of one length.
    """

    name: str
    context: Callable[[EvalSettings], int]
    check: Callable[[EvalSettings], None]
    windows: Callable[[EvalSettings, Any], list[Window]]


Task = GenerationTask | TextTask


def encode_problem(tokenizer: Any, problem: Problem) -> list[int]:
    """Token ids of everything the model reads before it answers the problem."""
    return encode_prompt(tokenizer, problem.prompt, problem.opening, problem.style)
