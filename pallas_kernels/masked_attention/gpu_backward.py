"""The backward kernels on Hopper: one for dq, one for dk and dv, both from the log-sum-exp; no sum has two writers.

With p the probabilities, dP = do v^T and shift = dlse - sum(do * o):

    ds = p * (dP + shift),    dq = ds k,    dk = ds^T q,    dv = p^T do

dq visits the tiles of the forward kernel. For dk and dv a thread block has 128 keys, 64 for each warpgroup, and sees
blocks of 64 queries of all heads of the group, so that nothing is added up afterwards; scores are transposed there.
Survivors' gradients come out chunk by chunk, in float32, for XLA to add up. Registers hold the accumulators of three or
four products: the sizes of tiles are what just fits.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.masked_attention import gpu_tiles
from pallas_kernels.masked_attention.gpu_chunks import KEYS, ROWS
from pallas_kernels.masked_attention.gpu_tiles import (
    LOG2_E,
    LONG_AGO,
    TILED,
    WGMMA,
    Keys,
    Ring,
    block_of,
    first_key,
    load_tiles,
    masked,
    place,
    span_at,
    zeros,
)

_STAGES = 2
_QUERY_STAGES = 3


def attend_dq(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    v_BSKD: Float[Array, "B S K D"],
    old_k_BKND: Float[Array, "B K N D"],
    old_v_BKND: Float[Array, "B K N D"],
    end_BKS: Int[Array, "B K S"],
    old_end_BKN: Int[Array, "B K N"],
    span_BKnI6: Int[Array, "B K n I 6"],
    log2_BHT: Float[Array, "B H T"],
    do_BTHD: Float[Array, "B T H D"],
    shift_BHT: Float[Array, "B H T"],
) -> Float[Array, "B T H D"]:
    """The gradient of q; `log2` is the log-sum-exp to base 2, anything finite for queries that see nothing."""
    B, _, H, D = q_BTHD.shape
    K = k_BSKD.shape[2]
    n, pairs = span_BKnI6.shape[2:4]
    bf16 = jnp.bfloat16
    return plgpu.kernel(
        partial(_dq_kernel, group=H // K, chunks=n),
        out_type=jax.ShapeDtypeStruct(q_BTHD.shape, bf16),
        scratch_types=dict(
            q_smem=plgpu.SMEM((2, ROWS, D), bf16, transforms=TILED),
            do_smem=plgpu.SMEM((2, ROWS, D), bf16, transforms=TILED),
            k_smem=plgpu.SMEM((_STAGES, KEYS, D), bf16, transforms=TILED),
            v_smem=plgpu.SMEM((_STAGES, KEYS, D), bf16, transforms=TILED),
            end_smem=plgpu.SMEM((_STAGES, KEYS), jnp.int32),
            q_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=2),
            k_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
            v_loaded=plgpu.Barrier(num_barriers=_STAGES),
            k_used=plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
            v_used=plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
        ),
        grid=(pairs, K, B * n),
        grid_names=("pair", "head", "chunk"),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="masked_attention_dq",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(
        q_BTHD, k_BSKD, v_BSKD, old_k_BKND, old_v_BKND, end_BKS, old_end_BKN, span_BKnI6.reshape(-1),
        log2_BHT, do_BTHD, shift_BHT,
    )  # fmt: skip


def _dq_kernel(
    q_ref, k_ref, v_ref, old_k_ref, old_v_ref, end_ref, old_end_ref, span_ref, log2_ref, do_ref, shift_ref, dq_ref, *,
    q_smem, do_smem, k_smem, v_smem, end_smem, q_loaded, k_loaded, v_loaded, k_used, v_used, group, chunks,
):  # fmt: skip
    D = q_smem.shape[2]
    at = place(chunks)
    chunk = q_ref.shape[1] // chunks
    first = at.chunk * chunk
    pairs = chunk // ROWS * group // 2
    pair = pairs - 1 - lax.axis_index("pair")  # the ones with most tiles go first
    tiles = span_at(span_ref, ((at.batch * k_ref.shape[2] + at.head) * chunks + at.chunk) * pairs + pair)
    wg = lax.axis_index("warpgroup")

    @pl.when(wg == 2)
    def _load():
        plgpu.set_max_registers(24, action="decrease")
        own, old = Keys(k_ref, v_ref, end_ref), Keys(old_k_ref, old_v_ref, old_end_ref)
        ring = Ring(k_loaded, v_loaded, k_used, v_used)
        load_tiles(tiles, at, own, old, chunks, Keys(k_smem, v_smem, end_smem), ring)

    @pl.when(wg < 2)
    def _compute():
        plgpu.set_max_registers(240, action="increase")
        offset, of_group = block_of(pair, wg, group)
        query, head = first + offset, at.head * group + of_group
        rows = pl.ds(pl.multiple_of(query, ROWS), ROWS)
        plgpu.copy_gmem_to_smem(q_ref.at[at.batch, rows, head], q_smem.at[wg], q_loaded.at[wg])
        plgpu.copy_gmem_to_smem(do_ref.at[at.batch, rows, head], do_smem.at[wg], q_loaded.at[wg])
        log2_Q, shift_Q = (
            plgpu.load(ref.at[at.batch, head, rows], layout=WGMMA.reduce(1), optimized=False)
            for ref in (log2_ref, shift_ref)
        )
        plgpu.barrier_wait(q_loaded.at[wg])

        def step(i, dq_QD):
            stage = lax.rem(i, jnp.int32(_STAGES))
            plgpu.barrier_wait(k_loaded.at[stage])

            def multiply(s_ref, dp_ref):
                plgpu.wgmma(s_ref, q_smem.at[wg], k_smem.at[stage].transpose((1, 0)))
                plgpu.barrier_wait(v_loaded.at[stage])
                plgpu.wgmma(dp_ref, do_smem.at[wg], v_smem.at[stage].transpose((1, 0)))
                s_QS = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                s_QS = masked(
                    s_QS, tiles.unmasked(i), query, first_key(tiles, i, first), end_smem.at[stage], key_axis=1
                )
                p_QS = jnp.exp2(s_QS * (D**-0.5 * LOG2_E) - lax.broadcast_in_dim(log2_Q, s_QS.shape, [0]))
                return p_QS * (dp_ref[...] + lax.broadcast_in_dim(shift_Q, s_QS.shape, [0]))

            acc = plgpu.ACC((ROWS, KEYS), jnp.float32)
            ds_QS = pl.run_scoped(multiply, acc, acc).astype(jnp.bfloat16)
            plgpu.barrier_arrive(v_used.at[stage])
            (dq_QD,) = gpu_tiles.plus_products((dq_QD, lambda: ds_QS, k_smem.at[stage]))
            plgpu.barrier_arrive(k_used.at[stage])
            return dq_QD

        dq_QD = lax.fori_loop(jnp.int32(0), tiles.total, step, zeros(ROWS, D))
        q_smem[wg] = (dq_QD * D**-0.5).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem.at[wg], dq_ref.at[at.batch, rows, head])
        plgpu.wait_smem_to_gmem(0)


def attend_dkv(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    v_BSKD: Float[Array, "B S K D"],
    old_k_BKND: Float[Array, "B K N D"],
    old_v_BKND: Float[Array, "B K N D"],
    end_BKS: Int[Array, "B K S"],
    old_end_BKN: Int[Array, "B K N"],
    span_BKnJ4: Int[Array, "B K n J 4"],
    log2_BHT: Float[Array, "B H T"],
    do_BTHD: Float[Array, "B T H D"],
    shift_BHT: Float[Array, "B H T"],
) -> tuple[
    tuple[Float[Array, "B S K D"], Float[Array, "B S K D"]], tuple[Float[Array, "B K N D"], Float[Array, "B K N D"]]
]:
    """Gradients of k and v in float32: what the chunk's own queries give to each key, and what each chunk gives to its
    survivors."""
    B, K, D = q_BTHD.shape[0], k_BSKD.shape[2], q_BTHD.shape[3]
    n, tiles = span_BKnJ4.shape[2:4]
    bf16, f32 = jnp.bfloat16, jnp.float32
    own, old = (jax.ShapeDtypeStruct(x.shape, f32) for x in (k_BSKD, old_k_BKND))
    dk, dv, old_dk, old_dv = plgpu.kernel(
        partial(_dkv_kernel, chunks=n),
        out_type=(own, own, old, old),
        scratch_types=dict(
            k_smem=plgpu.SMEM((2, ROWS, D), bf16, transforms=TILED),
            v_smem=plgpu.SMEM((2, ROWS, D), bf16, transforms=TILED),
            end_smem=plgpu.SMEM((2, ROWS), jnp.int32),
            q_smem=plgpu.SMEM((_QUERY_STAGES, ROWS, D), bf16, transforms=TILED),
            do_smem=plgpu.SMEM((_QUERY_STAGES, ROWS, D), bf16, transforms=TILED),
            log2_smem=plgpu.SMEM((_QUERY_STAGES, ROWS), f32),
            shift_smem=plgpu.SMEM((_QUERY_STAGES, ROWS), f32),
            k_loaded=plgpu.Barrier(num_arrivals=3, num_barriers=2),
            q_loaded=plgpu.Barrier(num_arrivals=4, num_barriers=_QUERY_STAGES),
            q_used=plgpu.Barrier(num_arrivals=2, num_barriers=_QUERY_STAGES),
        ),
        grid=(tiles, K, B * n),
        grid_names=("tile", "head", "chunk"),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="masked_attention_dkv",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(
        q_BTHD, k_BSKD, v_BSKD, old_k_BKND, old_v_BKND, end_BKS, old_end_BKN, span_BKnJ4.reshape(-1),
        log2_BHT, do_BTHD, shift_BHT,
    )  # fmt: skip
    return (dk, dv), (old_dk, old_dv)


def _dkv_kernel(
    q_ref, k_ref, v_ref, old_k_ref, old_v_ref, end_ref, old_end_ref, span_ref, log2_ref, do_ref, shift_ref,
    dk_ref, dv_ref, old_dk_ref, old_dv_ref, *,
    k_smem, v_smem, end_smem, q_smem, do_smem, log2_smem, shift_smem, k_loaded, q_loaded, q_used, chunks,
):  # fmt: skip
    D, K = k_smem.shape[2], k_ref.shape[2]
    group = q_ref.shape[2] // K
    at = place(chunks)
    chunk, survivors = q_ref.shape[1] // chunks, old_k_ref.shape[2] // chunks
    first = at.chunk * chunk
    old_tiles, own_tiles = survivors // KEYS, chunk // KEYS
    tile = lax.axis_index("tile")
    is_old = tile < old_tiles
    index = ((at.batch * K + at.head) * chunks + at.chunk) * (old_tiles + own_tiles) + tile
    start, stop, start_whole, stop_whole = (span_ref[index * 4 + i] for i in range(4))
    # A block of queries with all heads of the group, one after the other.
    steps = jnp.maximum(stop - start, 0) * group
    wg = lax.axis_index("warpgroup")

    def block_and_head(i):
        block = lax.div(i, jnp.int32(group))
        return start + block, at.head * group + i - block * group

    @pl.when(wg == 2)
    def _load():
        plgpu.set_max_registers(24, action="decrease")

        @pl.loop(0, steps)
        def _queries(i):
            stage = lax.rem(i, jnp.int32(_QUERY_STAGES))
            block, head = block_and_head(i)
            rows = pl.ds(pl.multiple_of(first + block * ROWS, ROWS), ROWS)
            pl.when(i >= _QUERY_STAGES)(lambda: plgpu.barrier_wait(q_used.at[stage]))
            loaded = q_loaded.at[stage]
            plgpu.copy_gmem_to_smem(q_ref.at[at.batch, rows, head], q_smem.at[stage], loaded)
            plgpu.copy_gmem_to_smem(log2_ref.at[at.batch, head, rows], log2_smem.at[stage], loaded)
            plgpu.copy_gmem_to_smem(do_ref.at[at.batch, rows, head], do_smem.at[stage], loaded)
            plgpu.copy_gmem_to_smem(shift_ref.at[at.batch, head, rows], shift_smem.at[stage], loaded)

    @pl.when(wg < 2)
    def _compute():
        plgpu.set_max_registers(240, action="increase")
        offset = wg * ROWS
        key = first + (tile - old_tiles) * KEYS + offset
        own_rows = pl.ds(pl.multiple_of(jnp.where(is_old, 0, key), ROWS), ROWS)
        old_row = at.chunk * survivors + jnp.where(is_old, tile, 0) * KEYS + offset
        old_rows = pl.ds(pl.multiple_of(old_row, ROWS), ROWS)
        own_here, old_here = (at.batch, own_rows, at.head), (at.batch, at.head, old_rows)
        loaded = k_loaded.at[wg]

        @pl.when(is_old)
        def _survivors():
            plgpu.copy_gmem_to_smem(old_k_ref.at[old_here], k_smem.at[wg], loaded)
            plgpu.copy_gmem_to_smem(old_v_ref.at[old_here], v_smem.at[wg], loaded)
            plgpu.copy_gmem_to_smem(old_end_ref.at[old_here], end_smem.at[wg], loaded)

        @pl.when(~is_old)
        def _own():
            plgpu.copy_gmem_to_smem(k_ref.at[own_here], k_smem.at[wg], loaded)
            plgpu.copy_gmem_to_smem(v_ref.at[own_here], v_smem.at[wg], loaded)
            plgpu.copy_gmem_to_smem(end_ref.at[at.batch, at.head, own_rows], end_smem.at[wg], loaded)

        plgpu.barrier_wait(loaded)

        def step(i, carry):
            dk_SD, dv_SD = carry
            stage = lax.rem(i, jnp.int32(_QUERY_STAGES))
            block, _ = block_and_head(i)
            plgpu.barrier_wait(q_loaded.at[stage])

            def multiply(s_ref, dp_ref):
                plgpu.wgmma(s_ref, k_smem.at[wg], q_smem.at[stage].transpose((1, 0)))
                plgpu.wgmma(dp_ref, v_smem.at[wg], do_smem.at[stage].transpose((1, 0)))
                s_SQ = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                unmasked = (block >= start_whole) & (block < stop_whole)
                query, earliest = first + block * ROWS, jnp.where(is_old, LONG_AGO, key)
                s_SQ = masked(s_SQ, unmasked, query, earliest, end_smem.at[wg], key_axis=0)
                log2_Q = plgpu.load(log2_smem.at[stage], layout=WGMMA.reduce(0))
                p_SQ = jnp.exp2(s_SQ * (D**-0.5 * LOG2_E) - lax.broadcast_in_dim(log2_Q, s_SQ.shape, [1]))
                return p_SQ, dp_ref[...]

            acc = plgpu.ACC((ROWS, ROWS), jnp.float32)
            p_SQ, dp_SQ = pl.run_scoped(multiply, acc, acc)

            def ds_SQ():
                shift_Q = plgpu.load(shift_smem.at[stage], layout=WGMMA.reduce(0))
                return (p_SQ * (dp_SQ + lax.broadcast_in_dim(shift_Q, p_SQ.shape, [1]))).astype(jnp.bfloat16)

            dv_SD, dk_SD = gpu_tiles.plus_products(
                (dv_SD, lambda: p_SQ.astype(jnp.bfloat16), do_smem.at[stage]), (dk_SD, ds_SQ, q_smem.at[stage])
            )
            plgpu.barrier_arrive(q_used.at[stage])
            return dk_SD, dv_SD

        dk_SD, dv_SD = lax.fori_loop(jnp.int32(0), steps, step, (zeros(ROWS, D), zeros(ROWS, D)))
        dk_SD *= D**-0.5

        @pl.when(is_old)
        def _to_survivors():
            old_dk_ref[old_here] = dk_SD
            old_dv_ref[old_here] = dv_SD

        @pl.when(~is_old)
        def _to_own():
            dk_ref[own_here] = dk_SD
            dv_ref[own_here] = dv_SD
