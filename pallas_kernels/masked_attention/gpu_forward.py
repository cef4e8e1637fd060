"""The forward kernel on Hopper: an online softmax over tiles of keys.

A thread block has two warpgroups that compute and one that loads. Each of the two holds 64 queries of one head, the
two being neighbours in the order (position, head of the group), so that a tile of K and V, loaded once, usually serves
two heads. Tiles come through shared memory in a ring of two stages. The warpgroups take turns at the tensor cores:
while one multiplies, the other is at its softmax.

The scores of a tile are masked only where `gpu_chunks.query_spans` says that some query does not see some key of it.
Logarithms are to base 2 inside.
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
    TILED,
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
_FLOOR = -1e30
"""A running maximum before any score; finite, so that no difference of two is NaN."""
_TINY = float(jnp.finfo(jnp.float32).tiny)


def attend(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    v_BSKD: Float[Array, "B S K D"],
    old_k_BKND: Float[Array, "B K N D"],
    old_v_BKND: Float[Array, "B K N D"],
    end_BKS: Int[Array, "B K S"],
    old_end_BKN: Int[Array, "B K N"],
    span_BKnI6: Int[Array, "B K n I 6"],
) -> tuple[Float[Array, "B T H D"], Float[Array, "B H T"]]:
    """Output and natural log-sum-exp of the queries of n chunks (T = n L, N = n C); NaN where survivors had no room."""
    B, _, H, D = q_BTHD.shape
    K = k_BSKD.shape[2]
    n, pairs = span_BKnI6.shape[2:4]
    bf16, f32 = jnp.bfloat16, jnp.float32
    return plgpu.kernel(
        partial(_kernel, group=H // K, chunks=n),
        out_type=(jax.ShapeDtypeStruct(q_BTHD.shape, bf16), jax.ShapeDtypeStruct((B, H, q_BTHD.shape[1]), f32)),
        scratch_types=dict(
            q_smem=plgpu.SMEM((2, ROWS, D), bf16, transforms=TILED),
            k_smem=plgpu.SMEM((_STAGES, KEYS, D), bf16, transforms=TILED),
            v_smem=plgpu.SMEM((_STAGES, KEYS, D), bf16, transforms=TILED),
            end_smem=plgpu.SMEM((_STAGES, KEYS), jnp.int32),
            lse_smem=plgpu.SMEM((2, ROWS), f32),
            q_loaded=plgpu.Barrier(num_barriers=2),
            k_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
            v_loaded=plgpu.Barrier(num_barriers=_STAGES),
            k_used=plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
            v_used=plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
            turn=plgpu.Barrier(num_arrivals=2),
        ),
        grid=(pairs, K, B * n),
        grid_names=("pair", "head", "chunk"),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="masked_attention_forward",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q_BTHD, k_BSKD, v_BSKD, old_k_BKND, old_v_BKND, end_BKS, old_end_BKN, span_BKnI6.reshape(-1))


def _kernel(
    q_ref, k_ref, v_ref, old_k_ref, old_v_ref, end_ref, old_end_ref, span_ref, o_ref, lse_ref, *,
    q_smem, k_smem, v_smem, end_smem, lse_smem, q_loaded, k_loaded, v_loaded, k_used, v_used, turn, group, chunks,
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
        plgpu.barrier_wait(q_loaded.at[wg])

        def take_turns():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def step(i, carry):
            o_QD, m_Q, l_Q = carry
            stage = lax.rem(i, jnp.int32(_STAGES))
            plgpu.barrier_wait(k_loaded.at[stage])

            def multiply(s_ref):
                plgpu.wgmma(s_ref, q_smem.at[wg], k_smem.at[stage].transpose((1, 0)))
                take_turns()
                return s_ref[...]

            s_QS = pl.run_scoped(multiply, plgpu.ACC((ROWS, KEYS), jnp.float32))
            s_QS = masked(s_QS, tiles.unmasked(i), query, first_key(tiles, i, first), end_smem.at[stage], key_axis=1)
            plgpu.barrier_arrive(k_used.at[stage])

            scale = D**-0.5 * LOG2_E
            m_next_Q = jnp.maximum(m_Q, s_QS.max(axis=1) * scale)
            shrink_Q = jnp.exp2(m_Q - m_next_Q)
            p_QS = jnp.exp2(s_QS * scale - lax.broadcast_in_dim(m_next_Q, s_QS.shape, [0]))
            o_QD *= lax.broadcast_in_dim(shrink_Q, o_QD.shape, [0])
            l_Q = l_Q * shrink_Q + p_QS.sum(axis=1)
            p16_QS = p_QS.astype(jnp.bfloat16)
            # The softmax is to be over before the turn is handed on.
            o_QD, l_Q, m_next_Q, p16_QS = lax.optimization_barrier((o_QD, l_Q, m_next_Q, p16_QS))
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_loaded.at[stage])
            plgpu.barrier_wait(turn)
            (o_QD,) = gpu_tiles.plus_products((o_QD, lambda: p16_QS, v_smem.at[stage]))
            plgpu.barrier_arrive(v_used.at[stage])
            return o_QD, m_next_Q, l_Q

        pl.when(wg == 1)(take_turns)
        start = zeros(ROWS, D), zeros(ROWS) + _FLOOR, zeros(ROWS)
        o_QD, m_Q, l_Q = lax.fori_loop(jnp.int32(0), tiles.total, step, start)
        pl.when(wg == 0)(take_turns)

        l_Q += jnp.where(tiles.fits, 0.0, jnp.nan)
        # log2(0) is -inf: a query that sees nothing.
        lse_smem[wg] = (m_Q + jnp.log2(l_Q)) / LOG2_E
        o_QD *= lax.broadcast_in_dim(1 / jnp.maximum(l_Q, _TINY), o_QD.shape, [0])
        q_smem[wg] = o_QD.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem.at[wg], o_ref.at[at.batch, rows, head])
        plgpu.copy_smem_to_gmem(lse_smem.at[wg], lse_ref.at[at.batch, head, rows])
        plgpu.wait_smem_to_gmem(0)
