"""The forward kernel: an online softmax over blocks of keys.

The grid is (B, K, blocks of queries, blocks of keys), keys innermost. A step holds in VMEM a block of queries of all
heads of the group, folded into G * q rows, a block of K, of V and of lives (one integer per key, along lanes), and the
running maximum, sum and output of the rows. Scalar memory holds one bound per block of keys: the largest life in it. A
step in which nothing is visible computes nothing, and asks for the block of the diagonal, which is needed anyway.
Logarithms are to base 2 inside, which is what the hardware has.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.masked_attention.tpu_blocks import Blocks
from pallas_kernels.tpu_tiles import FLOOR, LANES, LOG2_E, MASKED, dot, lanes, to_lanes, vmem_limit


def attend(
    q_BKGTD: Float[Array, "B K G T D"],
    k_BKSD: Float[Array, "B K S D"],
    v_BKSD: Float[Array, "B K S D"],
    life_BKS: Int[Array, "B K S"],
    blocks: Blocks,
) -> tuple[Float[Array, "B K G T D"], Float[Array, "B K G T"]]:
    """Output and natural log-sum-exp of the rows, under the predicate of `tpu_blocks`."""
    B, K, G, T, D = q_BKGTD.shape
    rows = G * blocks.q
    q_spec, row_spec, k_spec, life_spec = specs(blocks, K, G, D)
    return pl.pallas_call(
        partial(_kernel, blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, K, blocks.num_q, blocks.num_k),
            in_specs=[q_spec, k_spec, k_spec, life_spec],
            out_specs=[q_spec, row_spec],
            scratch_shapes=[
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, D), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q_BKGTD.shape, q_BKGTD.dtype),
            jax.ShapeDtypeStruct((B, K, G, T), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit(q_BKGTD.dtype),
        ),
        cost_estimate=blocks.cost(G, D, q_BKGTD.dtype.itemsize, matmuls=2, arrays=2),
        name="masked_attention_forward",
    )(blocks.bounds(life_BKS), q_BKGTD, k_BKSD, v_BKSD, life_BKS[:, :, None])


def specs(blocks: Blocks, K: int, G: int, D: int) -> tuple[pl.BlockSpec, ...]:
    """Blocks of q-like arrays, of [B, K, G, T], of K and V, and of [B, K, 1, S], for a grid with keys innermost."""

    def key_block(b, h, i, j, bounds_ref):
        visible = blocks.visible(i, j, blocks.bound(bounds_ref, b * K + h, j))
        return jnp.where(visible, j, blocks.diagonal(i))

    return (
        pl.BlockSpec((None, None, G, blocks.q, D), lambda b, h, i, j, _: (b, h, 0, i, 0)),
        pl.BlockSpec((None, None, G, blocks.q), lambda b, h, i, j, _: (b, h, 0, i)),
        pl.BlockSpec((None, None, blocks.k, D), lambda *at: (at[0], at[1], key_block(*at), 0)),
        pl.BlockSpec((None, None, 1, blocks.k), lambda *at: (at[0], at[1], 0, key_block(*at))),
    )


def _kernel(blocks, bounds_ref, q_ref, k_ref, v_ref, life_ref, o_ref, lse_ref, max_ref, sum_ref, acc_ref):
    i, j = pl.program_id(2), pl.program_id(3)
    head = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
    G, _, D = q_ref.shape

    @pl.when(j == 0)
    def start():
        max_ref[...] = jnp.full_like(max_ref, FLOOR)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(blocks.visible(i, j, blocks.bound(bounds_ref, head, j)))
    def step():
        s_RS = scores(blocks, i, j, q_ref, k_ref, life_ref)
        before_RN = max_ref[...]
        after_RN = jnp.maximum(before_RN, jnp.max(s_RS, axis=1, keepdims=True))
        p_RS = jnp.exp2(s_RS - lanes(after_RN, blocks.k))
        faded_RN = jnp.exp2(before_RN - after_RN)
        max_ref[...] = after_RN
        sum_ref[...] = sum_ref[...] * faded_RN + jnp.sum(p_RS, axis=1, keepdims=True)
        acc_ref[...] = acc_ref[...] * lanes(faded_RN, D) + dot(p_RS.astype(v_ref.dtype), v_ref[...], ((1,), (0,)))

    @pl.when(j == blocks.num_k - 1)
    def finish():
        empty_RN = sum_ref[...] == 0
        whole_RN = jnp.where(empty_RN, 1, sum_ref[...])
        o_RD = acc_ref[...] / lanes(whole_RN, D)
        o_ref[...] = o_RD.reshape(q_ref.shape).astype(o_ref.dtype)
        # Every lane holds the same. Turned, rows lie along lanes: nothing 128 times too large is stored.
        lse_RN = jnp.where(empty_RN, -jnp.inf, (max_ref[...] + jnp.log2(whole_RN)) / LOG2_E)
        for g in range(G):
            lse_ref[g : g + 1] = to_lanes(lse_RN[g * blocks.q : (g + 1) * blocks.q])


def scores(blocks: Blocks, i, j, q_ref, k_ref, life_ref):
    """Scores of a block to base 2, scaled and masked: [G * q, k]."""
    G, L, D = q_ref.shape
    s_RS = dot(q_ref[...].reshape(G * L, D), k_ref[...], ((1,), (1,)))
    row_LS = i * L + lax.broadcasted_iota(jnp.int32, (L, blocks.k), 0)
    slot_LS = j * blocks.k + lax.broadcasted_iota(jnp.int32, (L, blocks.k), 1)
    mask_LS = jnp.where((slot_LS - blocks.old <= row_LS) & (row_LS < life_ref[...]), 0, MASKED)
    s_GLS = s_RS.reshape(G, L, blocks.k) * (LOG2_E * D**-0.5) + mask_LS
    return s_GLS.reshape(G * L, blocks.k)
