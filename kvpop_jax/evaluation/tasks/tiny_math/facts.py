"""facts: values among filler and unused values, then a program that adds and takes them in random order."""

from random import Random

from kvpop_jax.evaluation.tasks.tiny_math import grammar
from kvpop_jax.evaluation.tasks.tiny_math.grammar import NUMBER, SCRATCH_TOKENS, VALUE_TOKENS, Draft

INSTRUCTION_TOKENS = 5  # label : add name newline
WORK_TOKENS = INSTRUCTION_TOKENS + 3 * VALUE_TOKENS + SCRATCH_TOKENS
_STEP_TOKENS = VALUE_TOKENS + INSTRUCTION_TOKENS + WORK_TOKENS
_OPENING_TOKENS = 7 + VALUE_TOKENS + 3 + grammar.FRAME_TOKENS  # work from ..., total = ..., find total


def run_program(
    rng: Random, labels: list[str], used: list[str], values: dict[str, int], total: int
) -> tuple[list[str], list[str], int]:
    """Adds or takes each of `used` in turn; the last instruction is marked. Returns instructions, solution, total."""
    instructions, solution = [], []
    for label, name in zip(labels, used, strict=True):
        sign, verb = ("+", "add") if rng.random() < 0.5 else ("-", "take")
        instructions.append(grammar.labelled(label, label == labels[-1], f"{verb} {name}"))
        step, total = grammar.running_step(sign, total, name, values[name])
        solution += [instructions[-1], *step]
    return instructions, solution, total


def build(rng: Random, length_target: int) -> Draft:
    """A program of `length_target` tokens in all, or a few fewer; 10 to 25 % of it is of no use."""
    room = length_target - _OPENING_TOKENS
    count = max(2, int(room * (0.9 - 0.15 * rng.random())) // _STEP_TOKENS)
    spare = room - count * _STEP_TOKENS
    unused = int(spare * (0.2 + 0.2 * rng.random())) // VALUE_TOKENS
    fresh = grammar.names(rng)[: count + unused]
    values = {name: grammar.number(rng) for name in fresh}
    lines = [f"{name} = {NUMBER[value]}" for name, value in values.items()]

    start = grammar.number(rng)
    labels = grammar.labels(rng, count)
    instructions, solution, total = run_program(rng, labels, fresh[:count], values, start)
    lines += [f"total = {NUMBER[start]}", *grammar.filler(rng, spare - unused * VALUE_TOKENS)]
    rng.shuffle(lines)
    rng.shuffle(instructions)
    prompt = [f"work from {labels[0]} keep three digits", *lines, *instructions, "find total"]
    return Draft(prompt, solution, total, count)
