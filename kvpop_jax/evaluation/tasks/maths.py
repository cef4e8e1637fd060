r"""Mathematics benchmarks with a single final answer: gsm8k, math500, aime24, aime25, hmmt_feb_2025.

Read from `data_dir/<file>.jsonl` (rows with `id`, `problem`, `answer`) when a folder is given, else from the hub.
Answers are asked for in `\boxed{}` and compared by math-verify.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation import files, grading
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.evaluation.tasks.base import GenerationTask, Grade, Problem

_INSTRUCTION = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Source:
    """Where a benchmark lives: the JSONL file in a folder, and the hub data set with its file and its column names."""

    file: str
    hub_id: str
    hub_file: str
    problem: str = "problem"
    answer: str = "answer"
    id: str | None = None


_PARQUET = "data/train-00000-of-00001.parquet"
SOURCES = {
    "gsm8k": Source("gsm8k_test.jsonl", "openai/gsm8k", "main/test-00000-of-00001.parquet", problem="question"),
    "math500": Source("math500.jsonl", "HuggingFaceH4/MATH-500", "test.jsonl", id="unique_id"),
    "aime24": Source("aime24.jsonl", "HuggingFaceH4/aime_2024", _PARQUET, id="id"),
    "aime25": Source("aime25.jsonl", "MathArena/aime_2025", _PARQUET, id="problem_idx"),
    "hmmt_feb_2025": Source("hmmt_feb_2025.jsonl", "MathArena/hmmt_feb_2025", _PARQUET, id="problem_idx"),
}


def load(name: str, settings: EvalSettings) -> list[Problem]:
    """The benchmark's problems in file order, the first `settings.problems` of them.

    Raises:
        UserError: The file is missing from `data_dir`, a row lacks a field or repeats an id, or the hub cannot be
            reached.
    """
    source = SOURCES[name]
    if settings.data_dir is not None:
        path = Path(settings.data_dir) / source.file
        if not path.is_file():
            raise UserError(f"{name}: no file {path}; data_dir must hold it, or leave data_dir out to use the hub")
        columns = ("id", "problem", "answer")
    else:
        path = files.from_hub(name, source.hub_id, source.hub_file, source.file)
        columns = (source.id or "", source.problem, source.answer)
    found, seen = [], set()
    for number, row in enumerate(files.read_rows(path)):
        if settings.problems is not None and number >= settings.problems:
            break
        missing = [column for column in columns if column and column not in row]
        if missing:
            raise UserError(f"{path}: row {number + 1} has no field {missing[0]!r}")
        identity, problem, answer = (row.get(column, number) for column in columns)
        if not isinstance(problem, str) or not problem.strip():
            raise UserError(f"{path}: row {number + 1}: {columns[1]!r} must be text, not {problem!r}")
        if str(identity) in seen:  # two problems of one id would count as one, with twice the rollouts
            raise UserError(f"{path}: row {number + 1}: a second problem with {columns[0]} {identity!r}")
        seen.add(str(identity))
        # GSM8K's own files put the worked solution before the answer and "####" between them.
        found.append(Problem(str(identity), problem + _INSTRUCTION, str(answer).rsplit("####", 1)[-1].strip()))
    if not found:
        raise UserError(f"{path}: no problems in the file")
    return found


def grade(problem: Problem, text: str) -> Grade:
    """Right when the final answer equals the reference as mathematics."""
    answer = grading.final_answer(text)
    if answer is None:
        return Grade(0.0, None)
    return Grade(float(grading.math_equal(answer, problem.answer)), answer[-200:])


def _task(name: str, max_new_tokens: int, context: int) -> GenerationTask:
    def check(settings: EvalSettings) -> None:
        load(name, settings)

    def problems(settings: EvalSettings, tokenizer: Any) -> list[Problem]:
        return load(name, settings)

    return GenerationTask(name, "pass@1", lambda _: max_new_tokens, lambda _: context, check, problems, grade)


TASKS = (
    _task("gsm8k", 2048, 4096),
    _task("math500", 16384, 16384),
    _task("aime24", 32768, 16384),
    _task("aime25", 32768, 16384),
    _task("hmmt_feb_2025", 32768, 16384),
)
