"""Runs `transformers_worker.py`, and says in one line what went wrong with it."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvpop_jax.errors import UserError

_WORKER = Path(__file__).with_name("transformers_worker.py")


class Transformers:
    """The worker process, alive between two runs so that they can take turns with others'."""

    def __init__(self, options: dict[str, Any]):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        command = [sys.executable, str(_WORKER), json.dumps(options)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True)

    def seconds_per_token(self) -> float:
        """Of one more run.

        Raises:
            UserError: the process has ended; its last line says why.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and the next line is empty
        answer = self._process.stdout.readline()
        if not answer:
            self._process.wait()
            self._errors.seek(0)
            lines = [line.strip() for line in self._errors if line.strip()]
            raise UserError(f"transformers: {lines[-1] if lines else 'ended without a word'}")
        found = json.loads(answer)
        return found["seconds"] / found["tokens"]

    def close(self) -> None:
        """Ends the process and waits for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()
