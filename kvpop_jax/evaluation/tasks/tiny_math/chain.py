"""chain: each new name is defined from earlier names; the values are worked out in label order.

The definitions name, in any order, two earlier names (+ or -) or an earlier name and a digit (*). Every value is used
exactly once, so the last name, which is asked for, depends on all of them. Operands are drawn from the third of the
unused values that has waited longest, so a step recalls results written hundreds of tokens before.
"""

from dataclasses import dataclass
from random import Random

from kvpop_jax.evaluation.tasks.tiny_math import grammar
from kvpop_jax.evaluation.tasks.tiny_math.grammar import NUMBER, SCRATCH_TOKENS, VALUE_TOKENS, Draft

_OPERATORS = ("+", "+", "-", "-", "*")
_DEFINITION_TOKENS = 8
_STEP_TOKENS = {
    operator: 2 * _DEFINITION_TOKENS + (recalls + 1) * VALUE_TOKENS + SCRATCH_TOKENS
    for operator, recalls in (("+", 2), ("-", 2), ("*", 1))
}
_OPENING_TOKENS = 7 + 3 + grammar.FRAME_TOKENS  # work from ..., find ...


@dataclass(frozen=True)
class Links:
    """A chain before it is labelled.

    All values by name; the lines of the given ones; per step the body of its definition and its worked lines after
    the repeated definition; the names left unused, the last one defined being the last.
    """

    values: dict[str, int]
    given: list[str]
    bodies: list[str]
    steps: list[list[str]]
    unused: list[str]


def given_count(operators: list[str], left: int) -> int:
    """How many given values a chain needs to have `left` unused values at its end: + and - use up two, * one."""
    return left + len(operators) - operators.count("*")


def tokens_of(operators: list[str], left: int) -> int:
    """Tokens of the given values, the definitions and the worked steps of a chain."""
    return sum(_STEP_TOKENS[operator] for operator in operators) + given_count(operators, left) * VALUE_TOKENS


def operators_within(rng: Random, tokens: int, left: int) -> list[str]:
    """Random operators of the longest chain that fits in `tokens` with `left` unused values; at least one."""
    chosen = [rng.choice(_OPERATORS)]
    while True:
        longer = [*chosen, rng.choice(_OPERATORS)]
        if tokens_of(longer, left) > tokens:
            return chosen
        chosen = longer


def link(rng: Random, operators: list[str], left: int, fresh: list[str]) -> Links:
    """One step per operator over given values, with `left` values unused at the end; names come from `fresh`'s end."""
    values = {fresh.pop(): grammar.number(rng) for _ in range(given_count(operators, left))}
    given = [f"{name} = {NUMBER[value]}" for name, value in values.items()]
    waiting = list(values)
    bodies, steps = [], []
    for operator in operators:
        name = fresh.pop()
        recalled = [_operand(rng, waiting)]
        if operator == "*":
            right = 2 + int(rng.random() * 8)
            bodies.append(f"{name} = {recalled[0]} * {right}")
        else:
            recalled.append(_operand(rng, waiting))
            right = values[recalled[1]]
            bodies.append(f"{name} = {recalled[0]} {operator} {recalled[1]}")
        work, values[name] = grammar.scratch(operator, values[recalled[0]], right)
        waiting.append(name)
        lines = [f"{operand} = {NUMBER[values[operand]]}" for operand in recalled]
        steps.append([*lines, work, f"{name} = {NUMBER[values[name]]}"])
    return Links(values, given, bodies, steps, waiting)


def _operand(rng: Random, waiting: list[str]) -> str:
    """Takes a name out of `waiting`, one of the third that has waited longest."""
    return waiting.pop(int(rng.random() * ((len(waiting) + 2) // 3)))


def build(rng: Random, length_target: int) -> Draft:
    """A chain of `length_target` tokens in all, or a few fewer; what does not fill a step is filler."""
    room = length_target - _OPENING_TOKENS
    operators = operators_within(rng, room, left=1)
    links = link(rng, operators, 1, grammar.names(rng))
    (asked,) = links.unused
    labels = grammar.labels(rng, len(operators))
    definitions = [
        grammar.labelled(label, label == labels[-1], body) for label, body in zip(labels, links.bodies, strict=True)
    ]
    solution = [line for definition, step in zip(definitions, links.steps, strict=True) for line in (definition, *step)]
    facts = [*links.given, *definitions, *grammar.filler(rng, room - tokens_of(operators, left=1))]
    rng.shuffle(facts)
    prompt = [f"work from {labels[0]} keep three digits", *facts, f"find {asked}"]
    return Draft(prompt, solution, links.values[asked], len(operators))
