"""Grades on the kinds of answers that benchmarks hold and models write."""

import threading
import time

import pytest

from kvpop_jax.evaluation import grading

RIGHT = [
    ("1/576", r"\frac{1}{576}"),
    (r"\dfrac{1}{576}", r"\frac{1}{576}"),
    (r"\frac{-1-\sqrt{17}}{2}, \frac{-1+\sqrt{17}}{2}", r"\frac{-1+\sqrt{17}}{2}, \frac{-1-\sqrt{17}}{2}"),
    (r"26! \cdot 2^{25}", r"2^{25} \cdot 26!"),
    (r"(3, \pi/2)", r"\left( 3, \frac{\pi}{2} \right)"),
    ("[0,1)", "[0,1)"),
    (r"3\sqrt{23} \cdot \frac{3}{23}", r"\frac{9 \sqrt{23}}{23}"),
    ("1234", "1,234"),
    (r"5\text{ cm}", "5"),
    ("x=5", "5"),
    (r"\text{Evelyn}", r"\text{Evelyn}"),
    ("0.5", r"\frac{1}{2}"),
    ("The answer is 18 dollars per day.", "18"),
]
WRONG = [
    ("1/575", r"\frac{1}{576}"),
    ("(0,1)", "[0,1)"),
    ("(1, 2)", "(2, 1)"),
    ("17", "18"),
    ("", "18"),
    ("no idea what to do here", "18"),
    ("x", "18"),
    (r"\frac{1}{", "18"),
    ("}{$$\\\\left( \x00 ☃ ((((", "18"),
    ("1" * 50_000, "18"),
]


@pytest.mark.parametrize(("answer", "gold"), RIGHT)
def test_an_equal_answer_in_another_form_is_right(answer, gold):
    assert grading.math_equal(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), WRONG)
def test_a_wrong_or_unreadable_answer_is_wrong_and_does_not_raise(answer, gold):
    assert not grading.math_equal(answer, gold)


def test_an_answer_that_cannot_be_evaluated_in_time_is_wrong(monkeypatch):
    monkeypatch.setattr(grading, "TIMEOUT_SECONDS", 1)
    start = time.monotonic()
    assert not grading.math_equal(r"(10^{9})!", "1")
    assert time.monotonic() - start < 5


def test_grading_outside_the_main_thread_gives_the_same_result():
    found = []
    worker = threading.Thread(
        target=lambda: found.extend([grading.math_equal("1/2", r"\frac{2}{4}"), grading.math_equal("1/3", "1/2")])
    )
    worker.start()
    worker.join()
    assert found == [True, False]


def test_the_last_box_counts_with_its_braces_balanced():
    text = r"First \boxed{7}, so the answer is \boxed{\frac{1}{\sqrt{2}}}. And \boxed{unfinished"
    assert grading.boxed(text) == r"\frac{1}{\sqrt{2}}"
    assert grading.boxed(r"the set \boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert grading.boxed("no box") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>maybe 4</think> It is \\boxed{5}.", "5"),
        ("<think>maybe \\boxed{4}", None),
        ("<think>maybe \\boxed{4}</think>", None),
        ("The answer is 18.", "The answer is 18."),
        ("\\boxed{}", None),
        ("", None),
        ("   \n", None),
    ],
)
def test_the_answer_is_what_stands_after_the_thinking(text, answer):
    assert grading.final_answer(text) == answer
