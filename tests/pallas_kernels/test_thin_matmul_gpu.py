"""The GPU kernels of `thin_matmul`: the common suite on an interpreted GPU, and lowering for a real one."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from thin_matmul_suite import EPS, SIZES, ThinMatmulSuite, random_inputs

from pallas_kernels import matmul_add, norm_matmul, norm_swiglu
from pallas_kernels.backend import BackendError
from pallas_kernels.thin_matmul import gpu

_OLD_JAX = jax.__version_info__ < (0, 11, 2)
needs_mosaic_gpu = pytest.mark.skipif(_OLD_JAX, reason="Pallas Mosaic GPU kernels need JAX 0.11.2 or newer")
run = partial(norm_matmul, eps=EPS, backend="gpu")


@pytest.mark.gpu_interpret
@needs_mosaic_gpu
@pytest.mark.usefixtures("gpu_interpreter")
@pytest.mark.parametrize("name", ["one_row"])
class TestOnAnInterpretedGPU(ThinMatmulSuite):
    backend = "gpu"


@pytest.mark.gpu_interpret
@needs_mosaic_gpu
@pytest.mark.usefixtures("gpu_interpreter")
@pytest.mark.parametrize("name", ["three_rows"])
class TestShortTilesThatFollowEachOther(ThinMatmulSuite):
    """Eight to a matrix, and room for three or five."""

    backend = "gpu"

    @pytest.fixture(autouse=True)
    def small_card(self, monkeypatch):
        monkeypatch.setattr(gpu, "_MULTIPROCESSORS", 2)
        monkeypatch.setattr(gpu, "_TILE_BYTES", 102_000)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", SIZES)
class TestOnAGPU(ThinMatmulSuite):
    backend = "gpu"


@pytest.mark.gpu_interpret
@needs_mosaic_gpu
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("hidden", "columns", "feed_forward"), [(4096, 6144, 12_288), (1024, 4096, 3072)])
def test_they_lower_for_a_gpu_at_the_sizes_of_models(rows, hidden, columns, feed_forward):
    def layer(x, norm_E, w_EO, w_E2F, w_FE):
        normed, product = run(x, norm_E, w_EO)
        inner = norm_swiglu(x, norm_E, w_E2F, eps=EPS, backend="gpu")
        return normed, product, matmul_add(inner, w_FE, x, backend="gpu")

    sizes = (rows, hidden), (hidden,), (hidden, columns), (hidden, 2, feed_forward), (feed_forward, hidden)
    shapes = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]
    text = jax.jit(layer).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3


@needs_mosaic_gpu
def test_what_they_were_not_made_for_is_refused():
    x, norm_E, w_EO, _, _ = random_inputs("one_row")
    for arguments, reason in (
        ((jnp.tile(x, (9, 1, 1)), norm_E, w_EO), "takes 1 to 8 rows, not 9"),
        ((x.astype("float32"), norm_E, w_EO), "takes bfloat16 only"),
        ((x, norm_E, jnp.pad(w_EO, ((0, 0), (0, 44)))), "columns in 64s, not 256 and 300"),
        ((x[..., :128], norm_E[:128], w_EO[:128]), "inputs in 256s"),
        ((x, norm_E, w_EO[:, :128]), "at least as wide, not 128 beside 256"),
    ):
        with pytest.raises(BackendError, match=reason):
            run(*arguments)


@needs_mosaic_gpu
def test_weights_on_several_devices_are_left_to_xla():
    devices = jax.sharding.AbstractMesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(devices):
        assert gpu.refuses_norm_matmul(*random_inputs("one_row")[:3], EPS) == "is for one device"


def test_they_are_preferred_for_few_rows_only():
    for rows, preferred in ((1, True), (4, True), (5, False)):
        assert gpu.pays(jax.ShapeDtypeStruct((rows, 1, 4096), jnp.bfloat16)) == preferred
