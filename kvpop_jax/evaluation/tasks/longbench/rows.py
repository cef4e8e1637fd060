"""LongBench's problems: `NAME.jsonl` or `longbench_NAME*.jsonl` in `data_dir`, else the archive on the hub."""

import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation import files
from kvpop_jax.evaluation.settings import EvalSettings

_HUB_ID, _HUB_FILE = "THUDM/LongBench", "data.zip"


@dataclass(frozen=True)
class Row:
    """One problem: a long text, a question about it (may be empty), answers of which the best counts.

    `classes` are the names that a classification chooses from, else null.
    """

    id: str
    context: str
    question: str
    answers: tuple[str, ...]
    classes: tuple[str, ...] | None


def locate(name: str, settings: EvalSettings) -> Path:
    """The task's file in `data_dir`, or the archive of all tasks, downloaded from the hub.

    Raises:
        UserError: The file is missing from `data_dir`, or there are several, or the hub cannot be reached.
    """
    if settings.data_dir is None:
        return files.from_hub(f"longbench_{name}", _HUB_ID, _HUB_FILE, f"{name}.jsonl of its {_HUB_FILE}")
    folder = Path(settings.data_dir)
    # A number may follow the name: how many rows of the official file were kept.
    pattern = re.compile(rf"(longbench_)?{re.escape(name)}(_\d+)?\.jsonl")
    found = sorted(path for path in folder.glob("*.jsonl") if pattern.fullmatch(path.name))
    if not found:
        raise UserError(
            f"longbench_{name}: no file {folder / name}.jsonl; data_dir must hold it, or leave data_dir out to use the "
            f"hub"
        )
    if len(found) > 1:
        raise UserError(f"longbench_{name}: {found[0]} and {found[1].name} are both of the task; leave one in data_dir")
    return found[0]


def load(name: str, settings: EvalSettings) -> list[Row]:
    """The task's problems in file order, the first `settings.problems` of them.

    Raises:
        UserError: As `locate`, or a row cannot be read.
    """
    path = locate(name, settings)
    content = _archived(path, name) if path.suffix == ".zip" else files.read_rows(path)
    found = [
        _row(row, number, f"{path}: row {number}")
        for number, row in enumerate(islice(content, settings.problems), start=1)
    ]
    if not found:
        raise UserError(f"{path}: no problems in the file")
    return found


def _row(content: dict[str, Any], number: int, where: str) -> Row:
    # The official names, then those of the other task files in a data_dir.
    fields = {}
    for names in (("context",), ("input", "problem"), ("answers", "answer")):
        given = [name for name in names if name in content]
        if not given:
            raise UserError(f"{where} has no field {names[0]!r}")
        fields[names[0]] = content[given[0]]
    answers = fields["answers"] if isinstance(fields["answers"], list) else [fields["answers"]]
    classes = content.get("all_classes")
    return Row(
        id=str(content.get("_id", content.get("id", number))),
        context=str(fields["context"]),
        question=str(fields["input"]),
        answers=tuple(map(str, answers)),
        classes=None if classes is None else tuple(classes),
    )


def _archived(path: Path, name: str) -> Iterator[dict[str, Any]]:
    try:
        with zipfile.ZipFile(path) as archive:
            text = archive.read(f"data/{name}.jsonl").decode("utf-8")
    except (KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} does not hold data/{name}.jsonl: {error}") from error
    return files.json_rows(text.split("\n"), path)
