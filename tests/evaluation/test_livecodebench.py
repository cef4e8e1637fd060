"""LiveCodeBench's programs are run against their tests, within limits, and only when that is allowed."""

import base64
import json
import os
import pickle
import time
import zlib
from pathlib import Path

import pytest

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation import code_running, tasks
from kvpop_jax.evaluation.code_running import Case, passes
from kvpop_jax.evaluation.settings import EvalSettings

TASK = tasks.get("livecodebench")
SUM = "a, b = map(int, input().split())\nprint(a + b)"
CASES = (Case("1 2\n", "3\n"), Case("5 6\n", "11\n"))


def official(**changes) -> dict:
    """A row in the form of `code_generation_lite`, its hidden test packed as there."""
    hidden = json.dumps([{"input": "[3, 4]\n2", "output": "[6, 8]", "testtype": "functional"}])
    return {
        "question_id": "q1",
        "question_content": "Scale a list.",
        "starter_code": "class Solution:\n    def scale(self, values: List[int], by: int) -> List[int]:\n        ",
        "public_test_cases": json.dumps([{"input": "[1]\n5", "output": "[5]", "testtype": "functional"}]),
        "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(hidden))).decode(),
        "metadata": json.dumps({"func_name": "scale"}),
    } | changes


def write(folder: Path, *rows: dict) -> EvalSettings:
    (folder / "livecodebench_v6.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return EvalSettings(data_dir=str(folder), run_code=True)


def test_a_program_passes_when_it_prints_what_every_test_wants():
    assert passes(SUM, CASES)
    assert not passes(SUM.replace("+", "-"), CASES)
    assert not passes("a, b = map(int, input().split())\nprint(3)", CASES)
    assert not passes("print(", CASES) and not passes("", CASES) and not passes(SUM, ())
    main = "def main():\n    print(gcd(12, int(sys.stdin.readline())))\nif __name__ == '__main__':\n    main()"
    assert passes(main, (Case("8", "4"),))


def test_a_method_is_called_with_the_lines_of_the_input():
    code = (
        "class Solution:\n    def scale(self, values: List[int], by: int):\n"
        "        print('scaling')\n        return tuple(value * by for value in values)"
    )
    assert passes(code, (Case("[3, 4]\n2", "[6, 8]"),), "scale")
    assert not passes(code, (Case("[3, 4]\n2", "[6, 9]"),), "scale")
    assert not passes(code, (Case("[3, 4]\n2", "[6, 8]"),), "other")


def test_a_program_that_does_not_end_or_asks_for_too_much_fails_in_time(monkeypatch, tmp_path):
    monkeypatch.setattr(code_running, "WALL_SECONDS", 1)
    start = time.perf_counter()
    assert not passes("while True: pass", CASES)
    child = tmp_path / "child"
    program = f"import os, subprocess\nprint(3, flush=True)\nos.system('sleep 2 && touch {child} &')\nimport time\n"
    assert not passes(f"{program}time.sleep(9)", CASES)
    assert not passes("x = bytearray(8 << 30)\nprint(3)", CASES)
    assert time.perf_counter() - start < 9
    time.sleep(1.5)
    assert not child.exists()


def test_a_program_sees_neither_the_environment_nor_this_folder():
    assert passes("import os\nprint(os.environ.get('HOME'), os.listdir())", (Case("", "None ['solution.py']"),))


def test_outputs_are_compared_by_line_and_numbers_by_value():
    assert code_running.same_output(" 1 2.50 \nyes\n\n", "1.0 2.5\nyes")
    assert not code_running.same_output("1\n2", "1 2")
    assert not code_running.same_output("50000000000000001", "50000000000000000")


def test_an_official_row_is_read_with_its_hidden_tests(tmp_path):
    settings = write(tmp_path, official())
    TASK.check(settings)
    (problem,) = TASK.problems(settings, None)
    assert "def scale(self" in problem.prompt and problem.prompt.count("```") == 2
    assert json.loads(problem.answer) == {
        "tests": [{"input": "[1]\n5", "output": "[5]"}, {"input": "[3, 4]\n2", "output": "[6, 8]"}],
        "function": "scale",
    }
    code = "class Solution:\n    def scale(self, values: List[int], by):\n        return [by * x for x in values]"
    grade = TASK.grade(problem, f"<think>```\nx\n```</think>\nHere:\n```python\n{code}\n```\nDone.")
    assert (grade.score, grade.extracted) == (1.0, code)
    assert TASK.grade(problem, code).extracted is None
    assert TASK.grade(problem, "").score == 0.0


def test_hidden_tests_cannot_run_code_when_they_are_read(tmp_path):
    class Bad:
        def __reduce__(self):
            return os.getcwd, ()

    packed = base64.b64encode(zlib.compress(pickle.dumps(Bad()))).decode()
    with pytest.raises(UserError, match=r"row 1 cannot be read: UnpicklingError .*getcwd"):
        TASK.problems(write(tmp_path, official(private_test_cases=packed)), None)


def test_running_code_has_to_be_allowed(tmp_path):
    write(tmp_path, official())
    with pytest.raises(UserError, match="--run_code true"):
        TASK.check(EvalSettings(data_dir=str(tmp_path)))
    with pytest.raises(UserError, match=r"livecodebench: no file .*livecodebench\*\.jsonl"):
        TASK.check(EvalSettings(data_dir=str(tmp_path / "nowhere"), run_code=True))


def test_two_releases_in_one_folder_are_refused(tmp_path):
    """Whichever were taken, the other's problems would silently not count."""
    for release in ("v5", "v6"):
        (tmp_path / f"livecodebench_{release}.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"livecodebench_v5\.jsonl and livecodebench_v6\.jsonl are both"):
        TASK.check(EvalSettings(data_dir=str(tmp_path), run_code=True))


def test_the_real_samples_load_and_a_solution_of_one_passes():
    data = Path(__file__).parents[3] / "shared" / "data"
    if not data.is_dir():
        pytest.skip(f"no folder {data}")
    problems = TASK.problems(EvalSettings(data_dir=str(data)), None)
    problem = next(problem for problem in problems if problem.id == "lcb-v5-abc365_b")
    solution = "input()\nvalues = list(map(int, input().split()))\nprint(values.index(sorted(values)[-2]) + 1)"
    assert len(problems) == 60
    assert TASK.grade(problem, f"```python\n{solution}\n```").score == 1.0
    assert TASK.grade(problem, f"```python\n{solution.replace('-2', '-1')}\n```").score == 0.0
