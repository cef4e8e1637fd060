"""`passkey`: a five-digit number hidden in long text, asked for at the end (Mohtashami and Jaggi, 2023, section 4.2).

The question comes after the text, so a policy has to keep the number before it can know that it will be asked.
"""

import random
import re
from typing import Any

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation import corpus
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.evaluation.tasks.base import GenerationTask, Grade, Problem
from kvpop_jax.models import encode_prompt

DEFAULT_PROBLEMS_PER_CELL = 4  # a cell is one length at one depth
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
_HEAD = "A pass key is hidden in the text below. Find it and remember it.\n\n"
_KEY = " The pass key is {key}. Remember it. {key} is the pass key. "
_TAIL = "\n\nWhat is the pass key? Answer with the number."


def check(settings: EvalSettings) -> None:
    """A text folder or file that was named must exist; without one, filler sentences are the haystack."""
    corpus.text_files(settings)


def problems(settings: EvalSettings, tokenizer: Any) -> list[Problem]:
    """For every length and depth: prompts of at most that many tokens, chat template included, with differing keys."""
    files = corpus.text_files(settings)
    texts = [corpus.read_text(path) for path in files] or [FILLER * (max(settings.lengths) // 16 + 64)]
    cells = [(length, depth) for length in settings.lengths for depth in settings.depths]
    total = settings.problems or DEFAULT_PROBLEMS_PER_CELL * len(cells)
    found = []
    for index in range(total):
        length, depth = cells[index % len(cells)]
        rng = random.Random(f"passkey {settings.seed} {index}")
        key = str(rng.randrange(10_000, 100_000))
        prompt = _prompt(tokenizer, _haystack(rng, rng.choice(texts), length), key, length, depth)
        found.append(Problem(f"{length}-{depth:g}-{index // len(cells)}", prompt, key, f"length {length}"))
    return found


def grade(problem: Problem, text: str) -> Grade:
    """Right when the first number of five or more digits is the key."""
    said = re.search(r"\d{5,}", text)
    return Grade(float(said is not None and said[0] == problem.answer), said and said[0])


def _haystack(rng: random.Random, text: str, length: int) -> str:
    """More characters than `length` tokens can hold, from a random sentence of the text on."""
    size = min(len(text), length * 12)
    start = rng.randrange(len(text) - size + 1)
    sentence = text.find(". ", start, start + size // 4)
    return text[sentence + 2 if sentence >= 0 else start :][:size]


def _prompt(tokenizer: Any, haystack: str, key: str, length: int, depth: float) -> str:
    """The message whose encoding fills `length` tokens as nearly as whole words allow, and never more."""
    words = haystack.split(" ")

    def message(count: int) -> str:
        split = round(count * depth)
        before, after = " ".join(words[:split]), " ".join(words[split:count])
        return _HEAD + before + _KEY.format(key=key) + after + _TAIL

    if len(encode_prompt(tokenizer, message(0))) > length:
        raise UserError(f"lengths: {length} tokens do not hold the pass-key question alone; ask for more")
    fits, over = 0, len(words) + 1
    while over - fits > 1:
        middle = (fits + over) // 2
        if len(encode_prompt(tokenizer, message(middle))) <= length:
            fits = middle
        else:
            over = middle
    return message(fits)


TASKS = (
    GenerationTask("passkey", "recall", lambda _: 24, lambda settings: max(settings.lengths), check, problems, grade),
)
