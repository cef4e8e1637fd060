"""What runs on a GPU while a program does, kernel by kernel, as JAX's profiler sees it."""

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def kernel_times(run: Callable[[], Any], runs: int, most: int = 12) -> list[str]:
    """One line for the whole and one for each of the `most` longest kernels: microseconds, launches, both of one run.

    `run` starts work on the device and returns what to wait for; `runs` is how many of what is of interest that is.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = [event for event in events if event.get("ph") == "M"]
    devices = {e["pid"] for e in named if e["name"] == "process_name" and "GPU" in e["args"]["name"]}
    streams = {(e["pid"], e["tid"]) for e in named if e["name"] == "thread_name" and "Stream" in e["args"]["name"]}
    spent: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in events:
        if event.get("ph") == "X" and event["pid"] in devices and (event["pid"], event["tid"]) in streams:
            spent[event["name"]] += event["dur"]
            launches[event["name"]] += 1
    lines = [f"busy {sum(spent.values()) / runs:.2f} us, {sum(launches.values()) / runs:.1f} launches"]
    lines += [f"{us / runs:8.2f} us {launches[name] / runs:6.2f} x {name[:90]}" for name, us in spent.most_common(most)]
    return lines
