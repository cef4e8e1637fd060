"""mixed, held out of training: a chain, then a running total over the values that it leaves unused.

Every line has a form that chain or facts teaches; what is new is that both kinds of step share one list of labels, and
that the program takes values that the solution itself worked out.
"""

from random import Random

from kvpop_jax.evaluation.tasks.tiny_math import chain, facts, grammar
from kvpop_jax.evaluation.tasks.tiny_math.grammar import NUMBER, VALUE_TOKENS, Draft

_PROGRAM_TOKENS = facts.INSTRUCTION_TOKENS + facts.WORK_TOKENS
_OPENING_TOKENS = 7 + VALUE_TOKENS + 3 + grammar.FRAME_TOKENS  # work from ..., total = ..., find total


def build(rng: Random, length_target: int) -> Draft:
    """A chain and a program of `length_target` tokens in all, or a few fewer; about half of the steps each."""
    room = length_target - _OPENING_TOKENS
    count = max(2, int(room * (0.35 + 0.2 * rng.random())) // _PROGRAM_TOKENS)
    room -= count * _PROGRAM_TOKENS
    operators = chain.operators_within(rng, room, left=count)
    links = chain.link(rng, operators, count, grammar.names(rng))

    labels = grammar.labels(rng, len(operators) + count)
    linked, programmed = labels[: len(operators)], labels[len(operators) :]
    definitions = [grammar.labelled(label, False, body) for label, body in zip(linked, links.bodies, strict=True)]
    chained = [line for definition, step in zip(definitions, links.steps, strict=True) for line in (definition, *step)]
    unused = rng.sample(links.unused, count)
    start = grammar.number(rng)
    instructions, added, total = facts.run_program(rng, programmed, unused, links.values, start)

    lines = [*links.given, *definitions, f"total = {NUMBER[start]}"]
    lines += grammar.filler(rng, room - chain.tokens_of(operators, left=count))
    rng.shuffle(lines)
    rng.shuffle(instructions)
    prompt = [f"work from {labels[0]} keep three digits", *lines, *instructions, "find total"]
    return Draft(prompt, chained + added, total, len(labels))
