"""`niah_*`: needles in a haystack of running text, noise or other needles (RULER, section 3).

A needle gives a key its value; the question at the end asks for the values of some of the keys.
"""

import random
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.evaluation.tasks.ruler import vocabulary
from kvpop_jax.evaluation.tasks.ruler.recipe import Draw, Growing, Recipe, Sample

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_MESSAGE = (
    "{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {kind} afterwards.\n{context}\nWhat {are_all} the special magic {kind} for {query} mentioned in the "
    "provided text?"
)
_OPENING = " The special magic {kind} for {query} mentioned in the provided text {are}"
_PLACES = 40  # depths that needles are put at in running text: 0 % to 100 % in even steps

Kind = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True)
class Needles:
    """A task's haystack, what its keys and values are, and how many: keys, values of each key, keys asked for."""

    name: str
    haystack: Literal["noise", "essay", "needle"]
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


TASKS = (
    Needles("niah_single_1", "noise"),
    Needles("niah_single_2", "essay"),
    Needles("niah_single_3", "essay", value="uuids"),
    Needles("niah_multikey_1", "essay", keys=4),
    Needles("niah_multikey_2", "needle"),
    Needles("niah_multikey_3", "needle", key="uuids", value="uuids"),
    Needles("niah_multivalue", "essay", values=4),
    Needles("niah_multiquery", "essay", keys=4, queries=4),
)


def sample(needles: Needles, words: list[str], seed: str, pieces: int) -> Sample:
    """The prompt with that many words of running text, noise sentences or distracting needles around the needles.

    Needles, question and distractors are the same for any number of pieces; only where the needles stand is drawn anew.

    Args:
        needles: The task.
        words: The running text, of an essay haystack.
        seed: Seeds everything random.
        pieces: At least the number of needles.
    """
    rng = random.Random(seed)
    values = _values(needles, rng)
    lines = [
        _NEEDLE.format(kind=needles.value, key=key, value=value) for key, found in values.items() for value in found
    ]
    rng.shuffle(lines)
    asked = rng.sample(list(values), needles.queries)
    match needles.haystack:
        case "essay":
            context = _among_sentences(lines, _excerpt(words, rng, pieces), rng)
        case "noise":
            context = _among_lines(lines, [NOISE] * pieces, rng)
        case "needle":
            context = _among_lines(lines, _distractors(needles, values, rng, pieces), rng)
    return _worded(needles, context, asked, tuple(value for key in asked for value in values[key]))


def _worded(needles: Needles, context: str, asked: list[str], answers: tuple[str, ...]) -> Sample:
    single = len(answers) == 1
    fields = {
        "some": "A" if single else "Some",
        "kind": needles.value[:-1] if single else needles.value,
        "are": "is" if single else "are",
        "are_all": "is" if single else "are all",
        "query": asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}",
        "context": context,
    }
    return Sample(_MESSAGE.format(**fields), _OPENING.format(**fields), answers)


def _values(needles: Needles, rng: random.Random) -> dict[str, list[str]]:
    """The values of every key, all keys differing."""
    found: dict[str, list[str]] = {}
    while len(found) < needles.keys:
        found.setdefault(_random(needles.key, rng), [_random(needles.value, rng) for _ in range(needles.values)])
    return found


def _random(kind: Kind, rng: random.Random) -> str:
    match kind:
        case "words":
            return vocabulary.compound(rng)
        case "numbers":
            return str(rng.randrange(1_000_000, 10_000_000))
        case "uuids":
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _distractors(needles: Needles, values: dict[str, list[str]], rng: random.Random, count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        key, value = _random(needles.key, rng), _random(needles.value, rng)
        if key not in values:
            found.append(_NEEDLE.format(kind=needles.value, key=key, value=value))
    return found


def _among_lines(lines: list[str], haystack: list[str], rng: random.Random) -> str:
    for place, line in zip(sorted(rng.sample(range(len(haystack)), len(lines)), reverse=True), lines, strict=True):
        haystack.insert(place, line)
    return "\n".join(haystack)


def _among_sentences(lines: list[str], text: str, rng: random.Random) -> str:
    sentences = re.split(r"(?<=[.!?])\s+", text)
    shares = sorted(rng.sample(range(_PLACES), len(lines)))
    places = [0, *(len(sentences) * round(100 * share / (_PLACES - 1)) // 100 for share in shares), len(sentences)]
    parts = [" ".join(sentences[places[0] : places[1]])]
    for line, start, end in zip(lines, places[1:], places[2:], strict=False):
        parts += [line, " ".join(sentences[start:end])]
    return " ".join(part for part in parts if part)


def _excerpt(words: list[str], rng: random.Random, count: int) -> str:
    """So many words of the text from a random sentence on, which goes on at its beginning when it ends."""
    first = rng.randrange(len(words))
    for shift in range(1, min(len(words), 500)):
        if words[(first + shift - 1) % len(words)][-1] in ".!?":
            first = (first + shift) % len(words)
            break
    return " ".join(words[(first + index) % len(words)] for index in range(count))


def _recipe(needles: Needles) -> Recipe:
    def check(settings: EvalSettings) -> None:
        if needles.haystack == "essay":
            vocabulary.running_text(settings, f"ruler_{needles.name}")

    def open_(settings: EvalSettings) -> Callable[[Draw], Growing]:
        essay = needles.haystack == "essay"
        words = vocabulary.running_text(settings, f"ruler_{needles.name}").split() if essay else []
        least = needles.keys * needles.values

        def draw(one: Draw) -> Growing:
            return Growing(least, lambda pieces: sample(needles, words, one.seed, pieces))

        return draw

    return Recipe(needles.name, "string_match_all", 128, check, open_)


RECIPES = tuple(map(_recipe, TASKS))
