"""What all families are written in: numbers, digit-wise scratch work, labels, filler, and the layout of a problem.

A worked step looks the same everywhere. The two operands stand on the two lines above the scratch work (one line for
a product with a digit), three lines work through units, tens and hundreds with the carry or borrow written out, and
a result line closes the step:

    abel = 4 7 2
    cora = 5 9 8
    u 2 + 8 + 0 = 0 carry 1
    t 7 + 9 + 1 = 7 carry 1
    h 4 + 5 + 1 = 0 carry 1
    lora = 0 7 0

All arithmetic keeps three digits (modulo 1000). `2 - 8 - 0 = 4 borrow 1` reads 2 - 8 - 0 = 4 - 10 * 1.
"""

from dataclasses import dataclass
from random import Random

from kvpop_jax.evaluation.tasks.tiny_math.vocabulary import FILLER, LABELS, NAMES

MODULUS = 1000
NUMBER = tuple(" ".join(f"{value:03d}") for value in range(MODULUS))
# Tokens around the prompt's and the solution's lines: begin, "solution : newline", "answer : d d d", end.
FRAME_TOKENS = 10
SCRATCH_TOKENS = 33
VALUE_TOKENS = 6  # name = d d d newline


@dataclass(frozen=True)
class Draft:
    """A problem before it has an id: the lines of the prompt and of the solution, and the number of worked steps."""

    prompt: list[str]
    solution: list[str]
    answer: int
    steps: int


def _digit_table() -> dict[str, dict[tuple[int, int, int], tuple[str, int, int]]]:
    """operator -> (left digit, right digit, carry in) -> (text, digit out, carry out)."""
    add, subtract, multiply = {}, {}, {}
    for left in range(10):
        for right in range(10):
            for carry in range(9):
                out, digit = divmod(left * right + carry, 10)
                multiply[left, right, carry] = f"{left} * {right} + {carry} = {digit} carry {out}", digit, out
            for carry in range(2):
                out, digit = divmod(left + right + carry, 10)
                add[left, right, carry] = f"{left} + {right} + {carry} = {digit} carry {out}", digit, out
                out, digit = divmod(left - right - carry, 10)
                subtract[left, right, carry] = f"{left} - {right} - {carry} = {digit} borrow {-out}", digit, -out
    return {"+": add, "-": subtract, "*": multiply}


_DIGIT_TABLE = _digit_table()


def scratch(operator: str, left: int, right: int) -> tuple[str, int]:
    """Three lines of digit-wise work for `left operator right`, and the result modulo 1000.

    `operator` is one of + - *; both operands are in 0..999, and the right operand of * is one digit.
    """
    table = _DIGIT_TABLE[operator]
    if operator == "*":
        right_units = right_tens = right_hundreds = right
    else:
        right_hundreds, right_tens, right_units = right // 100, right // 10 % 10, right % 10
    units_text, units, carry = table[left % 10, right_units, 0]
    tens_text, tens, carry = table[left // 10 % 10, right_tens, carry]
    hundreds_text, hundreds, _ = table[left // 100, right_hundreds, carry]
    return f"u {units_text}\nt {tens_text}\nh {hundreds_text}", 100 * hundreds + 10 * tens + units


def number(rng: Random) -> int:
    """A uniform three-digit number, 0..999."""
    return int(rng.random() * MODULUS)


def names(rng: Random) -> list[str]:
    """All names in random order, to be taken from the end: each is then defined at most once in a problem."""
    order = list(NAMES)
    rng.shuffle(order)
    return order


def labels(rng: Random, count: int) -> list[str]:
    """`count` successive labels that start anywhere, so that every label and every successor is met."""
    first = int(rng.random() * (len(LABELS) - count + 1))
    return list(LABELS[first : first + count])


def labelled(label: str, is_last: bool, body: str) -> str:
    """A labelled line; `last` in place of the colon marks the final one, which is how the solution knows its end."""
    return f"{label} last {body}" if is_last else f"{label} : {body}"


_FILLER_TOKENS = tuple(1 + sum(3 if word == "D" else 1 for word in sentence.split()) for sentence in FILLER)
_FILLER_PARTS = tuple(tuple(sentence.split()) for sentence in FILLER)
LONGEST_GAP = min(_FILLER_TOKENS) - 1
_FITTING = tuple(
    tuple(index for index, tokens in enumerate(_FILLER_TOKENS) if tokens <= gap)
    for gap in range(max(_FILLER_TOKENS) + 1)
)


def filler(rng: Random, tokens: int) -> list[str]:
    """Filler sentences of `tokens` tokens in all, newlines included, or at most `LONGEST_GAP` fewer.

    They carry names and three-digit numbers like the facts do, and nothing that a solution needs.
    """
    lines = []
    while tokens > LONGEST_GAP:
        fitting = _FITTING[min(tokens, len(_FITTING) - 1)]
        index = fitting[int(rng.random() * len(fitting))]
        tokens -= _FILLER_TOKENS[index]
        lines.append(
            " ".join(
                NAMES[int(rng.random() * len(NAMES))] if part == "N" else NUMBER[number(rng)] if part == "D" else part
                for part in _FILLER_PARTS[index]
            )
        )
    return lines


def running_step(sign: str, total: int, name: str, value: int) -> tuple[list[str], int]:
    """`total` plus or minus the value of `name`: recalls both, works, records the new total."""
    work, result = scratch(sign, total, value)
    return [f"total = {NUMBER[total]}", f"{name} = {NUMBER[value]}", work, f"total = {NUMBER[result]}"], result
