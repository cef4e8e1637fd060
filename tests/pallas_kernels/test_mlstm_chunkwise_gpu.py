"""The GPU kernels of `mlstm_chunkwise`: the common suite on an interpreted GPU and on a real one, and lowering."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from mlstm_chunkwise_suite import LAYOUTS, MLSTMChunkwiseSuite, Sizes, random_inputs, segment_ids
from oracles import largest_intermediate

from pallas_kernels.backend import BackendError
from pallas_kernels.bf16_pieces import pairs
from pallas_kernels.mlstm_chunkwise import gpu_kernels, mlstm_chunkwise

needs_mosaic_gpu = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="Pallas Mosaic GPU kernels need JAX 0.11.2 or newer"
)


class OnGPU(MLSTMChunkwiseSuite):
    """Rows of two chunks, the second one with padding."""

    backend = "gpu"
    sizes = scorer = Sizes(heads=2, key_dim=64, value_dim=128, scale=4)


@pytest.fixture(scope="class")
def gpu_interpreter():
    """Products in plain JAX: an interpreted GPU has no `run_state`, and no products of a register operand.

    A race fails the test, and memory that nobody wrote to holds NaN.
    """

    def plus(x, a, b):
        products = (jnp.dot(a[i].astype(x.dtype), b(j)[...].astype(x.dtype)) for i, j in pairs())
        return sum(products, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_kernels, "_plus", plus)
        jax.clear_caches()  # programs traced to be lowered
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            yield
        jax.clear_caches()


@pytest.mark.gpu_interpret
@needs_mosaic_gpu
@pytest.mark.usefixtures("gpu_interpreter")
class TestOnAnInterpretedGPU(OnGPU):
    sizes = scorer = Sizes(heads=1, key_dim=64, value_dim=128, rows=1, scale=4)  # a thread block takes 0.25 s
    # In the comparisons with the recurrent form, which have every kind of segment and padding.
    test_no_given_state_is_the_empty_state = None
    test_a_segment_sees_nothing_of_its_neighbours = None
    test_the_unit_of_the_given_state_does_not_matter = None
    test_padding_changes_neither_the_read_outs_nor_the_final_state = None
    test_rows_of_padding_keep_their_state_and_take_no_gradient = None
    test_sizes_of_a_scorer_in_every_input_dtype = None  # all here are of these sizes, and converted outside

    @pytest.mark.parametrize("name", ["segments_inside_a_chunk", "padding_before_between_after"])
    def test_float32_stays_within_its_error_of_float64(self, name):
        super().test_float32_stays_within_its_error_of_float64(name)

    @pytest.mark.parametrize("cut", [31])
    def test_a_state_carried_across_two_calls_equals_one_call(self, cut):
        super().test_a_state_carried_across_two_calls_equals_one_call(cut)

    @pytest.mark.parametrize("size", [1e4])
    def test_extreme_gates_neither_overflow_nor_give_nan(self, size):
        super().test_extreme_gates_neither_overflow_nor_give_nan(size)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
class TestOnAGPU(OnGPU):
    pass


@pytest.mark.gpu_interpret
@needs_mosaic_gpu
def test_it_lowers_for_a_gpu_with_its_gradient_in_linear_memory():
    B, S, K, X, Y = 1, 16_384, 8, 64, 128
    shapes = (B, S, K, X), (B, S, K, X), (B, S, K, Y), (B, S, K), (B, S, K)
    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    segment_BS = jax.ShapeDtypeStruct((B, S), "int32")

    def loss(q, k, v, i, f, segment_BS):
        return mlstm_chunkwise(q, k, v, i, f, None, segment_BS, backend="gpu")[0].sum()

    gradients = jax.grad(loss, argnums=range(5))
    text = jax.jit(gradients).trace(*arguments, segment_BS).lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("outer_products", "to_values", "to_keys"):
        assert f"mlstm_chunkwise_{kernel}" in text
    assert largest_intermediate(gradients, *arguments, segment_BS) <= S * K * max(Y, gpu_kernels.CHUNK)


@needs_mosaic_gpu
def test_what_it_was_not_made_for_is_refused():
    segment_BS = segment_ids(LAYOUTS["one_segment"])
    with pytest.raises(BackendError, match="keys of 64 and values of 128, not 8 and 16"):
        mlstm_chunkwise(*random_inputs(seed=0), segment_BS, backend="gpu")
    inputs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, "float16"), random_inputs(seed=0))
    with pytest.raises(BackendError, match="float32 and bfloat16, not float16"):
        mlstm_chunkwise(*inputs, segment_BS, backend="gpu")
