"""tiny_math: generated multi-step problems whose worked solutions outgrow a compressed cache.

- `vocabulary`: the closed vocabulary, token classes, fast encoding.
- `grammar`: what all families share: digit-wise scratch work, labels, filler.
- `chain`, `totals`, `receipt`, `facts`: the families of the training mix; `mixed`: held out.
- `problems`: problems by index, the training document, exact grading.
"""

from kvpop_jax.evaluation.tasks.tiny_math.problems import (
    FAMILIES,
    HELD_OUT_FAMILIES,
    TRAIN_FAMILIES,
    Problem,
    final_answer,
    generate,
    grade,
    prompt_text,
)
from kvpop_jax.evaluation.tasks.tiny_math.vocabulary import CLASSES, TOKENS, encode, token_class, words

__all__ = [
    "CLASSES",
    "FAMILIES",
    "HELD_OUT_FAMILIES",
    "TOKENS",
    "TRAIN_FAMILIES",
    "Problem",
    "encode",
    "final_answer",
    "generate",
    "grade",
    "prompt_text",
    "token_class",
    "words",
]
