"""Where documents come from: JSONL and Parquet files, or problems generated on demand. Random access, no JAX."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvpop_jax.config import DataConfig
from kvpop_jax.errors import UserError

BENCHMARKS = (
    "gsm8k_test", "math500", "aime24", "aime25", "hmmt_feb_2025", "gpqa_diamond", "livecodebench*",
)  # fmt: skip
"""Names, without their ending, of the files that evaluations read questions from."""

ROW_FORMS = "`messages`, `problem` and `response`, `prompt` and `response`, or `text`"


@dataclass(frozen=True)
class Row:
    """One document before tokenisation.

    Attributes:
        where: names the row in errors: file and line, or generator and index.
        messages: a chat that ends with the assistant, or
        prompt, response: a raw beginning (empty for running text) and what follows it.
    """

    where: str
    messages: Sequence[Mapping[str, str]] = ()
    prompt: str = ""
    response: str = ""


class Source(Protocol):
    """Random access to documents, picklable, the same row for the same index in every process."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


def open_source(settings: DataConfig, seed: int) -> Source:
    """The source that `settings` describes; files are read through once, so that a bad row is found before training.

    Raises:
        UserError: a path that does not exist or holds no rows, or a bad row, named by file and line.
    """
    if settings.source == "tiny_math":
        return TinyMathSource(settings.problems, seed)
    tables = [_open_table(path) for path in _expand(settings.paths)]
    source = FileSource(tables)
    if len(source) == 0:
        raise UserError(f"data.paths: no rows in {', '.join(settings.paths)}")
    return source


@dataclass(frozen=True)
class TinyMathSource:
    """Problems of the tiny_math task (training split), made when asked for.

    Attributes: how many there are, and the seed of all of them.
    """

    problems: int
    seed: int

    def __len__(self) -> int:
        return self.problems

    def __getitem__(self, index: int) -> Row:
        from kvpop_jax.evaluation.tasks import tiny_math

        problem = tiny_math.generate(int(index), seed=self.seed, split="train")
        messages = ({"role": "user", "content": problem.prompt}, {"role": "assistant", "content": problem.solution})
        return Row(f"tiny_math problem {index}", messages)


@dataclass(frozen=True)
class JsonlTable:
    """One JSONL file, read by the byte offsets of its lines: it may be larger than memory."""

    path: str
    offset_R: np.ndarray
    line_R: np.ndarray

    def __len__(self) -> int:
        return len(self.offset_R)

    def __getitem__(self, index: int) -> Row:
        with open(self.path, "rb") as file:
            file.seek(self.offset_R[index])
            return parse_row(_decode(file.readline(), f"{self.path}:{self.line_R[index]}"))


@dataclass(frozen=True)
class ParquetTable:
    """One Parquet file, held in memory as Arrow columns (for more than memory holds, convert it to JSONL)."""

    path: str
    columns: tuple[str, ...]
    rows: int
    loaded: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Row:
        if not self.loaded:
            self.loaded["table"] = _pyarrow_parquet().read_table(self.path, columns=list(self.columns))
        values = {name: self.loaded["table"].column(name)[index].as_py() for name in self.columns}
        return parse_row((f"{self.path}: row {index}", values))

    def __getstate__(self) -> dict[str, Any]:
        # A worker process reads the file itself instead of being sent its contents.
        return {**vars(self), "loaded": {}}


@dataclass(frozen=True)
class FileSource:
    """Several tables, one after the other."""

    tables: Sequence[JsonlTable | ParquetTable]

    def __len__(self) -> int:
        return sum(len(table) for table in self.tables)

    def __getitem__(self, index: int) -> Row:
        index = int(index)
        for table in self.tables:
            if index < len(table):
                return table[index]
            index -= len(table)
        raise IndexError(index)


def parse_row(row: tuple[str, Any]) -> Row:
    """Turns `(where, decoded row)` into a `Row`; `UserError` says what is wrong with it and where it stands."""
    where, values = row
    if not isinstance(values, dict):
        raise UserError(f"{where}: a row must be an object, not {type(values).__name__}")
    if values.get("messages") is not None:
        return Row(where, _checked_chat(where, values["messages"]))
    for prompt_key in ("problem", "prompt"):
        if values.get(prompt_key) is not None:
            prompt, response = _text(where, values, prompt_key), _text(where, values, "response")
            if prompt_key == "prompt":
                return Row(where, prompt=prompt, response=response)
            chat = ({"role": "user", "content": prompt}, {"role": "assistant", "content": response})
            return Row(where, chat)
    if values.get("text") is not None:
        return Row(where, response=_text(where, values, "text"))
    raise UserError(f"{where}: needs {ROW_FORMS}; it has {', '.join(values) or 'nothing'}")


def refuse_benchmark(path: Path, field: str) -> None:
    """Refuses a file named like one of a benchmark's, which a folder named for other files may hold.

    Raises:
        UserError: naming the field and the file.
    """
    if any(fnmatch(path.stem.lower(), name) for name in BENCHMARKS):
        raise UserError(
            f"{field}: {path} is named as a benchmark's file is; a model trained on that cannot be judged by it: "
            "leave it out, or rename it if it is something else"
        )


def _checked_chat(where: str, messages: Any) -> Sequence[Mapping[str, str]]:
    if not isinstance(messages, list) or len(messages) == 0:
        raise UserError(f"{where}: `messages` must be a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise UserError(f"{where}: every message needs a `role` and a `content`, both text")
    if messages[-1]["role"] != "assistant":
        raise UserError(f"{where}: the last message must be the assistant's, not the {messages[-1]['role']}'s")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _text(where: str, values: dict[str, Any], key: str) -> str:
    value = values.get(key)
    if not isinstance(value, str) or not value:
        raise UserError(f"{where}: `{key}` must be text, not {'missing' if value is None else repr(value)[:40]}")
    return value


def _expand(paths: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix in (".jsonl", ".parquet"))
            if not inside:
                raise UserError(f"data.paths: no .jsonl or .parquet file in {path}")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise UserError(f"data.paths: {path} does not exist")
    for file in found:
        refuse_benchmark(file, "data.paths")
    return found


def _open_table(path: Path) -> JsonlTable | ParquetTable:
    if path.suffix == ".jsonl":
        return _index_jsonl(path)
    if path.suffix == ".parquet":
        return _index_parquet(path)
    raise UserError(f"data.paths: {path} must end in .jsonl or .parquet")


def _index_jsonl(path: Path) -> JsonlTable:
    offsets, lines, position = [], [], 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                parse_row(_decode(line, f"{path}:{number}"))
                offsets.append(position)
                lines.append(number)
            position += len(line)
    return JsonlTable(str(path), np.asarray(offsets, np.int64), np.asarray(lines, np.int64))


def _decode(line: bytes, where: str) -> tuple[str, Any]:
    try:
        return where, json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not a line of JSON ({error})") from error


def _index_parquet(path: Path) -> ParquetTable:
    parquet = _pyarrow_parquet()
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a Parquet file ({error})") from error
    known = ("messages", "problem", "prompt", "response", "text")
    columns = tuple(name for name in file.schema_arrow.names if name in known)
    if not columns:
        raise UserError(f"{path}: needs the columns {ROW_FORMS}; it has {', '.join(file.schema_arrow.names)}")
    return ParquetTable(str(path), columns, file.metadata.num_rows)


def _pyarrow_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("reading Parquet needs pyarrow: pip install pyarrow") from error
    return pyarrow.parquet
