"""The GPU kernel of `received_log_mass`: the common suite on an interpreted GPU, and lowering for a real one."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from oracles import largest_intermediate
from received_log_mass_suite import CASES, Case, ReceivedLogMassSuite, random_inputs

from pallas_kernels.backend import BackendError
from pallas_kernels.received_log_mass import received_log_mass

_OLD_JAX = jax.__version_info__ < (0, 11, 2)
needs_mosaic_gpu = pytest.mark.skipif(_OLD_JAX, reason="Pallas Mosaic GPU kernels need JAX 0.11.2 or newer")

# The first 256 keys meet tiles of 128 queries that are masked, one that counts whole and one with a document's end.
LONG = {"whole_tiles_between_masked_ones": Case(((600, 168),), 768, delay=100)}
# The others are one of these with more heads: interpreting a thread block takes a quarter of a second.
INTERPRETED = {name: CASES[name] for name in ("seven_tokens_group_3", "one_past_a_block_some_queries")} | LONG


@pytest.fixture(scope="class")
def gpu_interpreter():
    jax.clear_caches()  # programs traced to be lowered
    with plgpu.force_gpu_interpret_mode():
        yield
    jax.clear_caches()


@pytest.fixture
def float64():
    """The kernel computes in float32; only the judge is in float64."""


@pytest.mark.gpu_interpret
@needs_mosaic_gpu
@pytest.mark.usefixtures("gpu_interpreter")
class TestOnAnInterpretedGPU(ReceivedLogMassSuite):
    backend = "gpu"
    dtype = "bfloat16"
    tolerance = 2**-18  # products of bfloat16 are exact in float32
    test_bfloat16_inputs_are_multiplied_without_rounding = None  # all inputs here are
    test_nothing_of_the_size_of_the_attention_map_is_made = None  # of the lowered program, below: in bfloat16

    @pytest.mark.parametrize("case", INTERPRETED.values(), ids=INTERPRETED)
    def test_it_is_the_log_of_the_summed_probabilities(self, case, float64):
        super().test_it_is_the_log_of_the_summed_probabilities(case, float64)

    @pytest.mark.parametrize("name", ["one_past_a_block_some_queries"])
    def test_with_the_lse_of_a_sparse_pass_each_query_weighs_one_over_its_kept_mass(self, name, float64):
        super().test_with_the_lse_of_a_sparse_pass_each_query_weighs_one_over_its_kept_mass(name, float64)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
class TestOnAGPU(ReceivedLogMassSuite):
    backend = "gpu"
    dtype = "bfloat16"
    tolerance = 2**-18  # as interpreted
    test_nothing_of_the_size_of_the_attention_map_is_made = None  # of the lowered program, below: in bfloat16

    @pytest.mark.parametrize("case", (CASES | LONG).values(), ids=CASES | LONG)
    def test_it_is_the_log_of_the_summed_probabilities(self, case, float64):
        super().test_it_is_the_log_of_the_summed_probabilities(case, float64)


@pytest.mark.gpu_interpret
@needs_mosaic_gpu
@pytest.mark.parametrize("head_dim, group, sampled", [(128, 4, True), (64, 3, False)])
def test_it_lowers_for_a_gpu_in_linear_memory(head_dim, group, sampled):
    S, K = 16384, 8
    shapes = [(1, S, K * group, head_dim), (1, S, K, head_dim), (1, K * group, S), (1, S), (1, S)]
    dtypes = jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.int32, jnp.bool_
    arguments = [jax.ShapeDtypeStruct(*each) for each in zip(shapes, dtypes, strict=True)]

    def mass(q_BTHD, k_BSKD, lse_BHT, segment_BS, query_BT):
        query_BT = query_BT if sampled else None
        return received_log_mass(q_BTHD, k_BSKD, lse_BHT, segment_BS, delay=256, query_BT=query_BT, backend="gpu")

    text = jax.jit(mass).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert largest_intermediate(mass, *arguments) <= S * K * group * head_dim


@needs_mosaic_gpu
def test_what_it_was_not_made_for_is_refused():
    x = random_inputs(CASES["one_token"], "float32")
    run = partial(received_log_mass, lse_BHT=x.lse_BHT, segment_BS=x.segment_BS, delay=0, backend="gpu")
    with pytest.raises(BackendError, match="bfloat16 only"):
        run(x.q_BTHD, x.k_BSKD)
    wide = jax.ShapeDtypeStruct((1, 1, 1, 80), "bfloat16")
    with pytest.raises(BackendError, match="64, 128, not 80"):
        run(wide, wide)
