"""LongBench's problems: `NAME.jsonl` or `longbench_NAME*.jsonl` in `data_dir`, else the archive on the hub."""

import json
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvpop_jax.errors import UserError
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
        UserError: The file is missing from `data_dir`, or the hub cannot be reached.
    """
    if settings.data_dir is None:
        return _download(name)
    folder = Path(settings.data_dir)
    # A number may follow the name: how many rows of the official file were kept.
    pattern = re.compile(rf"(longbench_)?{re.escape(name)}(_\d+)?\.jsonl")
    files = sorted(path for path in folder.glob("*.jsonl") if pattern.fullmatch(path.name))
    if not files:
        raise UserError(
            f"longbench_{name}: no file {folder / name}.jsonl; data_dir must hold it, or leave data_dir out to use the "
            f"hub"
        )
    return files[0]


def load(name: str, settings: EvalSettings) -> list[Row]:
    """The task's problems in file order, the first `settings.problems` of them.

    Raises:
        UserError: As `locate`, or a row cannot be read.
    """
    path = locate(name, settings)
    found: list[Row] = []
    for number, line in enumerate(_lines(path, name), start=1):
        if settings.problems is not None and len(found) >= settings.problems:
            break
        if line.strip():
            found.append(_row(line, f"{path}: line {number}", number))
    if not found:
        raise UserError(f"{path}: no problems in the file")
    return found


def _row(line: str, where: str, number: int) -> Row:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg}") from error
    if not isinstance(content, dict):
        raise UserError(f"{where} is not a JSON object")
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


def _lines(path: Path, name: str) -> Iterable[str]:
    try:
        if path.suffix != ".zip":
            return path.read_text(encoding="utf-8").split("\n")
        with zipfile.ZipFile(path) as archive:
            return archive.read(f"data/{name}.jsonl").decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except (KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} does not hold data/{name}.jsonl: {error}") from error


def _download(name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(_HUB_ID, _HUB_FILE, repo_type="dataset"))
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise UserError(
            f"longbench_{name}: {_HUB_ID} could not be had from the hub; put {name}.jsonl of its {_HUB_FILE} into a "
            f"folder and name it by --data_dir"
        ) from error
