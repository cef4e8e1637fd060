"""Is a mathematical answer right? math-verify's symbolic comparison, made safe for anything a model may write.

math-verify bounds its own time with SIGALRM, which only the main thread may use; called from another thread, the same
comparison runs in a child process (`python -m kvpop_jax.evaluation.grading`) that is killed when it takes too long.
"""

import json
import subprocess
import sys
import threading

from math_verify import parse, verify

TIMEOUT_SECONDS = 5
_START_SECONDS = 60  # a child imports sympy first
_LONGEST_ANSWER = 2000  # characters; no answer of a benchmark comes near, and sympy's parser is not linear


def boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` (or `\fbox{...}`) of the text, braces balanced; None without one.

    The last one counts because models box partial results on the way.
    """
    for start in sorted(_openings(text), reverse=True):
        depth = 1
        for end in range(start, len(text)):
            if text[end] in "{}" and text[end - 1] != "\\":
                depth += 1 if text[end] == "{" else -1
            if depth == 0:
                return text[start:end].strip()
    return None


def final_answer(text: str) -> str | None:
    r"""What the text gives as its answer: the last box after the thinking, else all text after the thinking.

    None when there is no text, or when `<think>` was opened and never closed: numbers met on the way are no answer.
    """
    if "<think>" in text and "</think>" not in text:
        return None
    said = text.rsplit("</think>", 1)[-1]
    inside = boxed(said)
    if inside is not None:
        return inside or None
    return said.strip() or None


def math_equal(answer: str, gold: str) -> bool:
    """Whether the two mean the same number, expression, set, interval or tuple; False when either cannot be read.

    Args:
        answer: What the model said: the content of a box, or prose that math-verify searches for an answer.
        gold: The reference answer, LaTeX without dollar signs.
    """
    if answer.strip() == gold.strip():
        return bool(answer.strip())
    if threading.current_thread() is threading.main_thread():
        return _compare(answer, gold)
    return _compare_in_child(answer, gold)


def _openings(text: str) -> list[int]:
    """Positions just after each opening of a box."""
    found = []
    for command in ("\\boxed{", "\\fbox{"):
        position = text.find(command)
        while position >= 0:
            found.append(position + len(command))
            position = text.find(command, position + 1)
    return found


def _compare(answer: str, gold: str) -> bool:
    # A boxed answer is compared as a box, so that math-verify takes all of it and not the first number it finds. Prose
    # is cut from the front: answers stand at the end.
    if len(gold) > _LONGEST_ANSWER:
        return False
    gold_forms = parse(f"${gold}$", parsing_timeout=TIMEOUT_SECONDS)
    short = len(answer) <= _LONGEST_ANSWER
    forms = parse(f"\\boxed{{{answer}}}", parsing_timeout=TIMEOUT_SECONDS) if short else []
    if _looks_like_prose(answer) or not forms:
        forms = parse(answer[-_LONGEST_ANSWER:], parsing_timeout=TIMEOUT_SECONDS)
    return bool(gold_forms and forms) and bool(verify(gold_forms, forms, timeout_seconds=TIMEOUT_SECONDS))


def _looks_like_prose(answer: str) -> bool:
    return "\n" in answer.strip() or sum(word.isalpha() for word in answer.split()) > 2


def _compare_in_child(answer: str, gold: str) -> bool:
    command = [sys.executable, "-m", "kvpop_jax.evaluation.grading"]
    request = json.dumps({"answer": answer, "gold": gold})
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, text=True, timeout=_START_SECONDS + 4 * TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    return done.stdout.strip() == "true"


if __name__ == "__main__":
    pair = json.load(sys.stdin)
    print(json.dumps(_compare(pair["answer"], pair["gold"])))
