"""JSONL files that are appended to line by line and may be cut short by a kill."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file, none if there is no file; an unfinished last one is cut off the file."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    return whole.splitlines()


def append(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Adds rows to the file's end, one line each."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with path.open("a", encoding="utf-8") as file:
        file.write(lines)
