"""Shared by all tests: the platform, deterministic hypothesis runs, and float64.

`pyproject.toml` puts this folder on the import path, so tests anywhere below may import `oracles`.
"""

import os
import tempfile
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Nearly all of the suite's time is XLA compiling small programs that then run once.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# ... and many tests compile the same program: a cache for this run only, shared with its worker processes.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="kvpop-jax-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("kvpop", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("kvpop")


def pytest_configure(config: pytest.Config) -> None:
    """Threads for interpreted GPUs, before any test module makes JAX start its CPU device.

    Every warpgroup runs on a thread of XLA's pool and waits there at barriers for the others: with fewer threads than
    warpgroups, forever.
    """
    if "gpu_interpret" in config.option.markexpr.replace("not gpu_interpret", ""):
        os.environ.setdefault("PJRT_NPROC", "16")


@pytest.fixture
def float64() -> Iterator[None]:
    """Runs the test with 64-bit types enabled; without it JAX rounds every float64 to float32."""
    with jax.enable_x64(True):
        yield
