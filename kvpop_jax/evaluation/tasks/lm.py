"""`lm`: how well held-out text is predicted through the bounded cache, and how close that stays to the dense model."""

from typing import Any

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation import corpus
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.evaluation.tasks.base import TextTask, Window

DEFAULT_WINDOWS = 8


def check(settings: EvalSettings) -> None:
    """There must be text to read."""
    if not corpus.text_files(settings):
        raise UserError("lm needs text: --text FILE, or --data_dir with a folder longtext of .txt files")


def windows(settings: EvalSettings, tokenizer: Any) -> list[Window]:
    """For every length of the settings, `settings.problems` (8) windows spread evenly over the files."""
    check(settings)
    files = corpus.text_files(settings)
    total = settings.problems or DEFAULT_WINDOWS
    found = []
    for length in settings.lengths:
        for index, path in enumerate(files):
            count = total // len(files) + (index < total % len(files))
            if not count:
                continue
            for place, tokens in enumerate(corpus.token_windows(tokenizer, corpus.read_text(path), length, count)):
                prefix = min(max(1, round(settings.prefix * length)), length - 1)
                found.append(Window(f"{path.stem}-{length}-{place}", tuple(tokens), prefix, f"length {length}"))
    return found


TASKS = (TextTask("lm", lambda settings: max(settings.lengths), check, windows),)
