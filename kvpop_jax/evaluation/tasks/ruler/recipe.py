"""What the tasks of RULER share: a prompt of as many pieces as the length holds, and how answers are scored."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.evaluation.tasks.base import GenerationTask, Grade, Problem
from kvpop_jax.models import encode_prompt

DEFAULT_PROBLEMS_PER_LENGTH = 500
_SLACK = 1 / 512  # of the room that may stay empty: nearer is not worth tokenizing the prompt again
_BISECT_AFTER = 6  # guesses along the slope; a size that is no straight line is bisected from there on


@dataclass(frozen=True)
class Sample:
    """One prompt: the user's message, the beginning of the answer, and the strings a right answer contains."""

    message: str
    opening: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Draw:
    """What one problem is made from.

    Attributes:
        seed: Seeds everything random in it.
        number: Its number among those of its length.
        length: Tokens of prompt and answer.
        room: Tokens of the prompt: the length without the answer's.
        tokens: Counts the tokens of plain text.
    """

    seed: str
    number: int
    length: int
    room: int
    tokens: Callable[[str], int]


@dataclass(frozen=True)
class Growing:
    """A problem that can have any number of pieces (words, sentences, documents) from `least` to `most`."""

    least: int
    build: Callable[[int], Sample]
    most: int | None = None


@dataclass(frozen=True)
class Recipe:
    """How a task of RULER is made.

    Attributes:
        name: RULER's own name.
        metric: RULER's own name of its metric.
        answer_tokens: `tokens_to_generate`.
        check: Raises `UserError` when a file is missing.
        open: Reads the files once, and gives the function that draws problems from them.
    """

    name: str
    metric: Literal["string_match_all", "string_match_part"]
    answer_tokens: int
    check: Callable[[EvalSettings], object]
    open: Callable[[EvalSettings], Callable[[Draw], Growing]]


def task(recipe: Recipe) -> GenerationTask:
    """The task that the recipe describes."""
    name = f"ruler_{recipe.name}"

    def answer_tokens(settings: EvalSettings) -> int:
        return settings.max_new_tokens or recipe.answer_tokens

    def check(settings: EvalSettings) -> None:
        recipe.check(settings)

    def problems(settings: EvalSettings, tokenizer: Any) -> list[Problem]:
        draw = recipe.open(settings)
        total = settings.problems or DEFAULT_PROBLEMS_PER_LENGTH * len(settings.lengths)
        found = []
        for index in range(total):
            number, which = divmod(index, len(settings.lengths))
            length = settings.lengths[which]
            one = Draw(
                seed=f"{name} {settings.seed} {length} {number}",
                number=number,
                length=length,
                room=length - answer_tokens(settings),
                tokens=lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]),
            )
            sample = fill(draw(one), one.room, tokenizer, f"{name} at {length} tokens")
            answer = json.dumps(sample.answers, ensure_ascii=False)
            found.append(
                Problem(f"{length}-{number}", sample.message, answer, f"length {length}", sample.opening, "brief")
            )
        return found

    def grade(problem: Problem, text: str) -> Grade:
        return Grade(METRICS[recipe.metric](text, json.loads(problem.answer)), text.strip() or None)

    return GenerationTask(
        name, recipe.metric, answer_tokens, lambda settings: max(settings.lengths), check, problems, grade
    )


def string_match_all(text: str, references: Sequence[str]) -> float:
    """Share of the references that the text contains, whatever their case."""
    return sum(reference.lower() in text.lower() for reference in references) / len(references)


def string_match_part(text: str, references: Sequence[str]) -> float:
    """Whether the text contains any of the references, whatever its case."""
    return float(any(reference.lower() in text.lower() for reference in references))


METRICS = {"string_match_all": string_match_all, "string_match_part": string_match_part}


def fill(growing: Growing, room: int, tokenizer: Any, what: str) -> Sample:
    """The prompt of as many pieces as fit into `room` tokens.

    Raises:
        UserError: Not even the shortest prompt fits, or there are too few pieces; `what` names the problem.
    """

    def size(count: int) -> int:
        sample = growing.build(count)
        return len(encode_prompt(tokenizer, sample.message, sample.opening, "brief"))

    shortest = size(growing.least)
    if shortest > room:
        raise UserError(
            f"lengths: {what} has room for a prompt of {room}, and the shortest has {shortest}; ask for more"
        )
    count = most_that_fit(size, growing.least, room, growing.most)
    if growing.most is not None and count >= growing.most:
        raise UserError(f"{what} needs more text: its files are used up; ask for shorter --lengths or give more")
    return growing.build(count)


def most_that_fit(size: Callable[[int], int], least: int, limit: int, most: int | None = None) -> int:
    """A count from `least` to `most` whose size is within the limit; at most one piece or 0.2 % is left of it.

    The size of `least` must be within the limit, and the size grows about evenly: a handful of sizes is looked at,
    because each is the tokenizing of a whole prompt.
    """
    fits, fits_size = least, size(least)
    over = None if most is None else most + 1
    slope = 0.0
    tries = 0
    while over is None or over - fits > 1:
        if slope and limit - fits_size < max(slope, _SLACK * limit):
            break
        guess = fits + int((limit - fits_size) / slope) if slope else 2 * fits + 8
        if over is not None:
            guess = min(guess, over - 1) if tries < _BISECT_AFTER else (fits + over) // 2
        guess = max(guess, fits + 1)
        guess_size = size(guess)
        slope = max((guess_size - fits_size) / (guess - fits), 1e-3)
        if guess_size <= limit:
            fits, fits_size = guess, guess_size
        else:
            over = guess
        tries += 1
    return fits
