"""Numbers on the benchmarks' command lines, refused before any work with one line and exit code 2."""

from argparse import ArgumentTypeError


def count(text: str) -> int:
    """A whole number, at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Such numbers, comma-separated."""
    return tuple(map(count, text.split(",")))


def batches(text: str) -> tuple[int | None, ...]:
    """Such numbers; None for `max`."""
    return tuple(None if part == "max" else count(part) for part in text.split(","))
