"""`received_log_mass` for Hopper GPUs, in Pallas Mosaic GPU: attention transposed, an online log-sum-exp over queries.

A thread block has one head of queries and 256 keys, 64 for each of the four warpgroups that compute; a fifth one loads
tiles of 128 queries, with their log-sum-exps and positions, through a ring in shared memory. Scores are [keys,
queries]: what belongs to keys lies along rows and stays in registers. That is a sum and, because with the log-sum-exp
of a sparse pass terms may exceed 1 by any factor, a maximum. A row is spread over threads, so both are kept for 8
classes of queries apart, without a shuffle in the loop, and joined at the end.

The product of a tile takes about as long as its exponentials, and together they are nearly all of the work. So two
warpgroups pass a turn at the tensor cores between them: while one multiplies, the other takes exponentials. Left alone,
both would multiply at once, at half the speed each, and then take exponentials at once. Overlapping the two within a
warpgroup was tried: ptxas moves the wait for a product up, before exponentials that do not need it. With two such pairs
there is a warp for what latencies and turns leave idle.

Queries come in the order of their positions, so those that count for a block of keys are consecutive tiles, and so are
those of which every query counts for every key: they are not masked. A subset of the queries is moved to the front
first, so that the cost falls with its share. Logarithms are to base 2 inside.
"""

import math
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.backend import mosaic_gpu_is_missing
from pallas_kernels.segments import segment_end

HEAD_DIMS = (64, 128)
_WARPGROUPS = 4
_KEYS = 64
_BLOCK = _WARPGROUPS * _KEYS
_QUERIES = 128  # with 64, wgmma reads its operands from shared memory as fast as that allows
_STAGES = 3
_COLUMNS = 8
"""Of every 8 columns of scores a thread has the same two, so that arrays 8 apart are combined within threads."""
_LOG2_E = math.log2(math.e)
_SILENT = 2e38
"""The log-sum-exp of queries that do not count: float32 holds it beside any real score."""
_FLOOR = -1e30
"""A running maximum before any score; finite, so that no difference of two is NaN, and above the terms of `_SILENT`."""
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_WGMMA = plgpu.Layout.WGMMA


def refuses(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    lse_BHT: Float[Array, "B H T"],
    segment_BS: Int[Array, "B S"],
    delay: int,
    query_BT: Bool[Array, "B T"] | None = None,
) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    if missing := mosaic_gpu_is_missing():
        return missing
    if any(x.dtype != jnp.bfloat16 for x in (q_BTHD, k_BSKD)):
        return "takes bfloat16 only"
    if q_BTHD.shape[3] not in HEAD_DIMS:
        return f"takes head dimensions {', '.join(map(str, HEAD_DIMS))}, not {q_BTHD.shape[3]}"
    return None


@partial(jax.jit, static_argnums=4)  # lowering takes seconds: once for all layers of a model, not once for each
def received_log_mass(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    lse_BHT: Float[Array, "B H T"],
    segment_BS: Int[Array, "B S"],
    delay: int,
    query_BT: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B H S"]:
    """See `api.received_log_mass`."""
    q_BTHD, k_BSKD, lse_BHT = lax.stop_gradient((q_BTHD, k_BSKD, lse_BHT))
    B, T = segment_BS.shape
    counts_BHT = jnp.isfinite(lse_BHT)
    lse_BHT = jnp.where(counts_BHT, lse_BHT.astype(jnp.float32) * _LOG2_E, _SILENT)
    position_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    if query_BT is not None:
        # The others follow at positions past the row, where no document reaches.
        asks_BT = query_BT & counts_BHT.any(1) & (segment_BS > 0)
        position_BT = jnp.sort(jnp.where(asks_BT, position_BT, T + position_BT), axis=1)
        q_BTHD = jax.vmap(lambda q_THD, at_T: q_THD[at_T])(q_BTHD, position_BT % T)
        lse_BHT = jax.vmap(lambda lse_HT, at_T: lse_HT[:, at_T])(lse_BHT, position_BT % T)
    pad = -T % _BLOCK
    if pad:
        q_BTHD, k_BSKD = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q_BTHD, k_BSKD))
        lse_BHT = jnp.pad(lse_BHT, ((0, 0), (0, 0), (0, pad)))
        position_BT = jnp.pad(position_BT, ((0, 0), (0, pad)), constant_values=2 * T)
    end_BS = jnp.pad(segment_end(segment_BS), ((0, 0), (0, pad)))
    with jax.enable_x64(False):  # else the kernel's indices are of 64 bits, which Mosaic GPU does not take
        return _receive(q_BTHD, k_BSKD, lse_BHT, position_BT, end_BS, delay)[..., :T]


def query_spans(position_BT: Int[Array, "B T"], end_BS: Int[Array, "B S"], delay: int) -> Int[Array, "B N 4"]:
    """Tiles of queries for each block of keys, as half-open spans: that may count, and that count whole."""
    B, S = end_BS.shape
    position_BnQ = position_BT.reshape(B, 1, -1, _QUERIES)
    first_B1n, last_B1n = position_BnQ[..., 0], position_BnQ[..., -1]
    end_BNK = end_BS.reshape(B, -1, _BLOCK)
    key_N1 = jnp.arange(0, S, _BLOCK, dtype=jnp.int32)[:, None] + delay
    bounds = (
        last_B1n < key_N1,
        first_B1n < end_BNK.max(-1, keepdims=True),
        first_B1n < key_N1 + _BLOCK - 1,
        last_B1n < end_BNK.min(-1, keepdims=True),
    )
    return jnp.stack([reached_BNn.sum(-1, dtype=jnp.int32) for reached_BNn in bounds], axis=-1)


def _receive(q_BTHD, k_BSKD, lse_BHT, position_BT, end_BS, delay: int):
    B, S, K, D = k_BSKD.shape
    H = q_BTHD.shape[2]
    bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32
    return plgpu.kernel(
        partial(_kernel, delay=delay, group=H // K),
        out_type=jax.ShapeDtypeStruct((B, H, S), f32),
        scratch_types=dict(
            k_smem=plgpu.SMEM((_WARPGROUPS, _KEYS, D), bf16, transforms=_TILED),
            end_smem=plgpu.SMEM((_WARPGROUPS, _KEYS), i32),
            q_smem=plgpu.SMEM((_STAGES, _QUERIES, D), bf16, transforms=_TILED),
            lse_smem=plgpu.SMEM((_STAGES, _QUERIES), f32),
            position_smem=plgpu.SMEM((_STAGES, _QUERIES), i32),
            mass_smem=plgpu.SMEM((_WARPGROUPS, _KEYS), f32),
            k_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=_WARPGROUPS),
            q_loaded=plgpu.Barrier(num_arrivals=3, num_barriers=_STAGES),
            q_used=plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=_STAGES),
            turn=plgpu.Barrier(num_barriers=_WARPGROUPS),
        ),
        grid=(H, S // _BLOCK, B),  # the first keys, which most queries count for, go first
        grid_names=("head", "keys", "batch"),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="received_log_mass",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q_BTHD, k_BSKD, lse_BHT, position_BT, end_BS, query_spans(position_BT, end_BS, delay).reshape(-1))


def _kernel(
    q_ref, k_ref, lse_ref, position_ref, end_ref, span_ref, mass_ref, *,
    k_smem, end_smem, q_smem, lse_smem, position_smem, mass_smem, k_loaded, q_loaded, q_used, turn, delay, group,
):  # fmt: skip
    D, blocks = k_smem.shape[2], k_ref.shape[1] // _BLOCK
    batch, head, block = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("keys")
    start, stop, start_whole, stop_whole = (span_ref[(batch * blocks + block) * 4 + i] for i in range(4))
    # One at least, which is masked where no query counts.
    start = jnp.minimum(start, q_ref.shape[1] // _QUERIES - 1)
    tiles = jnp.maximum(stop - start, 1)
    # Tiles that count whole, of these. Their loop has no mask, and no branch around one.
    whole_from = jnp.clip(start_whole - start, 0, tiles)
    whole_to = jnp.clip(stop_whole - start, whole_from, tiles)
    wg = lax.axis_index("warpgroup")

    @pl.when(wg == _WARPGROUPS)
    def _load():
        plgpu.set_max_registers(24, action="decrease")

        @pl.loop(0, tiles)
        def _tile(i):
            stage = lax.rem(i, jnp.int32(_STAGES))
            rows = pl.ds(pl.multiple_of((start + i) * _QUERIES, _QUERIES), _QUERIES)
            pl.when(i >= _STAGES)(lambda: plgpu.barrier_wait(q_used.at[stage]))
            plgpu.copy_gmem_to_smem(q_ref.at[batch, rows, head], q_smem.at[stage], q_loaded.at[stage])
            plgpu.copy_gmem_to_smem(lse_ref.at[batch, head, rows], lse_smem.at[stage], q_loaded.at[stage])
            plgpu.copy_gmem_to_smem(position_ref.at[batch, rows], position_smem.at[stage], q_loaded.at[stage])

    @pl.when(wg < _WARPGROUPS)
    def _compute():
        # All threads start with 96, which is what 640 of them can have, and pass theirs on: 120 would wait for ever.
        plgpu.set_max_registers(112, action="increase")
        first = block * _BLOCK + wg * _KEYS
        rows = pl.ds(pl.multiple_of(first, _KEYS), _KEYS)
        of_head = batch, rows, lax.div(head, jnp.int32(group))
        plgpu.copy_gmem_to_smem(k_ref.at[of_head], k_smem.at[wg], k_loaded.at[wg])
        plgpu.copy_gmem_to_smem(end_ref.at[batch, rows], end_smem.at[wg], k_loaded.at[wg])
        plgpu.barrier_wait(k_loaded.at[wg])

        def step(i, carry, whole):
            stage = lax.rem(i, jnp.int32(_STAGES))
            plgpu.barrier_wait(q_loaded.at[stage])
            plgpu.barrier_wait(turn.at[wg])

            def multiply(s_ref):
                plgpu.wgmma(s_ref, k_smem.at[wg], q_smem.at[stage].transpose((1, 0)))
                return s_ref[...]

            s_KQ = pl.run_scoped(multiply, plgpu.ACC((_KEYS, _QUERIES), jnp.float32))
            plgpu.barrier_arrive(turn.at[wg ^ 1])

            def exponents(column):
                columns = pl.ds(column, _COLUMNS)
                s_KC = lax.slice(s_KQ, (0, column), (_KEYS, column + _COLUMNS))
                lse_C = plgpu.load(lse_smem.at[stage, columns], layout=_WGMMA.reduce(0))
                x_KC = s_KC * (D**-0.5 * _LOG2_E) - lax.broadcast_in_dim(lse_C, s_KC.shape, [1])
                if whole:
                    return x_KC
                position_C = plgpu.load(position_smem.at[stage, columns], layout=_WGMMA.reduce(0))
                position_KC = lax.broadcast_in_dim(position_C, x_KC.shape, [1])
                return jnp.where((key_KC <= position_KC) & (position_KC < end_KC), x_KC, -jnp.inf)

            m_KC, l_KC = carry
            # In halves: fewer registers are alive at once, and one's maximum is taken under the other's exponentials.
            for half in range(0, _QUERIES, _QUERIES // 2):
                x_nKC = [exponents(column) for column in range(half, half + _QUERIES // 2, _COLUMNS)]
                m_last_KC, m_KC = m_KC, reduce(jnp.maximum, x_nKC, m_KC)
                # A half is summed first: fewer roundings than adding to the total one by one.
                of_half_KC = reduce(jnp.add, [jnp.exp2(x_KC - m_KC) for x_KC in x_nKC])
                l_KC = l_KC * jnp.exp2(m_last_KC - m_KC) + of_half_KC
            plgpu.barrier_arrive(q_used.at[stage])
            return m_KC, l_KC

        shape = _KEYS, _COLUMNS
        key_KC = first + delay + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_WGMMA)
        end_K = plgpu.load(end_smem.at[wg], layout=_WGMMA.reduce(1))
        end_KC = lax.broadcast_in_dim(end_K, shape, [0])
        m_KC = plgpu.layout_cast(jnp.full(shape, _FLOOR, jnp.float32), _WGMMA)
        carry = m_KC, plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _WGMMA)
        pl.when(wg % 2 == 1)(lambda: plgpu.barrier_arrive(turn.at[wg ^ 1]))
        carry = lax.fori_loop(jnp.int32(0), whole_from, partial(step, whole=False), carry)
        carry = lax.fori_loop(whole_from, whole_to, partial(step, whole=True), carry)
        m_KC, l_KC = lax.fori_loop(whole_to, tiles, partial(step, whole=False), carry)
        pl.when(wg % 2 == 0)(lambda: plgpu.barrier_wait(turn.at[wg]))

        m_K = m_KC.max(axis=1)
        l_K = (l_KC * jnp.exp2(m_KC - lax.broadcast_in_dim(m_K, shape, [0]))).sum(axis=1)
        # log2(0) is -inf: a key for which no query counts.
        mass_smem[wg] = (m_K + jnp.log2(l_K)) / _LOG2_E
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mass_smem.at[wg], mass_ref.at[batch, head, rows])
        plgpu.wait_smem_to_gmem(0)
