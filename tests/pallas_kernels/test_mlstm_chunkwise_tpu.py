"""The TPU kernels of `mlstm_chunkwise`: the common suite on a simulated TPU, and the real compiler."""

import jax
import jax.numpy as jnp
import pytest
from mlstm_chunkwise_suite import (
    LAYOUTS,
    MLSTMChunkwiseSuite,
    chunkwise_form,
    largest_error,
    random_inputs,
    segment_ids,
    truth,
    with_gradients,
)
from tpu_compilation import compile_for

from pallas_kernels.backend import BackendError
from pallas_kernels.mlstm_chunkwise import mlstm_chunkwise, tpu


@pytest.mark.tpu
class OnTPU(MLSTMChunkwiseSuite):
    backend = "tpu"

    def test_float64_is_refused(self, float64):
        inputs = jax.tree.map(lambda a: a.astype("float64"), random_inputs(seed=0))
        with pytest.raises(BackendError, match="float64"):
            mlstm_chunkwise(*inputs, segment_ids(LAYOUTS["one_segment"]), backend="tpu")


@pytest.mark.usefixtures("tpu_interpreter")
class TestOnASimulatedTPU(OnTPU):
    pass


@pytest.mark.tpu
@pytest.mark.parametrize("name", ["segments_inside_a_chunk", "padding_inside_a_segment"])
def test_plain_interpretation_gives_the_same(name, plain_interpreter):
    actual = with_gradients(chunkwise_form("tpu", 16), random_inputs(seed=1), segment_ids(LAYOUTS[name]))
    assert largest_error(actual, truth(name)) < OnTPU.float32_bound


COMPILED = {  # batch, length, KV heads, key and value dimension, dtype
    "head_dim_128": (1, 16384, 8, 64, 128, "bfloat16"),
    "head_dim_128_long": (1, 131072, 8, 64, 128, "bfloat16"),
    "head_dim_64": (2, 16384, 3, 32, 64, "float32"),
    "head_dim_256": (1, 16384, 4, 128, 256, "bfloat16"),
}


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("chip", "case"),
    [
        ("v5e", "head_dim_128"), ("v5p", "head_dim_128_long"), ("v6e", "head_dim_128_long"), ("tpu7x", "head_dim_128"),
        ("v5e", "head_dim_64"), ("tpu7x", "head_dim_256"),
    ],
)  # fmt: skip
def test_both_kernels_compile_and_stay_small(chip, case, libtpu):
    """The kernels alone, between log weights and their gradients: XLA takes seconds over the sums in those.

    Every chip and every case, but not each with each: lengths and chips change nothing of what is in VMEM.
    """
    B, S, K, X, Y, dtype = COMPILED[case]
    R, n = B * K, S // 128
    reads, values = jax.ShapeDtypeStruct((R, S, X), dtype), jax.ShapeDtypeStruct((R, S, Y), dtype)
    float32 = [(R, n, tpu.SUBLANES, 128), (R, X, Y), (R, 1, X), (R, 1, 1)]
    shapes = reads, reads, values, *(jax.ShapeDtypeStruct(shape, "float32") for shape in float32)
    compiled = compile_for(chip, lambda *inputs: jax.vjp(tpu._run, *inputs)[1](tpu._run(*inputs)), *shapes)
    print(f"{chip} {case}: VMEM {compiled.vmem}, {R * n} steps each, {compiled.temporary} bytes beside")
    names = " ".join(compiled.vmem)
    assert "mlstm_chunkwise_forward" in names and "mlstm_chunkwise_backward" in names
    assert max(compiled.vmem.values()) <= 14 * 2**20


@pytest.mark.tpu_compile
def test_the_whole_gradient_takes_memory_in_proportion_to_the_length(libtpu):
    B, S, K, X, Y, dtype = COMPILED["head_dim_128"]
    reads, gate = jax.ShapeDtypeStruct((B, S, K, X), dtype), jax.ShapeDtypeStruct((B, S, K), jnp.float32)
    values, segment = jax.ShapeDtypeStruct((B, S, K, Y), dtype), jax.ShapeDtypeStruct((B, S), jnp.int32)

    def gradients(*inputs):
        *inputs, segment = inputs
        return jax.grad(lambda inputs: jnp.sum(mlstm_chunkwise(*inputs, None, segment)[0].astype("float32")))(inputs)

    compiled = compile_for("v6e", gradients, reads, reads, values, gate, gate, segment)
    assert compiled.largest_array <= 2 * B * K * S * 128 < S * S
