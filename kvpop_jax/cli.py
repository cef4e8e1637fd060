"""From the command line to a frozen dataclass, and from an error to an exit code: shared by all scripts."""

import dataclasses
import json
import os
import signal
import sys
import types
import typing
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jsonargparse
import yaml

from kvpop_jax.errors import UserError

Settings = TypeVar("Settings")


def parse(cls: type[Settings], argv: Sequence[str], description: str = "") -> Settings:
    """Builds `cls` from `--config FILE` (YAML) and `--section.field VALUE` overrides, the later of two winning.

    `--help` prints every field with its explanation, type and default, and exits 0. A list is written `a,b,c` or
    `[a, b, c]`.

    Args:
        cls: a frozen dataclass whose fields are plain values, lists of them, or further dataclasses (the sections).
        argv: the arguments after the script's name.
        description: first line of `--help`.

    Raises:
        UserError: an unknown, missing or ill-typed key, an unreadable file, or a value the dataclass refuses.
    """
    parser = jsonargparse.ArgumentParser(description=description, exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file with any of the fields below.")
    parser.add_class_arguments(cls)
    try:
        namespace = parser.parse_args(list(_bracket_lists(argv, dict(_list_fields(cls)))))
        del namespace["config"]
        built = parser.instantiate(namespace)
    except (ArgumentError, ValueError) as error:
        raise UserError(" ".join(str(error).split())) from error
    return cls(**vars(built))


def to_yaml(settings: Any) -> str:
    """The YAML that `parse` turns back into `settings`."""
    return yaml.safe_dump(to_plain(settings), sort_keys=False, width=120)


def to_plain(settings: Any) -> dict[str, Any]:
    """A dataclass as nested dicts and lists of plain values."""
    return json.loads(json.dumps(dataclasses.asdict(settings)))


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields one `section.field: old, now new` for every field in which two `to_plain` trees differ."""
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from differences(before, after, f"{prefix}{key}.")
        elif before != after:
            yield f"{prefix}{key}: {before}, now {after}"


class Terminated(KeyboardInterrupt):
    """SIGTERM: work ends as it does on Ctrl-C, with what is finished written down."""


def exit_code(stop: KeyboardInterrupt) -> int:
    """That of a program which the signal ended."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


def run(main: Callable[[Sequence[str]], int]) -> typing.NoReturn:
    """Calls a script's `main` with the arguments; a `UserError` becomes one line on stderr and exit code 2.

    SIGTERM is another Ctrl-C. Where nothing answers it (a model being loaded, a program being compiled) it ends with a
    line and 143, or 130. A reader that went away (`| head`) ends it with 141, as it ends any program.
    """

    def terminate(number: int, frame: Any) -> None:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt as stop:
        print("stopped", file=sys.stderr)
        code = exit_code(stop)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more on its way out
        code = 141
    finally:
        signal.signal(signal.SIGTERM, previous)
    sys.exit(code)


def check_output(folder: Path, field: str) -> None:
    """Refuses a folder that cannot be made or written to, without making it; `field` is what named it.

    Raises:
        UserError: naming what stands in the way.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"{field}: {there} is a file; name a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{field}: {there} cannot be written to; name another folder")


def _list_fields(cls: type, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yields (option, whether its items are text) for every list field of `cls` and of its sections."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        for option in options:
            if dataclasses.is_dataclass(option) and isinstance(option, type):
                yield from _list_fields(option, f"{prefix}{field.name}.")
            elif typing.get_origin(option) in (list, tuple):
                yield f"--{prefix}{field.name}", typing.get_args(option)[0] is str


def _bracket_lists(argv: Sequence[str], lists: dict[str, bool]) -> Iterator[str]:
    """Rewrites `--field a,b` to `--field [a,b]` where the field is a list: what everyone types, and what is parsed."""
    pending: str | None = None
    for argument in argv:
        option, equals, value = argument.partition("=")
        if pending is not None:
            yield _bracket(argument, lists[pending])
            pending = None
        elif equals and option in lists:
            yield f"{option}={_bracket(value, lists[option])}"
        else:
            pending = argument if argument in lists else None
            yield argument


def _bracket(value: str, text: bool) -> str:
    if value.startswith("[") or value == "null":
        return value
    return json.dumps([item for item in value.split(",") if item]) if text else f"[{value}]"
