"""The GPU kernel of `decode_attention`: the common suite on an interpreted GPU, many parts, lowering for a real one."""

from functools import partial

import jax
import numpy as np
import pytest
from decode_attention_suite import Case, DecodeAttentionSuite, random_inputs, run
from oracles import assert_close

from pallas_kernels.backend import BackendError
from pallas_kernels.decode_attention import decode_attention, gpu

_OLD_JAX = jax.__version_info__ < (0, 11, 2)
needs_mosaic_gpu = pytest.mark.skipif(_OLD_JAX, reason="Pallas Mosaic GPU kernels need JAX 0.11.2 or newer")


@pytest.mark.gpu_interpret
@needs_mosaic_gpu
@pytest.mark.usefixtures("gpu_interpreter")
class TestOnAnInterpretedGPU(DecodeAttentionSuite):
    backend = "gpu"
    dtype = "bfloat16"
    tolerance = 2**-7  # probabilities and output are each rounded to 8 bits
    test_donated_caches_are_written_in_place = None  # of the lowered program, below: an interpreter copies

    @pytest.mark.parametrize("resident", [1, 1000], ids=["one_part", "many_parts"])
    def test_rows_that_share_blocks_and_windows(self, resident, monkeypatch):
        """Rows of 203 slots start inside tiles of 8 and blocks of 64; a window of 8 queries holds those of 4 rows."""
        monkeypatch.setattr(gpu, "_RESIDENT", resident)
        case = Case(batch=2, kv_heads=4, group=2, slots=203, head_dim=128)
        assert gpu._split(8, 203)[0] == (1 if resident == 1 else 4)
        x = random_inputs(case, self.dtype)
        x.slot_BK[:] = [[0, 202, 203, 64], [63, 5, 300, 127]]
        np.put_along_axis(x.position_BKC, np.minimum(x.slot_BK, 202)[..., None], 203, axis=-1)
        x.position_BKC[1, 1] = -1  # this row is written, and nothing in it attended to
        attend = jax.jit(partial(decode_attention, backend=self.backend, return_probabilities=True))
        o_BHD, lse_BH, k_BKCD, v_BKCD, p_BHC = jax.tree.map(np.asarray, attend(*x.arguments))
        wanted_o_BHD, wanted_lse_BH, wanted_k_BKCD, wanted_v_BKCD, wanted_p_BHC = run("reference", x)
        np.testing.assert_array_equal(k_BKCD, wanted_k_BKCD)
        np.testing.assert_array_equal(v_BKCD, wanted_v_BKCD)
        empty_BH = np.isneginf(wanted_lse_BH)
        assert empty_BH.sum() == 2 and np.array_equal(np.isneginf(lse_BH), empty_BH) and not np.any(o_BHD[empty_BH])
        assert_close(lse_BH[~empty_BH], wanted_lse_BH[~empty_BH], 2**-18)
        assert_close(p_BHC, wanted_p_BHC, 2**-18)
        assert_close(o_BHD, wanted_o_BHD, self.tolerance)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
class TestOnAGPU(DecodeAttentionSuite):
    backend = "gpu"
    dtype = "bfloat16"
    tolerance = 2**-7  # as interpreted
    test_donated_caches_are_written_in_place = None  # of the lowered program, below: that test's are of float32


SHAPES = [
    Case(batch=1, kv_heads=8, group=4, slots=4096, head_dim=128),
    Case(batch=32, kv_heads=8, group=4, slots=4032, head_dim=128),
    Case(batch=128, kv_heads=8, group=4, slots=4097, head_dim=128),
    Case(batch=1, kv_heads=8, group=4, slots=131_072, head_dim=128),
    Case(batch=2, kv_heads=2, group=7, slots=512, head_dim=64),
]


@pytest.mark.gpu_interpret
@needs_mosaic_gpu
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_it_lowers_for_a_gpu_with_the_caches_aliased(case):
    attend = jax.jit(partial(decode_attention, backend="gpu"), donate_argnums=(1, 2))
    text = attend.trace(*shapes(case)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("output_operand_alias<") == 2
    assert text.count("tf.aliasing_output") == 2
    assert "stablehlo.pad" not in text or case.group == 7, "a cache is copied"


def test_auto_leaves_it_where_it_would_copy_the_cache_or_read_the_keys_twice():
    assert gpu.pays(*shapes(SHAPES[0]), False) and not gpu.pays(*shapes(SHAPES[0]), True)
    assert not gpu.pays(*shapes(Case(batch=1, kv_heads=2, group=4, slots=4097)), False)


@pytest.mark.skipif(not _OLD_JAX, reason="of JAX before 0.11.2")
def test_an_older_jax_is_told_what_is_missing():
    with pytest.raises(BackendError, match=r"backend='gpu' needs JAX 0\.11\.2 or newer"):
        decode_attention(*shapes(SHAPES[0]), backend="gpu")


@needs_mosaic_gpu
def test_what_it_was_not_made_for_is_refused():
    for case, dtype, reason in (
        (Case(1, 1, 1, 64), "float32", "bfloat16 only"),
        (Case(1, 1, 1, 64, head_dim=80), "bfloat16", "not 80 and 1"),
        (Case(1, 1, 16, 64), "bfloat16", "not 64 and 16"),
    ):
        with pytest.raises(BackendError, match=reason):
            decode_attention(*shapes(case, dtype), backend="gpu")


def test_parts_fill_the_card_once_and_long_batches_are_not_cut():
    assert gpu._split(8, 4096) == (32, 2)
    assert gpu._split(256, 4096) == (1, 64)
    parts, blocks = gpu._split(8, 131_072)
    assert 8 * parts <= gpu._RESIDENT < 8 * (parts + 1) and parts * blocks >= 2048


def shapes(case: Case, dtype: str = "bfloat16"):
    B, K, C, D = case.batch, case.kv_heads, case.slots, case.head_dim
    sizes = (B, K * case.group, D), (B, K, C, D), (B, K, C, D), (B, K, C), (B, K, D), (B, K, D), (B, K)
    dtypes = dtype, dtype, dtype, "int32", dtype, dtype, "int32"
    return tuple(jax.ShapeDtypeStruct(size, each) for size, each in zip(sizes, dtypes, strict=True))
