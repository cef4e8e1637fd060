"""The TPU kernel of `decode_attention`: the common suite on a simulated TPU, many blocks, and the real compiler."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_attention_suite import Case, DecodeAttentionSuite, expected, random_inputs, run
from oracles import assert_close
from tpu_compilation import compile_for

from pallas_kernels.backend import BackendError
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.decode_attention.tpu import TILE, choose_blocks


@pytest.mark.tpu
@pytest.mark.usefixtures("tpu_interpreter")
class TestOnASimulatedTPU(DecodeAttentionSuite):
    backend = "tpu"
    dtype = "float32"
    tolerance = 2**-19
    test_donated_caches_are_written_in_place = None  # of the compiled program, below: an interpreter copies

    def test_many_blocks_and_several_rows_a_step(self):
        """Writes land in every block of slots, and in the last tile of a cache."""
        pieces = Case(batch=3, kv_heads=2, group=2, slots=1203)
        rows = Case(batch=3, kv_heads=2, group=2, slots=130)
        assert choose_blocks(6, pieces.slots, 64, "float32").block < 1203 / 2
        assert choose_blocks(6, rows.slots, 64, "float32").rows == 2
        for case, slots in ((pieces, [[0, 1202], [511, 512], [1200, 1023]]), (rows, [[129, 127], [128, 0], [64, 8]])):
            x = random_inputs(case, self.dtype)
            x.slot_BK[:] = slots
            np.put_along_axis(x.position_BKC, x.slot_BK[..., None], case.slots, axis=-1)
            o_BHD, lse_BH, k_BKCD, v_BKCD, p_BHC = run(self.backend, x)
            wanted = expected(x)
            assert_close(o_BHD, wanted.o_BHD, self.tolerance)
            assert_close(lse_BH, wanted.lse_BH, self.tolerance)
            assert_close(p_BHC, wanted.p_BHC, self.tolerance)
            np.testing.assert_array_equal(k_BKCD, wanted.k_BKCD)
            np.testing.assert_array_equal(v_BKCD, wanted.v_BKCD)

    def test_what_it_was_not_made_for_is_refused(self):
        x = random_inputs(Case(batch=1, kv_heads=1, group=1, slots=8, head_dim=80), "float32")
        with pytest.raises(BackendError, match="not 80"):
            decode_attention(*x.arguments, backend="tpu")
        x = random_inputs(Case(batch=1, kv_heads=1, group=1, slots=8), "float16")
        with pytest.raises(BackendError, match="float16"):
            decode_attention(*x.arguments, backend="tpu")


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="plain interpretation of this JAX mistakes the type of an aliased cache"
)
@pytest.mark.tpu
def test_plain_interpretation_gives_the_same(plain_interpreter):
    # Whole tiles: this interpreter has none, and shifts what reaches past the end.
    case = Case(batch=2, kv_heads=2, group=4, slots=136)
    TestOnASimulatedTPU().test_it_is_a_softmax_over_the_occupied_slots_after_the_write(case, None)


COMPILED = {  # batch, KV heads, query heads of each, slots, head dimension, dtype, probabilities
    "batch_1_long": (1, 8, 4, 131072, 128, "bfloat16", False),
    "batch_32": (32, 8, 4, 4096, 128, "bfloat16", True),
    "batch_256": (256, 8, 4, 2048, 128, "bfloat16", False),
    "batch_256_one_head_dim_64": (256, 1, 8, 4104, 64, "bfloat16", True),
    "dim_256_float32": (32, 4, 2, 2048, 256, "float32", False),
    "batch_1_short": (1, 8, 4, 256, 128, "float32", True),
}


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("chip", "case"),
    [
        ("v5e", "batch_256"), ("v5p", "batch_1_long"), ("v6e", "batch_32"), ("tpu7x", "batch_256"),
        ("tpu7x", "batch_1_long"), ("v5e", "batch_32"),
        ("v5e", "batch_256_one_head_dim_64"), ("v5p", "dim_256_float32"), ("tpu7x", "batch_1_short"),
    ],
)  # fmt: skip
def test_it_compiles_writes_in_place_and_stays_small(chip, case, libtpu):
    """Every case, and on the oldest and the newest chip a small and a large batch: blocks are the same on all."""
    B, K, G, C, D, dtype, return_probabilities = COMPILED[case]
    row, cache = jax.ShapeDtypeStruct((B, K, D), dtype), jax.ShapeDtypeStruct((B, K, C, D), dtype)
    compiled = compile_for(
        chip,
        partial(decode_attention, return_probabilities=return_probabilities),
        jax.ShapeDtypeStruct((B, K * G, D), dtype), cache, cache, jax.ShapeDtypeStruct((B, K, C), jnp.int32), row, row,
        jax.ShapeDtypeStruct((B, K), jnp.int32),
        donate=(1, 2),
    )  # fmt: skip
    [vmem], blocks = compiled.vmem.values(), choose_blocks(B * K, C, D, dtype)
    steps = B * K // blocks.rows * -(-C // blocks.block)
    print(f"{chip} {case}: VMEM {vmem / 2**20:.1f} MiB, {steps} steps of {blocks}, {compiled.temporary} bytes beside")
    assert vmem <= 14 * 2**20, "more than every chip gives a kernel unasked"
    # Beside the caches: the positions, which XLA tiles otherwise than the kernel, and the scores.
    beside = 4 * B * K * C * (2 + 16 * return_probabilities) + 2**20
    if D == 64:
        # XLA's own layout of such an argument has the slots in the lanes: it is copied on entry, 64 lanes of 128 used.
        beside += 2 * 2 * 2 * B * K * C * D * row.dtype.itemsize
    assert C % TILE == 0 and compiled.aliased >= 2 * cache.size * cache.dtype.itemsize
    assert compiled.temporary <= beside, "donated caches are copied"
