"""`cwe` and `fwe`: the most common words of a long list (RULER, section 3, aggregation).

`cwe` lists ten words more often than all others, at two fixed rates. In `fwe` made-up words follow a zeta distribution,
whose commonest word is dots that do not count.
"""

import math
import random
import string
from collections.abc import Callable
from dataclasses import dataclass

from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.evaluation.tasks.ruler import vocabulary
from kvpop_jax.evaluation.tasks.ruler.recipe import Draw, Growing, Recipe, Sample

COMMON = 10
_CWE_MESSAGE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
_CWE_OPENING = " Answer: The top 10 words that appear most often in the list are:"
_FWE_MESSAGE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text?"
)
_FWE_OPENING = " Answer: According to the coded text above, the three most frequently appeared words are:"
_DOTS = "..."
_ALPHA = 2.0
_ZETA = math.pi**2 / 6  # zeta(_ALPHA)
_CODED_LETTERS = 6
_TOKENS_PER_CODED_WORD = 50  # of the prompt, for the size of the vocabulary
_LEAST_CODED = 80  # words from which on the third place is certainly ahead of the fourth


@dataclass(frozen=True)
class Rates:
    """How often a list repeats its common and its other words, and those of the worked example before it."""

    common: int
    other: int
    example_words: int
    example_common: int
    example_other: int


_LONG_FROM = 4096  # tokens
_SHORT, _LONG = Rates(6, 1, 20, 3, 1), Rates(30, 3, 40, 10, 3)


def word_list(rng: random.Random, words: list[str], common_times: int, other_times: int) -> str:
    """A shuffled numbered list in which the first ten of the words stand at one rate and the others at another."""
    listed = words[:COMMON] * common_times + words[COMMON:] * other_times
    rng.shuffle(listed)
    return " ".join(f"{number}. {word}" for number, word in enumerate(listed, start=1))


def common_words(words: list[str], rates: Rates, seed: str, count: int) -> Sample:
    """The prompt of `cwe` with that many different words, after a solved list of other words."""
    rng = random.Random(seed)
    shuffled = rng.sample(words, len(words))
    shown, own = shuffled[: rates.example_words], shuffled[rates.example_words :][:count]
    listed = word_list(rng, shown, rates.example_common, rates.example_other)
    solved = " ".join(f"{number}. {word}" for number, word in enumerate(shown[:COMMON], start=1))
    example = f"{_CWE_MESSAGE.format(context=listed)}{_CWE_OPENING} {solved}\n"
    context = word_list(rng, own, rates.common, rates.other)
    return Sample(example + _CWE_MESSAGE.format(context=context), _CWE_OPENING, tuple(own[:COMMON]))


def frequent_words(vocabulary_size: int, seed: str, count: int) -> Sample:
    """The prompt of `fwe` with about that many coded words: rank k makes up k**-2 / zeta(2) of them."""
    rng = random.Random(seed)
    coded: dict[str, None] = {_DOTS: None}
    while len(coded) < vocabulary_size:
        coded["".join(rng.choices(string.ascii_lowercase, k=_CODED_LETTERS))] = None
    ranked = list(coded)
    times = [int(count * rank**-_ALPHA / _ZETA) for rank in range(1, len(ranked) + 1)]
    listed = [word for word, repeats in zip(ranked, times, strict=True) for _ in range(repeats)]
    rng.shuffle(listed)
    return Sample(_FWE_MESSAGE.format(context=" ".join(listed)), _FWE_OPENING, tuple(ranked[1:4]))


def _check_cwe(settings: EvalSettings) -> None:
    vocabulary.running_text(settings, "ruler_cwe")


def _open_cwe(settings: EvalSettings) -> Callable[[Draw], Growing]:
    words = vocabulary.words_of(vocabulary.running_text(settings, "ruler_cwe"))

    def draw(one: Draw) -> Growing:
        rates = _SHORT if one.length < _LONG_FROM else _LONG
        most = max(0, len(words) - rates.example_words)
        return Growing(COMMON + 1, lambda count: common_words(words, rates, one.seed, count), most)

    return draw


def _open_fwe(settings: EvalSettings) -> Callable[[Draw], Growing]:
    def draw(one: Draw) -> Growing:
        size = max(5, one.room // _TOKENS_PER_CODED_WORD)
        return Growing(_LEAST_CODED, lambda count: frequent_words(size, one.seed, count))

    return draw


RECIPES = (
    Recipe("cwe", "string_match_all", 120, _check_cwe, _open_cwe),
    Recipe("fwe", "string_match_all", 50, lambda settings: None, _open_fwe),
)
