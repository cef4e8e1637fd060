"""receipt: price times quantity on every row, then the sum of all products.

The first half of the solution multiplies row by row, in label order: by one digit directly, by two digits through
partial products, the tens' one shifted. The second half recalls every product, by then hundreds of tokens back, and
adds it to the total.
"""

from random import Random

from kvpop_jax.evaluation.tasks.tiny_math import grammar
from kvpop_jax.evaluation.tasks.tiny_math.grammar import MODULUS, NUMBER, SCRATCH_TOKENS, VALUE_TOKENS, Draft

_ADD_TOKENS = 5 + 3 * VALUE_TOKENS + SCRATCH_TOKENS  # add label : name, two recalls, scratch, result
# A row stands in the prompt and in the solution: label : name at d d d * d newline, or one digit more.
_ONE_DIGIT_TOKENS = 2 * 10 + SCRATCH_TOKENS + VALUE_TOKENS + _ADD_TOKENS
_TWO_DIGIT_TOKENS = 2 * 11 + 2 * 8 + 3 * SCRATCH_TOKENS + 4 * VALUE_TOKENS + _ADD_TOKENS
_OPENING_TOKENS = 7 + VALUE_TOKENS + grammar.FRAME_TOKENS  # receipt from ..., total = ...


def _quantities(rng: Random, tokens: int) -> list[int]:
    """Quantities of as many rows as fit in `tokens`, three in four of them with two digits."""
    quantities = []
    while tokens >= _ONE_DIGIT_TOKENS:
        if rng.random() < 0.75 and tokens >= _TWO_DIGIT_TOKENS:
            quantities.append(11 + int(rng.random() * 89))
            tokens -= _TWO_DIGIT_TOKENS
        else:
            quantities.append(2 + int(rng.random() * 8))
            tokens -= _ONE_DIGIT_TOKENS
    return quantities


def _multiply(name: str, price: int, quantity: int) -> tuple[list[str], int]:
    """The worked product of a row, after the row itself, and its value modulo 1000."""
    if quantity < 10:
        work, product = grammar.scratch("*", price, quantity)
        return [work, f"{name} = {NUMBER[product]}"], product
    by_units, units = grammar.scratch("*", price, quantity % 10)
    by_tens, tens = grammar.scratch("*", price, quantity // 10)
    tens = tens * 10 % MODULUS
    work, product = grammar.scratch("+", tens, units)
    lines = [
        f"{name} at {NUMBER[price]} * {quantity % 10}",
        by_units,
        f"units = {NUMBER[units]}",
        f"{name} at {NUMBER[price]} * {quantity // 10}",
        by_tens,
        f"tens = {NUMBER[tens]}",
        f"units = {NUMBER[units]}",
        work,
        f"{name} = {NUMBER[product]}",
    ]
    return lines, product


def build(rng: Random, length_target: int) -> Draft:
    """A receipt of `length_target` tokens in all, or a few fewer; what does not fill a row is filler."""
    room = length_target - _OPENING_TOKENS
    quantities = _quantities(rng, room)
    fresh = grammar.names(rng)
    labels = grammar.labels(rng, len(quantities))

    rows, multiplied, added = [], [], []
    start = total = grammar.number(rng)
    for label, quantity in zip(labels, quantities, strict=True):
        name, price = fresh.pop(), grammar.number(rng)
        is_last = label == labels[-1]
        rows.append(grammar.labelled(label, is_last, f"{name} at {NUMBER[price]} * {' '.join(str(quantity))}"))
        work, product = _multiply(name, price, quantity)
        multiplied += [rows[-1], *work]
        step, total = grammar.running_step("+", total, name, product)
        added += [f"add {grammar.labelled(label, is_last, name)}", *step]

    room -= sum(_TWO_DIGIT_TOKENS if quantity >= 10 else _ONE_DIGIT_TOKENS for quantity in quantities)
    facts = [*rows, f"total = {NUMBER[start]}", *grammar.filler(rng, room)]
    rng.shuffle(facts)
    steps = sum(4 if quantity >= 10 else 2 for quantity in quantities)
    return Draft([f"receipt from {labels[0]} keep three digits", *facts], multiplied + added, total, steps)
