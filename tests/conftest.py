"""Shared by all tests: the platform, deterministic hypothesis runs, and float64.

`pyproject.toml` puts this folder on the import path, so tests anywhere below may import `oracles`.
"""

import os
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Nearly all of the suite's time is XLA compiling small programs that then run once.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# More than half of that goes into XLA's newer emitters of loops; later versions have no others, nor such a flag.
if metadata.version("jaxlib") < "0.11":
    os.environ["XLA_FLAGS"] = f"--xla_cpu_use_fusion_emitters=false {os.environ.get('XLA_FLAGS', '')}".strip()
# ... and many tests compile the same program: a cache for this run only, shared with its worker processes; or the one
# that the environment names, which lanes share.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="kvpop-jax-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

import hypothesis
import jax
import pytest

LANES = {"literal", "multiprocess", "tpu", "tpu_compile", "gpu", "gpu_interpret"}

hypothesis.settings.register_profile("kvpop", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("kvpop")


def pytest_configure(config: pytest.Config) -> None:
    """What interpreted kernels need of the CPU device, before any test module makes JAX start it.

    They call back into Python, which computes with JAX in turn. Programs that wait for an interpreted one hold permits
    to be in flight, 32 in all, and the callback can wait for one of them forever: so each runs as it is dispatched.
    On a simulated GPU every warpgroup moreover runs on a thread of XLA's pool and waits there at barriers for the
    others: with fewer threads than warpgroups, forever.
    """
    lane = config.option.markexpr
    if lane in ("tpu", "gpu_interpret"):
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    if lane == "gpu_interpret":
        os.environ.setdefault("PJRT_NPROC", "16")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Imports no file that names no test of the lane asked for: importing all of them takes longer than some lanes.

    A lane's tests are therefore marked in the file that collects them, as all are.
    """
    lane = config.option.markexpr
    if lane not in LANES or not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    return f"mark.{lane}" not in collection_path.read_text() or None


@pytest.fixture
def float64() -> Iterator[None]:
    """Runs the test with 64-bit types enabled; without it JAX rounds every float64 to float32."""
    with jax.enable_x64(True):
        yield
