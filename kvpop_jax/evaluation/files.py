"""The data files of tasks: rows of JSON lines, Parquet or CSV, and files from the hub."""

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvpop_jax.errors import UserError


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .jsonl, .parquet or .csv file (whose first line names the columns), one after the other.

    Raises:
        UserError: The file is not what its name says; the message names the line.
    """
    match path.suffix:
        case ".parquet":
            yield from _parquet_rows(path)
        case ".csv":
            with path.open(encoding="utf-8", newline="") as lines:
                yield from csv.DictReader(lines)
        case _:
            with path.open(encoding="utf-8") as lines:
                yield from json_rows(lines, path)


def json_rows(lines: Iterable[str], path: Path) -> Iterator[dict[str, Any]]:
    """A JSON object a line, blank lines passed over; `path` is named when one is not."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}: line {number} is not JSON: {error.msg}") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}: line {number} is not a JSON object")
        yield row


def from_hub(task: str, hub_id: str, file: str, wanted: str) -> Path:
    """A file of a data set on the Hugging Face hub, downloaded or found in the hub's cache.

    Raises:
        UserError: It cannot be had; `wanted` is what `--data_dir` could hold instead.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(hub_id, file, repo_type="dataset"))
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise UserError(
            f"{task}: {hub_id} could not be had from the hub; put {wanted} into a folder and name it by --data_dir"
        ) from error


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"reading {path.name} from the hub needs `pip install pyarrow`; or use --data_dir") from error
    return parquet.read_table(path).to_pylist()
