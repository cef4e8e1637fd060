"""Running text for the tasks that read it: whole files, and evenly spaced token windows cut from them."""

import re
from pathlib import Path
from typing import Any

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation.settings import EvalSettings

_CHARACTERS_PER_TOKEN = 12  # generous: a slice of this many characters a token always holds enough tokens
_FRONT_MATTER = 0.03  # share of a book skipped at its start: title pages and tables of contents


def text_files(settings: EvalSettings) -> list[Path]:
    """The text files the settings point to: `text`, else `data_dir/longtext/*.txt`; empty when neither is given.

    Raises:
        UserError: A file or folder that was named does not exist, or the folder holds no text.
    """
    if settings.text is not None:
        path = Path(settings.text)
        if not path.is_file():
            raise UserError(f"text: no file {path}")
        return [path]
    if settings.data_dir is None:
        return []
    files = sorted((Path(settings.data_dir) / "longtext").glob("*.txt"))
    if not files:
        raise UserError(
            f"data_dir: no text file {Path(settings.data_dir) / 'longtext' / '*.txt'}; or name one by --text"
        )
    return files


def read_text(path: Path) -> str:
    """A file's text without the hard line breaks inside paragraphs."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text.replace("\r\n", "\n"))


def token_windows(tokenizer: Any, text: str, length: int, count: int) -> list[list[int]]:
    """`count` windows of exactly `length` tokens from evenly spaced places of the text, each beginning at a word.

    The tokenizer's own start token is included where it adds one.

    Raises:
        UserError: The text is shorter than one window.
    """
    first = int(len(text) * _FRONT_MATTER)
    step = (len(text) - first) // count
    windows = []
    for index in range(count):
        start = text.find(" ", first + index * step) + 1
        piece = text[start : start + length * _CHARACTERS_PER_TOKEN]
        tokens = list(tokenizer(piece)["input_ids"])[:length]
        if len(tokens) < length:
            raise UserError(f"text: {len(tokens)} tokens after its place {index + 1} of {count}, fewer than {length}")
        windows.append(tokens)
    return windows
