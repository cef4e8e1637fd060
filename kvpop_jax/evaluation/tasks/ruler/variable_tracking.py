"""`vt`: a chain of assignments scattered through noise; which variables have the value? (RULER, section 3)"""

import random
import string
from collections.abc import Callable
from itertools import pairwise

from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.evaluation.tasks.ruler.niah import NOISE
from kvpop_jax.evaluation.tasks.ruler.recipe import Draw, Growing, Recipe, Sample, most_that_fit

CHAINS = 1
HOPS = 4
_NAME_LETTERS, _EXAMPLE_NAME_LETTERS = 5, 3
_EXAMPLE_TOKENS, _EXAMPLE_SHARE = 500, 4  # of the worked example: so many, but at most one in four of the whole length
_MESSAGE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
_OPENING = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are: "
)


def sample(seed: str, noises: int, letters: int = _NAME_LETTERS, chains: int = CHAINS, hops: int = HOPS) -> Sample:
    """The prompt with that many noise sentences, at least `hops + 1`; the first chain's variables are the answers."""
    rng = random.Random(seed)
    names = _names(rng, letters, chains * (hops + 1))
    sentences = [NOISE] * noises
    values = []
    for chain in range(chains):
        variables = names[chain * (hops + 1) : (chain + 1) * (hops + 1)]
        values.append(rng.randrange(10_000, 100_000))
        # The space after a name is RULER's.
        links = [f"VAR {name} = VAR {before} " for before, name in pairwise(variables)]
        lines = [f"VAR {variables[0]} = {values[-1]}", *links]
        places = sorted(rng.sample(range(len(sentences)), len(lines)))
        for shift, (place, line) in enumerate(zip(places, lines, strict=True)):
            sentences.insert(place + shift, line)
    fields = {"context": "\n".join(sentences), "value": values[0], "count": hops + 1}
    return Sample(_MESSAGE.format(**fields), _OPENING.format(**fields), tuple(names[: hops + 1]))


def example(one: Draw) -> str:
    """A solved problem with other names, for the model to see the form of an answer."""
    room = min(_EXAMPLE_TOKENS, one.length // _EXAMPLE_SHARE)

    def text(noises: int) -> str:
        solved = sample(f"{one.seed} example", noises, _EXAMPLE_NAME_LETTERS)
        return f"{solved.message}{solved.opening} {' '.join(solved.answers)}\n"

    least = HOPS + 1
    fits = one.tokens(text(least)) <= room
    return text(most_that_fit(lambda noises: one.tokens(text(noises)), least, room) if fits else least)


def _names(rng: random.Random, letters: int, count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    return list(found)


def _open(settings: EvalSettings) -> Callable[[Draw], Growing]:
    def draw(one: Draw) -> Growing:
        shown = example(one)

        def build(noises: int) -> Sample:
            own = sample(one.seed, noises)
            return Sample(f"{shown}\n{own.message}", own.opening, own.answers)

        return Growing(HOPS + 1, build)

    return draw


RECIPES = (Recipe("vt", "string_match_all", 30, lambda settings: None, _open),)
