"""`livecodebench`: contest problems whose Python programs must pass all tests (Jain et al., 2024, arXiv 2403.07974).

Read from `livecodebench*.jsonl` in `data_dir`, in the official form of `code_generation_lite` or with `id`, `problem`
and `answer` (a list of `input` and `output`); else `test6.jsonl` from the hub, the problems that release v6 added. A
file with sample tests only measures less than the benchmark does.

The prompt is the official one for chat models, its system message at the front of the user's; code is taken from the
last fenced block, as there. Grading runs the code that the model wrote (see `code_running`): `--run_code true` has to
allow it.
"""

import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation import code_running, files
from kvpop_jax.evaluation.code_running import Case
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.evaluation.tasks.base import GenerationTask, Grade, Problem

_NAME, _HUB_ID, _HUB_FILE = "livecodebench", "livecodebench/code_generation_lite", "test6.jsonl"
_FENCE = "```"
_INTRODUCTION = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests.\n\n"
)
_PROGRAM = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the sample "
    "inputs). Enclose your code within delimiters as follows. Ensure that when the python program runs, it reads the "
    "inputs, runs the algorithm and writes output to STDOUT."
)
_STARTED = (
    "You will use the following starter code to write the solution to the problem and enclose your code within "
    "delimiters."
)


def problems(settings: EvalSettings, tokenizer: Any = None) -> list[Problem]:
    """The problems in file order, the first `settings.problems` of them.

    Raises:
        UserError: There is no file, or several, or a row lacks a field.
    """
    path = _locate(settings)
    found = []
    for number, row in enumerate(islice(files.read_rows(path), settings.problems), start=1):
        try:
            found.append(_official(row) if "question_content" in row else _plain(row))
        except (KeyError, TypeError, ValueError, pickle.UnpicklingError, zlib.error) as error:
            raise UserError(f"{path}: row {number} cannot be read: {type(error).__name__} {error}") from error
    if not found:
        raise UserError(f"{path}: no problems in the file")
    return found


def grade(problem: Problem, text: str) -> Grade:
    """Right when the program in the last fenced block passes all tests."""
    code = fenced(text)
    if not code.strip():
        return Grade(0.0, None)
    reference = json.loads(problem.answer)
    tests = [Case(**test) for test in reference["tests"]]
    return Grade(float(code_running.passes(code, tests, reference["function"])), code)


def fenced(text: str) -> str:
    """What stands between the last two lines with a code fence; nothing when there are not two."""
    lines = text.split("\n")
    fences = [place for place, line in enumerate(lines) if _FENCE in line]
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) > 1 else ""


def _official(row: Mapping[str, Any]) -> Problem:
    tests = [*json.loads(row["public_test_cases"]), *_private(row["private_test_cases"])]
    function = json.loads(row["metadata"]).get("func_name") or ""
    return _problem(str(row["question_id"]), row["question_content"], row["starter_code"], tests, function)


def _plain(row: Mapping[str, Any]) -> Problem:
    return _problem(str(row["id"]), row["problem"], "", row["answer"], "")


def _problem(identity: str, question: str, starter: str, tests: list[dict[str, str]], function: str) -> Problem:
    wanted, code = (_STARTED, starter) if starter else (_PROGRAM, "# YOUR CODE HERE")
    prompt = (
        f"{_INTRODUCTION}### Question:\n{question}\n\n### Format: {wanted}\n{_FENCE}python\n{code}\n{_FENCE}\n\n"
        "### Answer: (use the provided format with backticks)\n\n"
    )
    kept = [{"input": test["input"], "output": test["output"]} for test in tests]
    return Problem(identity, prompt, json.dumps({"tests": kept, "function": function}))


def _private(packed: str) -> list[dict[str, str]]:
    """The hidden tests: JSON, or JSON that was pickled, compressed and written in base 64."""
    try:
        return json.loads(packed)
    except json.JSONDecodeError:
        return json.loads(_Text(io.BytesIO(zlib.decompress(base64.b64decode(packed)))).load())


class _Text(pickle.Unpickler):
    """Reads a pickled string and refuses everything that could run code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} in what should be text")


def _locate(settings: EvalSettings) -> Path:
    if settings.data_dir is None:
        return files.from_hub(_NAME, _HUB_ID, _HUB_FILE, f"its {_HUB_FILE} as {_NAME}_v6.jsonl")
    found = sorted(Path(settings.data_dir).glob(f"{_NAME}*.jsonl"))
    if not found:
        raise UserError(
            f"{_NAME}: no file {Path(settings.data_dir) / _NAME}*.jsonl; data_dir must hold one, or leave data_dir out "
            f"to use the hub"
        )
    if len(found) > 1:
        raise UserError(f"{_NAME}: {found[0]} and {found[1].name} are both of the benchmark; leave one in data_dir")
    return found[0]


def _check(settings: EvalSettings) -> None:
    if not settings.run_code:
        raise UserError(f"{_NAME} runs programs that the model writes, with your rights; allow it by --run_code true")
    _locate(settings)


TASKS = (GenerationTask(_NAME, "pass@1", lambda _: 32768, lambda _: 16384, _check, problems, grade),)
