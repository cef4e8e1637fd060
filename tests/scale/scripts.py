"""The repository's own scripts, started by tests."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(arguments, log, devices=1):
    """A process of the repository's own scripts, with so many CPU devices; it writes to `log`."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=log.open("ab"), stderr=subprocess.STDOUT
    )


def finish(processes, logs):
    """Waits for them to end well; none outlives a failure."""
    try:
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(timeout=600) == 0, log.read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()
