"""The backward kernels: one for dq, one for dk and dv, both from the log-sum-exp and without a map of probabilities.

With p the probabilities, dP = do v^T and shift = dlse - sum(do * o):

    ds = p * (dP + shift),    dq = ds k,    dk = ds^T q,    dv = p^T do

dq walks the grid of the forward kernel. dk and dv walk (B, K, blocks of keys, blocks of queries), queries innermost,
and hold a block of K and V with their gradients in VMEM; scores are transposed there, so that what belongs to rows lies
along lanes, where it is stored. The queries that may see a block of keys are consecutive: skipped steps fetch nothing.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, DTypeLike, Float, Int

from pallas_kernels.masked_attention.tpu_blocks import Blocks
from pallas_kernels.masked_attention.tpu_forward import scores, specs
from pallas_kernels.tpu_tiles import LANES, LOG2_E, MASKED, dot, lanes, to_rows, vmem_limit


def attend_dq(
    q_BKGTD: Float[Array, "B K G T D"],
    k_BKSD: Float[Array, "B K S D"],
    v_BKSD: Float[Array, "B K S D"],
    life_BKS: Int[Array, "B K S"],
    lse_BKGT: Float[Array, "B K G T"],
    do_BKGTD: Float[Array, "B K G T D"],
    shift_BKGT: Float[Array, "B K G T"],
    blocks: Blocks,
) -> Float[Array, "B K G T D"]:
    """The gradient of q, in its dtype."""
    B, K, G, _, D = q_BKGTD.shape
    rows = G * blocks.q
    q_spec, row_spec, k_spec, life_spec = specs(blocks, K, G, D)
    return pl.pallas_call(
        partial(_dq_kernel, blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, K, blocks.num_q, blocks.num_k),
            in_specs=[q_spec, k_spec, k_spec, life_spec, row_spec, q_spec, row_spec],
            out_specs=q_spec,
            scratch_shapes=[
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, D), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q_BKGTD.shape, q_BKGTD.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit(q_BKGTD.dtype),
        ),
        cost_estimate=blocks.cost(G, D, q_BKGTD.dtype.itemsize, matmuls=3, arrays=3),
        name="masked_attention_dq",
    )(blocks.bounds(life_BKS), q_BKGTD, k_BKSD, v_BKSD, life_BKS[:, :, None], lse_BKGT, do_BKGTD, shift_BKGT)


def _dq_kernel(
    blocks, bounds_ref, q_ref, k_ref, v_ref, life_ref, lse_ref, do_ref, shift_ref, dq_ref, log_ref, moved_ref, acc_ref
):
    i, j = pl.program_id(2), pl.program_id(3)
    head = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
    G, L, D = q_ref.shape

    @pl.when(j == 0)
    def start():
        acc_ref[...] = jnp.zeros_like(acc_ref)
        log_GL = _log2(lse_ref)
        for g in range(G):
            # Once for all blocks of keys.
            rows = pl.ds(g * L, L)
            log_ref[rows] = to_rows(log_GL[g : g + 1])
            moved_ref[rows] = to_rows(shift_ref[g : g + 1])

    @pl.when(blocks.visible(i, j, blocks.bound(bounds_ref, head, j)))
    def step():
        p_RS = jnp.exp2(scores(blocks, i, j, q_ref, k_ref, life_ref) - lanes(log_ref[...], blocks.k))
        dp_RS = dot(do_ref[...].reshape(G * L, D), v_ref[...], ((1,), (1,)))
        ds_RS = p_RS * (dp_RS + lanes(moved_ref[...], blocks.k))
        acc_ref[...] += dot(ds_RS.astype(k_ref.dtype), k_ref[...], ((1,), (0,)))

    @pl.when(j == blocks.num_k - 1)
    def finish():
        dq_ref[...] = (acc_ref[...] * D**-0.5).reshape(dq_ref.shape).astype(dq_ref.dtype)


def attend_dkv(
    q_BKGTD: Float[Array, "B K G T D"],
    k_BKSD: Float[Array, "B K S D"],
    v_BKSD: Float[Array, "B K S D"],
    life_BKS: Int[Array, "B K S"],
    lse_BKGT: Float[Array, "B K G T"],
    do_BKGTD: Float[Array, "B K G T D"],
    shift_BKGT: Float[Array, "B K G T"],
    blocks: Blocks,
    dtype: DTypeLike,
) -> tuple[Float[Array, "B K S D"], Float[Array, "B K S D"]]:
    """The gradients of k and v in `dtype`."""
    B, K, G, _, D = q_BKGTD.shape

    def q_block(b, h, j, i, bounds_ref):
        first = blocks.first_q(j)
        last = (blocks.bound(bounds_ref, b * K + h, j) - 1) // blocks.q
        return jnp.clip(i, first, jnp.clip(last, first, blocks.num_q - 1))

    q_spec = pl.BlockSpec((None, None, G, blocks.q, D), lambda *at: (at[0], at[1], 0, q_block(*at), 0))
    row_spec = pl.BlockSpec((None, None, G, blocks.q), lambda *at: (at[0], at[1], 0, q_block(*at)))
    k_spec = pl.BlockSpec((None, None, blocks.k, D), lambda b, h, j, i, _: (b, h, j, 0))
    life_spec = pl.BlockSpec((None, None, 1, blocks.k), lambda b, h, j, i, _: (b, h, 0, j))
    return pl.pallas_call(
        partial(_dkv_kernel, blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, K, blocks.num_k, blocks.num_q),
            in_specs=[q_spec, k_spec, k_spec, life_spec, row_spec, q_spec, row_spec],
            out_specs=[k_spec, k_spec],
            scratch_shapes=[
                pltpu.VMEM((blocks.k, LANES), jnp.int32),
                pltpu.VMEM((blocks.k, D), jnp.float32),
                pltpu.VMEM((blocks.k, D), jnp.float32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(k_BKSD.shape, dtype)] * 2,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit(q_BKGTD.dtype),
        ),
        cost_estimate=blocks.cost(G, D, q_BKGTD.dtype.itemsize, matmuls=4, arrays=2),
        name="masked_attention_dkv",
    )(blocks.bounds(life_BKS), q_BKGTD, k_BKSD, v_BKSD, life_BKS[:, :, None], lse_BKGT, do_BKGTD, shift_BKGT)


def _dkv_kernel(
    blocks, bounds_ref, q_ref, k_ref, v_ref, life_ref, lse_ref, do_ref, shift_ref, dk_ref, dv_ref,
    life_SN_ref, dk_acc_ref, dv_acc_ref,
):  # fmt: skip
    j, i = pl.program_id(2), pl.program_id(3)
    head = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
    G, L, D = q_ref.shape

    @pl.when(i == 0)
    def start():
        dk_acc_ref[...] = jnp.zeros_like(dk_acc_ref)
        dv_acc_ref[...] = jnp.zeros_like(dv_acc_ref)
        life_SN_ref[...] = to_rows(life_ref[...])

    @pl.when(blocks.visible(i, j, blocks.bound(bounds_ref, head, j)))
    def step():
        q_RD, do_RD = q_ref[...].reshape(G * L, D), do_ref[...].reshape(G * L, D)
        slot_SL = j * blocks.k + lax.broadcasted_iota(jnp.int32, (blocks.k, L), 0)
        row_SL = i * L + lax.broadcasted_iota(jnp.int32, (blocks.k, L), 1)
        visible_SL = (slot_SL - blocks.old <= row_SL) & (row_SL < lanes(life_SN_ref[...], L))
        mask_SR = jnp.concatenate([jnp.where(visible_SL, 0, MASKED)] * G, axis=1)
        s_SR = dot(k_ref[...], q_RD, ((1,), (1,))) * (LOG2_E * D**-0.5) + mask_SR
        p_SR = jnp.exp2(s_SR - _one_row(_log2(lse_ref)))
        dv_acc_ref[...] += dot(p_SR.astype(do_ref.dtype), do_RD, ((1,), (0,)))
        dp_SR = dot(v_ref[...], do_RD, ((1,), (1,)))
        ds_SR = p_SR * (dp_SR + _one_row(shift_ref[...]))
        dk_acc_ref[...] += dot(ds_SR.astype(q_ref.dtype), q_RD, ((1,), (0,)))

    @pl.when(i == blocks.num_q - 1)
    def finish():
        dk_ref[...] = (dk_acc_ref[...] * D**-0.5).astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


def _log2(lse_ref):
    """To base 2; 0 for rows that see nothing, whose scores are all masked."""
    return jnp.where(lse_ref[...] == -jnp.inf, 0, lse_ref[...] * LOG2_E)


def _one_row(x_GL):
    """[G, q] to [1, G * q]."""
    return jnp.concatenate([x_GL[g : g + 1] for g in range(x_GL.shape[0])], axis=1)
