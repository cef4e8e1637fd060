"""`tiny_math`: generated multi-step problems whose worked solutions outgrow a compressed cache; exact final answers."""

import dataclasses
from typing import Any

from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.evaluation.tasks import tiny_math
from kvpop_jax.evaluation.tasks.base import GenerationTask, Grade, Problem

CONTEXT = 1024  # prompt and completion together stay below it at the default lengths
DEFAULT_PROBLEMS = 128
_LONGEST_SOLUTION = 0.95  # of a problem's tokens (0.94 was seen); the rest is prompt


def problems(settings: EvalSettings, tokenizer: Any = None) -> list[Problem]:
    """The first `settings.problems` (128) problems of the split; the family is the group."""
    shortest, longest = settings.problem_tokens
    found = []
    for index in range(settings.problems or DEFAULT_PROBLEMS):
        problem = tiny_math.generate(
            index,
            seed=settings.seed,
            split=settings.split,
            families=settings.families or tiny_math.TRAIN_FAMILIES,
            min_tokens=shortest,
            max_tokens=longest,
        )
        found.append(Problem(problem.id, problem.prompt, problem.answer, problem.family))
    return found


def grade(problem: Problem, text: str) -> Grade:
    """Right when the last answer line gives exactly the three digits."""
    return Grade(float(tiny_math.grade(problem.answer, text)), tiny_math.final_answer(text))


def check(settings: EvalSettings) -> None:
    """Families and lengths must be the generator's."""
    problems(dataclasses.replace(settings, problems=1))


def max_new_tokens(settings: EvalSettings) -> int:
    """Enough for the longest worked solution that the lengths allow."""
    return round(_LONGEST_SOLUTION * settings.problem_tokens[1])


TASKS = (GenerationTask("tiny_math", "pass@1", max_new_tokens, lambda _: CONTEXT, check, problems, grade),)
