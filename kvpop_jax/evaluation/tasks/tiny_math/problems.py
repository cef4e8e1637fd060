"""Problems by index: generation with random access, the training document, exact grading."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation.tasks.tiny_math import chain, facts, mixed, receipt, totals
from kvpop_jax.evaluation.tasks.tiny_math.grammar import LONGEST_GAP, NUMBER, Draft
from kvpop_jax.evaluation.tasks.tiny_math.vocabulary import BEGIN, END, NEWLINE

FAMILIES: dict[str, Callable[[Random, int], Draft]] = {
    "chain": chain.build,
    "totals": totals.build,
    "receipt": receipt.build,
    "facts": facts.build,
    "mixed": mixed.build,
}
HELD_OUT_FAMILIES = ("mixed",)
TRAIN_FAMILIES = tuple(name for name in FAMILIES if name not in HELD_OUT_FAMILIES)
SPLITS = ("train", "valid", "test")
SHORTEST, LONGEST = 300, 1800  # tokens: two steps of every family fit, and 40 labels and 60 names suffice


@dataclass(frozen=True)
class Problem:
    """One problem: what the model is asked (`prompt`), the worked `solution`, the exact `answer` ("d d d").

    `steps` counts worked steps. `document` is prompt and solution as trained.
    """

    id: str
    family: str
    prompt: str
    solution: str
    answer: str
    steps: int

    @property
    def document(self) -> str:
        """Begin, prompt, `solution :`, solution, end: what the tokenizer's chat template gives for the two turns."""
        return f"{prompt_text(self.prompt)}{self.solution} {END}"


def prompt_text(prompt: str) -> str:
    """The prompt as a model sees it, up to where its solution starts."""
    return f"{BEGIN} {prompt}{NEWLINE}solution :{NEWLINE}"


def generate(
    index: int,
    *,
    seed: int,
    split: str,
    families: tuple[str, ...] = TRAIN_FAMILIES,
    min_tokens: int = 450,
    max_tokens: int = 1000,
) -> Problem:
    """Problem number `index` of a split: a pure function of its arguments.

    The family is uniform over `families`; the document's length is uniform over `min_tokens`..`max_tokens` (tokens,
    begin and end included). Splits and seeds have hashed, unrelated streams.
    UserError on an unknown split or family, or lengths outside 300..1800.
    """
    if split not in SPLITS:
        raise UserError(f"tiny_math split {split!r} is unknown; use one of {', '.join(SPLITS)}")
    unknown = [name for name in families if name not in FAMILIES]
    if unknown or not families:
        raise UserError(f"tiny_math families {unknown} are unknown; use one or more of {', '.join(FAMILIES)}")
    if not SHORTEST <= min_tokens <= max_tokens - LONGEST_GAP <= LONGEST - LONGEST_GAP:
        raise UserError(
            f"tiny_math lengths {min_tokens}..{max_tokens} do not fit: min_tokens must be at least {SHORTEST}, "
            f"max_tokens at least min_tokens + {LONGEST_GAP} and at most {LONGEST}"
        )
    stream = hashlib.blake2b(f"tiny_math/{split}/{seed}/{index}".encode(), digest_size=16)
    rng = Random(int.from_bytes(stream.digest(), "big"))
    family = families[int(rng.random() * len(families))]
    # A builder ends up to LONGEST_GAP tokens short of its target.
    target = rng.randint(min_tokens + LONGEST_GAP, max_tokens)
    draft = FAMILIES[family](rng, target)
    answer = NUMBER[draft.answer]
    return Problem(
        id=f"{family}-{split}-{seed}-{index}",
        family=family,
        prompt=NEWLINE.join(draft.prompt),
        solution=NEWLINE.join([*draft.solution, f"answer : {answer}"]),
        answer=answer,
        steps=draft.steps,
    )


_ANSWER = re.compile(r"^ *answer : (\d \d \d) *$", re.MULTILINE)


def final_answer(text: str) -> str | None:
    """The three digits of the last `answer : d d d` line before the end token, or None."""
    found = _ANSWER.findall(text.split(END, 1)[0])
    return found[-1] if found else None


def grade(problem_answer: str, text: str) -> bool:
    """Whether the generated `text` ends in the exact answer."""
    return final_answer(text) == problem_answer
