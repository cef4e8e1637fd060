"""totals: a running total over the items of one kind, among items of other kinds and filler.

The first line selects the kind. Every kind numbers its items on its own, so an item is found by kind and label
together; the solution repeats each selected item, in label order, and adds it to the total.
"""

from random import Random

from kvpop_jax.evaluation.tasks.tiny_math import grammar
from kvpop_jax.evaluation.tasks.tiny_math.grammar import NUMBER, SCRATCH_TOKENS, VALUE_TOKENS, Draft
from kvpop_jax.evaluation.tasks.tiny_math.vocabulary import KINDS

_ITEM_TOKENS = 7  # kind label : d d d newline
_STEP_TOKENS = 2 * _ITEM_TOKENS + SCRATCH_TOKENS + VALUE_TOKENS
_OPENING_TOKENS = 8 + 2 * VALUE_TOKENS + grammar.FRAME_TOKENS  # sum ..., total = ... twice


def _items(rng: Random, kind: str, labels: list[str]) -> tuple[list[str], list[int]]:
    values = [grammar.number(rng) for _ in labels]
    lines = [
        f"{kind} {grammar.labelled(label, label == labels[-1], NUMBER[value])}"
        for label, value in zip(labels, values, strict=True)
    ]
    return lines, values


def build(rng: Random, length_target: int) -> Draft:
    """A running total of `length_target` tokens in all, or a few fewer; 15 to 30 % of it is of no use."""
    room = length_target - _OPENING_TOKENS
    count = max(2, int(room * (0.85 - 0.15 * rng.random())) // _STEP_TOKENS)
    spare = room - count * _STEP_TOKENS
    kinds = list(KINDS)
    rng.shuffle(kinds)
    selected, *others = kinds
    labels = grammar.labels(rng, count)
    items, values = _items(rng, selected, labels)

    facts = list(items)
    other_count = int(spare * (0.3 + 0.4 * rng.random())) // _ITEM_TOKENS
    for position, kind in enumerate(others):
        share = len(range(position, other_count, len(others)))
        if share > 0:
            facts += _items(rng, kind, grammar.labels(rng, share))[0]
    facts += grammar.filler(rng, spare - other_count * _ITEM_TOKENS)

    start = total = grammar.number(rng)
    solution = [f"total = {NUMBER[total]}"]
    for item, value in zip(items, values, strict=True):
        work, total = grammar.scratch("+", total, value)
        solution += [item, work, f"total = {NUMBER[total]}"]
    facts.append(f"total = {NUMBER[start]}")
    rng.shuffle(facts)
    return Draft([f"sum {selected} from {labels[0]} keep three digits", *facts], solution, total, count)
