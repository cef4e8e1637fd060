"""Does a program pass its tests? Every test runs it in a process of its own, with limits of time, memory and output.

This is no sandbox: the program can read files and reach the network as the user who runs the evaluation. It gets an
empty folder, an empty environment, and is killed with all its children.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

CPU_SECONDS = 6  # of one test, as LiveCodeBench has it
WALL_SECONDS = 2 * CPU_SECONDS  # the machine may be busy
MEMORY_BYTES = 4 << 30
OUTPUT_BYTES = 64 << 20

# What LiveCodeBench puts before a program: solutions are written for judges that do.
_IMPORTED = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
_LAUNCHER = f"""
import json, os, resource, sys
function = sys.argv[1]
limits = {{"CPU": {CPU_SECONDS}, "AS": {MEMORY_BYTES}, "FSIZE": {OUTPUT_BYTES}, "CORE": 0}}
for name, limit in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
sys.setrecursionlimit(50000)
names = {{"__name__": "__main__"}}
for module in {_IMPORTED}:
    exec("from " + module + " import *", names)
for module in {_IMPORTED}:
    exec("import " + module, names)
result = sys.stdout
if function:
    sys.stdout = open(os.devnull, "w")
exec(compile(open("solution.py", encoding="utf-8").read(), "solution.py", "exec"), names)
if function:
    owner = names["Solution"]() if "Solution" in names else None
    call = getattr(owner, function) if owner is not None else names[function]
    value = call(*(json.loads(line) for line in sys.stdin.read().split("\\n")))
    json.dump(value, result)
    result.flush()
"""


@dataclass(frozen=True)
class Case:
    """What the program reads and must print; of a function, its arguments as JSON, one a line, and its value."""

    input: str
    output: str


def passes(code: str, tests: Sequence[Case], function: str = "") -> bool:
    """Whether the program passes all tests, of which there must be one.

    Args:
        code: Python.
        tests: Run one after the other until one fails.
        function: Name of the function, or method of a class `Solution`, to call; empty for a program that reads
            standard input and prints.
    """
    if not code.strip() or not tests:
        return False
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "solution.py").write_text(code, encoding="utf-8", errors="replace")
        for test in tests:
            printed = _run(Path(folder), test.input, function)
            if printed is None:
                return False
            if not (_same_value(printed, test.output) if function else same_output(printed, test.output)):
                return False
    return True


def same_output(printed: str, expected: str) -> bool:
    """Whether the lines are the same but for space around them, numbers compared by value."""
    lines, wanted = ([line.strip() for line in text.strip().split("\n")] for text in (printed, expected))
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(line: str, wanted: str) -> bool:
    if line == wanted:
        return True
    try:
        return [Decimal(word) for word in line.split()] == [Decimal(word) for word in wanted.split()]
    except InvalidOperation:
        return False


def _same_value(printed: str, expected: str) -> bool:
    try:
        return bool(json.loads(printed) == json.loads(expected))
    except json.JSONDecodeError:
        return False


def _run(folder: Path, text: str, function: str) -> str | None:
    """What the program in the folder prints; None when it fails or takes too long."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as entered:
        entered.write(text.encode())
        entered.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _LAUNCHER, function],
            stdin=entered,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},  # Python's own
            start_new_session=True,
        )
        try:
            failed = process.wait(WALL_SECONDS) != 0
        except subprocess.TimeoutExpired:
            failed = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if failed:
            return None
        output.seek(0)
        return output.read().decode("utf-8", errors="replace")
