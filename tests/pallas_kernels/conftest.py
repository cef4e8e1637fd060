"""How the tests of Pallas kernels run without their hardware."""

import importlib.util
from collections.abc import Iterator

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps kernels out of the lane of core tests, whose marks they inherit with their suites."""
    for item in items:
        if any(item.get_closest_marker(lane) for lane in ("tpu", "gpu", "gpu_interpret")):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "core"]


@pytest.fixture
def tpu_interpreter(capsys) -> Iterator[None]:
    """Runs TPU kernels on a simulated TPU: a race fails the test, memory that nobody wrote to holds NaN.

    DMAs happen when they are waited for, so that what is read before a wait is NaN too.
    """
    yield from _interpreted(
        pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", dma_execution_mode="on_wait")
    )
    # JAX 0.12 raises; JAX 0.10 prints the race and has forgotten it at the next kernel.
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.fixture
def plain_interpreter() -> Iterator[None]:
    """Runs TPU kernels as plain JAX, block by block and without memory spaces: quick."""
    yield from _interpreted(True)


def _interpreted(params) -> Iterator[None]:
    try:
        with pltpu.force_tpu_interpret_mode(params):
            yield
    finally:
        pltpu.reset_tpu_interpret_mode_state()  # an exception inside a kernel leaves its simulated memory behind


@pytest.fixture
def gpu_interpreter() -> Iterator[None]:
    """Runs GPU kernels on a simulated GPU, which JAX has from 0.11 on."""
    from jax.experimental.pallas import mosaic_gpu

    jax.clear_caches()  # programs traced to be lowered
    with mosaic_gpu.force_gpu_interpret_mode():
        yield
    jax.clear_caches()


@pytest.fixture
def libtpu() -> Iterator[None]:
    """Skips the test where the TPU compiler is missing; compiles as for real, not in the haste of the other tests."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, the TPU compiler, is not installed: pip install 'jax[tpu]'")
    yield from _compiled_as_for_real()


@pytest.fixture
def hopper() -> Iterator[None]:
    """Skips the test where there is no Hopper GPU; compiles as for real."""
    if jax.default_backend() != "gpu" or not jax.devices()[0].compute_capability.startswith("9."):
        pytest.skip("there is no Hopper GPU, or JAX was not told to use it: JAX_PLATFORMS=cuda")
    yield from _compiled_as_for_real()


def _compiled_as_for_real() -> Iterator[None]:
    before = {
        "jax_disable_most_optimizations": jax.config.read("jax_disable_most_optimizations"),
        "jax_enable_compilation_cache": jax.config.jax_enable_compilation_cache,
    }
    for name in before:
        jax.config.update(name, False)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
