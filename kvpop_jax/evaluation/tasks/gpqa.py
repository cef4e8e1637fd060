"""`gpqa_diamond`: 198 graduate-level questions with four answers to choose from (Rein et al., 2023, arXiv 2311.12022).

Read from `gpqa_diamond.csv` or `.jsonl` in `data_dir`, with the official columns, else from the hub, where its authors
ask for an account and that questions be kept out of sight of training. Prompt and answer pattern are those of OpenAI's
simple-evals. The order of the four is drawn from the seed and the question, and is the same for every rollout.
"""

import random
import re
from itertools import islice
from pathlib import Path
from typing import Any

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation import files
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.evaluation.tasks.base import GenerationTask, Grade, Problem

_NAME, _HUB_ID = "gpqa_diamond", "Idavidrein/gpqa"
_CHOICES = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_LETTERS = "ABCD"
_PROMPT = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering.\n\n"
    "{question}\n\n{choices}"
)
_ANSWER = re.compile(r"(?i:answer)[ \t]*:[ \t*]*\$?\(?([A-D])\b|\\boxed\{(?:\\text\{)?([A-D])\}")


def problems(settings: EvalSettings, tokenizer: Any = None) -> list[Problem]:
    """The questions in file order, the first `settings.problems` of them.

    Raises:
        UserError: There is no file, or a row lacks a column.
    """
    path = _locate(settings)
    found = []
    for number, row in enumerate(islice(files.read_rows(path), settings.problems), start=1):
        for column in ("Question", *_CHOICES):
            if not row.get(column):
                raise UserError(f"{path}: row {number} has no field {column!r}")
        identity = str(row.get("Record ID") or number)
        order = random.Random(f"{_NAME} {settings.seed} {identity}").sample(_CHOICES, len(_CHOICES))
        choices = [f"{letter}) {row[column].strip()}" for letter, column in zip(_LETTERS, order, strict=True)]
        prompt = _PROMPT.format(question=row["Question"].strip(), choices="\n".join(choices))
        found.append(Problem(identity, prompt, _LETTERS[order.index("Correct Answer")]))
    if not found:
        raise UserError(f"{path}: no problems in the file")
    return found


def grade(problem: Problem, text: str) -> Grade:
    """Right when the last letter given as the answer after the thinking is the reference."""
    given = None
    if "<think>" not in text or "</think>" in text:
        for match in _ANSWER.finditer(text.rsplit("</think>", 1)[-1]):
            given = match[1] or match[2]
    return Grade(float(given == problem.answer), given)


def _locate(settings: EvalSettings) -> Path:
    if settings.data_dir is None:
        return files.from_hub(_NAME, _HUB_ID, f"{_NAME}.csv", f"its {_NAME}.csv")
    for suffix in ("csv", "jsonl"):
        path = Path(settings.data_dir) / f"{_NAME}.{suffix}"
        if path.is_file():
            return path
    raise UserError(
        f"{_NAME}: no file {Path(settings.data_dir) / _NAME}.csv or .jsonl; data_dir must hold one, or leave data_dir "
        f"out to use the hub"
    )


def _check(settings: EvalSettings) -> None:
    problems(settings)


TASKS = (GenerationTask(_NAME, "pass@1", lambda _: 32768, lambda _: 16384, _check, problems, grade),)
