"""GPQA-Diamond's letters are shuffled by the seed, and exactly the right one counts. The questions are made up."""

import csv
import json
from pathlib import Path

import pytest

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation import tasks
from kvpop_jax.evaluation.settings import EvalSettings

TASK = tasks.get("gpqa_diamond")
ROWS = [
    {
        "Record ID": f"rec{number}",
        "Question": f"What is {number} + {number}?\n",
        "Correct Answer": f"{2 * number}",
        "Incorrect Answer 1": f"{2 * number + 1}, or more",
        "Incorrect Answer 2": '"none"',
        "Incorrect Answer 3": "all",
    }
    for number in range(12)
]


def write_csv(folder: Path) -> EvalSettings:
    with (folder / "gpqa_diamond.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0])
        writer.writeheader()
        writer.writerows(ROWS)
    return EvalSettings(data_dir=str(folder))


def test_the_letter_of_the_right_answer_is_the_reference(tmp_path):
    settings = write_csv(tmp_path)
    TASK.check(settings)
    problems = TASK.problems(settings, None)
    assert [problem.id for problem in problems] == [row["Record ID"] for row in ROWS]
    for number, problem in enumerate(problems):
        assert f"What is {number} + {number}?\n\nA) " in problem.prompt
        assert f"\n{problem.answer}) {2 * number}\n" in f"{problem.prompt}\n"
        assert TASK.grade(problem, f"So.\nAnswer: {problem.answer}").score == 1.0
    assert len({problem.answer for problem in problems}) == 4
    assert TASK.problems(settings, None) == problems
    other = TASK.problems(EvalSettings(data_dir=str(tmp_path), seed=1), None)
    assert [problem.answer for problem in other] != [problem.answer for problem in problems]


def test_a_csv_and_a_jsonl_file_give_the_same_problems(tmp_path):
    from_csv = TASK.problems(write_csv(tmp_path), None)
    (tmp_path / "gpqa_diamond.csv").unlink()
    (tmp_path / "gpqa_diamond.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert TASK.problems(EvalSettings(data_dir=str(tmp_path)), None) == from_csv


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: B", "B"),
        ("**Answer: C**", "C"),
        ("Answer: $D", "D"),
        ("answer: (A)", "A"),
        ("Answer: A\nNo.\nAnswer: B", "B"),
        ("So \\boxed{C}.", "C"),
        ("<think>Answer: A</think>Answer: B", "B"),
        ("<think>Answer: A", None),
        ("Answer: Because", None),
        ("B", None),
        ("", None),
    ],
)
def test_the_last_letter_given_as_the_answer_counts(tmp_path, text, letter):
    problem = TASK.problems(write_csv(tmp_path), None)[0]
    grade = TASK.grade(problem, text)
    assert grade.extracted == letter
    assert grade.score == float(letter == problem.answer)


def test_what_is_missing_is_named(tmp_path):
    settings = EvalSettings(data_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"gpqa_diamond: no file .*gpqa_diamond\.csv or \.jsonl"):
        TASK.check(settings)
    (tmp_path / "gpqa_diamond.jsonl").write_text('{"Question": "?"}\n')
    with pytest.raises(UserError, match="row 1 has no field 'Correct Answer'"):
        TASK.check(settings)
