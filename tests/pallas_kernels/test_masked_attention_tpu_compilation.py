"""Real TPU compilers take the kernels of `masked_attention` at production sizes; `-s` prints what they allocate.

A compacted row runs the kernels of one chunk, whatever its length, so a budget is compiled once for all lengths.
"""

import jax
import jax.numpy as jnp
import pytest
from tpu_compilation import compile_for

from pallas_kernels.masked_attention.tpu_backward import attend_dkv, attend_dq
from pallas_kernels.masked_attention.tpu_blocks import blocks_for, chosen_chunk
from pallas_kernels.masked_attention.tpu_forward import attend
from pallas_kernels.tpu_tiles import vmem_limit

pytestmark = [pytest.mark.tpu_compile, pytest.mark.usefixtures("libtpu")]

H, K = 32, 8
MASKED_ATTENTION = {"masked_attention_forward", "masked_attention_dq", "masked_attention_dkv"}


@pytest.mark.parametrize(
    ("chip", "length", "budget"),
    [("v5e", 131072, 4096), ("v5p", 16384, 2048), ("v6e", 131072, 4096), ("tpu7x", 16384, 2048)],
)
def test_masked_attention_of_a_chunk_fits_in_vmem(chip, length, budget):
    """Every chip and both budgets, but not each with each: blocks are the same on all chips."""
    _compile_kernels(chip, chosen_chunk(length, budget, H // K, K, 128, 2), budget)


def test_masked_attention_of_a_plain_row_fits_in_vmem():
    _compile_kernels("tpu7x", 131072, 0)


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(8, 64), (8, 256), (2, 128)])
def test_masked_attention_fits_in_vmem_at_other_sizes_of_heads(kv_heads, head_dim):
    _compile_kernels("v5e", 1024, 4096, kv_heads, head_dim)


@pytest.mark.parametrize(("chip", "kv_heads", "head_dim"), [("v5e", 8, 256), ("tpu7x", 2, 256)])
def test_masked_attention_in_float32_is_given_the_vmem_it_asks_for(chip, kv_heads, head_dim):
    """The same blocks take twice as much, which compilers refuse unasked; the largest group of the widest heads too."""
    _compile_kernels(chip, 1024, 1024, kv_heads, head_dim, "float32")


def _compile_kernels(chip, rows, old, kv_heads=K, head_dim=128, dtype="bfloat16"):
    group = H // kv_heads
    blocks = blocks_for(rows, old, group, kv_heads)

    def kernels(q_BKGTD, k_BKSD, v_BKSD, life_BKS, shift_BKGT):
        o_BKGTD, lse_BKGT = attend(q_BKGTD, k_BKSD, v_BKSD, life_BKS, blocks)
        arguments = q_BKGTD, k_BKSD, v_BKSD, life_BKS, lse_BKGT, o_BKGTD, shift_BKGT, blocks
        return attend_dq(*arguments), attend_dkv(*arguments, jnp.float32)

    k_shape = _shape(1, kv_heads, blocks.slots, head_dim, dtype=dtype)
    compiled = compile_for(
        chip, kernels, _shape(1, kv_heads, group, blocks.rows, head_dim, dtype=dtype), k_shape, k_shape,
        _shape(1, kv_heads, blocks.slots, dtype="int32"), _shape(1, kv_heads, group, blocks.rows, dtype="float32"),
    )  # fmt: skip
    assert set(compiled.vmem) == MASKED_ATTENTION
    what = f"{chip}, {rows} queries after {old} keys, {H} heads of {head_dim} on {kv_heads}, {dtype}"
    compiled.assert_vmem(what, vmem_limit(dtype))


def _shape(*shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)
