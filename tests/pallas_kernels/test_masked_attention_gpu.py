"""The GPU kernels of `masked_attention`: the common suite on an interpreted GPU, tiles, lowering for a real one."""

from functools import partial

import jax
import jax.numpy as jnp
import masked_attention_suite
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from masked_attention_suite import Case, MaskedAttentionSuite, assert_run_matches_the_dense_form, random_inputs
from oracles import largest_intermediate

from pallas_kernels.backend import BackendError
from pallas_kernels.masked_attention import NEVER, gpu, gpu_chunks, gpu_tiles, masked_attention
from pallas_kernels.residuals import SAVE_RESIDUALS

_OLD_JAX = jax.__version_info__ < (0, 11, 2)
needs_mosaic_gpu = pytest.mark.skipif(_OLD_JAX, reason="Pallas Mosaic GPU kernels need JAX 0.11.2 or newer")


# Few heads: interpreting a thread block takes a quarter of a second.
CASES = {
    "seven_tokens_group_3": Case(((3, 4),), 7, group=3),
    "two_ragged_chunks": Case(((-3, 30, 160, -7),), 200, group=2, head_dim=128),
}


@pytest.fixture(scope="class")
def gpu_interpreter():
    """Sums of products as plain JAX: an interpreted GPU has no `run_state`, and no products of a register operand."""

    def plus_products(*terms):
        return tuple(x + jnp.dot(a().astype(x.dtype), b[...].astype(x.dtype)) for x, a, b in terms)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_tiles, "plus_products", plus_products)
        jax.clear_caches()  # programs traced to be lowered
        with plgpu.force_gpu_interpret_mode():
            yield
        jax.clear_caches()


@pytest.fixture
def float64():
    """The kernels compute in float32; only the judge is in float64."""


@pytest.fixture(scope="class")
def short_chunks():
    """Chunks of one tile, so that even the short rows of the suite have survivors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "chosen_chunk", lambda length, capacity: capacity and 128)
        yield


@pytest.fixture(scope="class")
def compacted(short_chunks):
    """The suite makes a promise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masked_attention_suite, "masked_attention", partial(masked_attention, capacity=200))
        masked_attention_suite._compiled.cache_clear()
        yield
        masked_attention_suite._compiled.cache_clear()


@pytest.mark.gpu_interpret
@needs_mosaic_gpu
@pytest.mark.usefixtures("gpu_interpreter", "compacted")
class TestCompactedForm(MaskedAttentionSuite):
    backend = "gpu"
    dtype = "bfloat16"
    tolerance = 2**-6  # p or ds, o and the results are rounded to 8 bits
    # Padding, keys that nothing sees, and keys that expire are all in the comparison with the dense form.
    test_a_query_that_sees_nothing_gets_zero_and_no_gradient = None
    test_a_key_is_last_seen_by_the_query_before_its_expiry = None
    test_bfloat16_stays_within_its_rounding = None  # all inputs here are
    test_nothing_of_the_size_of_the_attention_map_is_made = None  # of the lowered program, below: in bfloat16

    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_output_and_gradients_match_the_dense_form(self, case, float64):
        assert_run_matches_the_dense_form("gpu", random_inputs(case, "bfloat16"), self.tolerance)


@pytest.mark.gpu_interpret
@needs_mosaic_gpu
@pytest.mark.usefixtures("gpu_interpreter", "short_chunks")
class TestOtherForms:
    def test_output_and_gradients_of_the_plain_form_match_the_dense_form(self):
        assert_run_matches_the_dense_form("gpu", random_inputs(CASES["two_ragged_chunks"], "bfloat16"), 2**-6)

    def test_a_broken_promise_gives_nan_in_the_chunks_where_it_is_broken(self):
        x = random_inputs(Case(((300, 84),), 384), "bfloat16")
        # 128 keys are alive where the second chunk starts, 256 where the third does.
        expiry_BKS = np.full_like(x.expiry_BKS, NEVER)
        attend = jax.jit(partial(masked_attention, capacity=128, backend="gpu"))
        o_BTHD, lse_BHT = attend(*x.inputs, expiry_BKS, x.segment_BS)
        assert np.all(np.isfinite(o_BTHD[:, :256])) and np.all(np.isfinite(lse_BHT[..., :256]))
        assert np.all(np.isnan(o_BTHD[:, 256:])) and np.all(np.isnan(lse_BHT[..., 256:]))


class OnAGPU(MaskedAttentionSuite):
    backend = "gpu"
    dtype = "bfloat16"
    tolerance = 2**-6  # as interpreted
    test_nothing_of_the_size_of_the_attention_map_is_made = None  # of the lowered program, below: in bfloat16


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
class TestPlainFormOnAGPU(OnAGPU):
    pass


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper", "compacted")
class TestCompactedFormOnAGPU(OnAGPU):
    pass


@pytest.mark.gpu_interpret
@pytest.mark.parametrize("group", [3, 4])
def test_no_visible_key_lies_in_a_tile_that_is_skipped_and_no_hidden_one_where_no_mask_is(group):
    """Both tables of spans, for the chunks of a row whose keys die at random, after a long prefix that is dead."""
    S, chunk, capacity = 1024, 512, 400
    rng = np.random.default_rng(0)
    end_S = np.minimum(np.arange(S) + rng.geometric(0.004, S), S).astype(np.int32)
    end_S[rng.random(S) < 0.7] = S
    end_S[:300] = np.minimum(end_S[:300], 310)
    end_BKS = jnp.asarray(end_S)[None, None]
    old = gpu_chunks.survivors(end_BKS, chunk, capacity)
    assert old.fits_BKn.all()
    query_spans = np.asarray(gpu_chunks.query_spans(end_BKS, old, chunk, group))[0, 0]
    key_spans = np.asarray(gpu_chunks.key_spans(end_BKS, old, chunk))[0, 0]
    skipped = whole = 0
    for c in range(S // chunk):
        query_T1 = c * chunk + np.arange(chunk)[:, None]
        at_C = np.concatenate([np.asarray(old.position_BKnC)[0, 0, c], c * chunk + np.arange(chunk)])
        alive_C = at_C < S
        end_C = np.where(alive_C, end_S[np.minimum(at_C, S - 1)], 0)
        seen_TC = (at_C <= query_T1) & (query_T1 < end_C)
        wanted_TS = (np.arange(S) <= query_T1) & (query_T1 < end_S)
        np.testing.assert_array_equal(
            seen_TC.sum(1), wanted_TS.sum(1), "survivors and own keys are all there is to see"
        )
        old_tiles = np.asarray(old.position_BKnC).shape[-1] // gpu_chunks.KEYS
        seen_iqjk = seen_TC.reshape(chunk // 64, 64, -1, gpu_chunks.KEYS)
        some_ij, all_ij = seen_iqjk.any((1, 3)), seen_iqjk.all((1, 3))
        for pair, (whole_old, some_old, first_own, whole_own, stop_own, _) in enumerate(query_spans[c]):
            j = np.arange(some_ij.shape[1])
            visited_j = np.where(j < old_tiles, j < some_old, (j - old_tiles >= first_own) & (j - old_tiles < stop_own))
            unmasked_j = np.where(j < old_tiles, j < whole_old, j - old_tiles < whole_own)
            for i in {2 * pair // group, (2 * pair + 1) // group}:
                assert np.all(visited_j | ~some_ij[i]) and np.all(all_ij[i] | ~unmasked_j)
            skipped, whole = skipped + (~visited_j).sum(), whole + unmasked_j.sum()
        for j, (start, stop, start_whole, stop_whole) in enumerate(key_spans[c]):
            i = np.arange(some_ij.shape[0])
            assert np.all(((i >= start) & (i < stop)) | ~some_ij[:, j])
            assert np.all(all_ij[:, j] | ~((i >= start_whole) & (i < stop_whole)))
    assert skipped > 20 and whole > 5, "lives and causality must hide some tiles in this case, and leave some whole"


@pytest.mark.gpu_interpret
@needs_mosaic_gpu
@pytest.mark.parametrize("head_dim, group, capacity", [(128, 4, 4096), (64, 3, None)])
def test_it_lowers_for_a_gpu_with_its_gradient_in_linear_memory(head_dim, group, capacity):
    S, K = 16384, 8
    bf16, i32 = jnp.bfloat16, jnp.int32
    shapes = [(1, S, K * group, head_dim), (1, S, K, head_dim), (1, S, K, head_dim), (1, K, S), (1, S)]
    arguments = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, (bf16, bf16, bf16, i32, i32), strict=True)]

    def loss(q_BTHD, k_BSKD, v_BSKD, expiry_BKS, segment_BS):
        o_BTHD, lse_BHT = masked_attention(
            q_BTHD, k_BSKD, v_BSKD, expiry_BKS, segment_BS, capacity=capacity, backend="gpu"
        )
        return o_BTHD.astype(jnp.float32).sum() + lse_BHT.sum()

    layer = jax.checkpoint(loss, policy=SAVE_RESIDUALS)
    program = jax.jit(jax.value_and_grad(layer, argnums=(0, 1, 2))).trace(*arguments)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("forward", "dq", "dkv"):
        assert f"masked_attention_{kernel}" in text
    assert text.count("call @_attend") == 1, "a layer that is computed again attends again"
    # Survivors' rows of all chunks, and no more.
    rows = S if capacity is None else S * (capacity // gpu.chosen_chunk(S, capacity))
    assert largest_intermediate(loss, *arguments) <= max(K * rows, S * K * group) * head_dim


@pytest.mark.gpu_interpret
@needs_mosaic_gpu
def test_nothing_reads_the_kernel_but_through_a_barrier():
    """Else XLA runs it once into the stack in which a loop saves its results, and once more for whatever reads them."""
    x = random_inputs(CASES["two_ragged_chunks"], "bfloat16")

    def forward(*qkv):
        return jax.vjp(lambda *qkv: masked_attention(*qkv, x.expiry_BKS, x.segment_BS, backend="gpu"), *qkv)[0]

    equations = jax.make_jaxpr(forward)(*x.inputs).jaxpr.eqns
    (made,) = (eqn.outvars for eqn in equations if eqn.params.get("name") == "_attend")
    readers = [eqn.primitive.name for eqn in equations if any(var is out for var in eqn.invars for out in made)]
    assert readers == ["optimization_barrier"]


def test_chunks_balance_gathering_and_what_is_seen_in_vain():
    assert gpu.chosen_chunk(16384, None) is None, "nothing is known of an uncapped rule"
    assert gpu.chosen_chunk(4096, 4096) is None, "there is nothing to gain in a row as short as the budget"
    assert gpu.chosen_chunk(16384, 4096) == gpu.chosen_chunk(65536, 2048) == 1024
    assert gpu.chosen_chunk(65536, 128) == 256


@needs_mosaic_gpu
def test_what_it_was_not_made_for_is_refused():
    for dtype, head_dim, bias, reason in (
        ("float32", 64, False, "bfloat16 only"),
        ("bfloat16", 80, False, "64, 128, not 80"),
        ("bfloat16", 64, True, "adds no bias"),
    ):
        shapes = [(1, 8, 2, head_dim), (1, 8, 1, head_dim), (1, 8, 1, head_dim)]
        qkv = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        expiry_BKS = jax.ShapeDtypeStruct((1, 1, 8), "int32")
        with pytest.raises(BackendError, match=reason):
            masked_attention(
                *qkv, expiry_BKS, jax.ShapeDtypeStruct((1, 8), "int32"), bias_BKS=expiry_BKS if bias else None,
                backend="gpu",
            )  # fmt: skip


@needs_mosaic_gpu
def test_a_row_of_more_thread_blocks_than_a_grid_has_is_refused_unless_it_is_cut():
    """CUDA ends at 65,535 along the axis of the queries of a chunk; 2^20 in groups of 8 are one pair too many."""
    for S, capacity, refused in ((2**20 - 128, None, False), (2**20, None, True), (2**20, 4096, False)):
        q_BTHD, kv_BSKD = (jax.ShapeDtypeStruct((1, S, heads, 64), "bfloat16") for heads in (8, 1))
        reason = gpu.refuses(q_BTHD, kv_BSKD, kv_BSKD, None, None, None, 0, capacity)
        assert (reason is not None and "1,048,576 tokens and groups of 8" in reason) == refused, reason
