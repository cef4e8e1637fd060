"""What a task is: problems, prompts and grades, or text to read. The runner knows nothing else about it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvpop_jax.evaluation.settings import EvalSettings


@dataclass(frozen=True)
class Problem:
    """One question.

    Attributes:
        id: Names the problem within its task, the same in every run with the same settings.
        prompt: The user's message, before the chat template.
        answer: The reference answer, in whatever form the task's `grade` reads.
        group: Part of the task that gets a row of its own in the report (a problem family, a length); may be empty.
    """

    id: str
    prompt: str
    answer: str
    group: str = ""


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
        metric: Name of the mean grade: `pass@1` or `recall`.
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


def encode_prompt(tokenizer: Any, message: str) -> list[int]:
    """Token ids of a user's message under the tokenizer's chat template, or as plain text when it has none."""
    if not tokenizer.chat_template:
        return list(tokenizer(message)["input_ids"])
    turns = [{"role": "user", "content": message}]
    return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))
