"""`mlstm_chunkwise` for Hopper GPUs: all chunks at once, by the kernels of `gpu_kernels`.

With w_tj the weight with which position t of a chunk reads token j, and r_t that with which it reads the memory C that
entered the chunk, the read-outs before their division are

    sum_t = sum_{j <= t} (q_t . k_j) w_tj v_j + r_t C^T q_t          total_t likewise, with 1 for v and n for C

All that follows is of this shape. With G (and g) the gradient of the memory that leaves the chunk (of its n), and u_j
the weight with which token j is written into it,

    dv_j = sum_{t >= j} (k_j . q_t) w_tj dsum_t + u_j G^T k_j
    dq_t = sum_{j <= t} (dsum_t . v_j + dtotal_t) w_tj k_j + r_t (C dsum_t + n dtotal_t)
    dk_j = sum_{t >= j} (v_j . dsum_t + dtotal_t) w_tj q_t + u_j (G v_j + g)

so there are two kernels, into the space of values and into that of keys, each run forwards and backwards in time. What
a chunk writes, and what it gives to the gradient of the memory that it reads, are sums of outer products: a third one.
Between chunks the memory is a linear recurrence, written out as one product of matrices, as in `reference`.

Gates are not differentiated in the kernels. A gate scales what a token writes or reads as a factor of the query or the
key would, so its gradient is q . dq or k . dk; that of what a whole chunk forgets is G . C of the memory that leaves.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import mosaic_gpu_is_missing
from pallas_kernels.mlstm_chunkwise import gpu_kernels
from pallas_kernels.mlstm_chunkwise.gpu_kernels import BACKWARDS, CHUNK, FORWARDS, KEY_DIM, VALUE_DIM
from pallas_kernels.mlstm_chunkwise.reference import EPSILON, segment_runs
from pallas_kernels.mlstm_chunkwise.state import MLSTMState
from pallas_kernels.mlstm_chunkwise.sums import RunningSum
from pallas_kernels.scans import running_max

_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def refuses(q_BSKX, k_BSKX, v_BSKY, i_BSK, f_BSK, state, segment_BS, chunk) -> str | None:
    """Why the kernels cannot take these arguments, in one line; None if they can."""
    if missing := mosaic_gpu_is_missing():
        return missing
    arrays = q_BSKX, k_BSKX, v_BSKY, i_BSK, f_BSK, *jax.tree.leaves(state)
    dtypes = {str(array.dtype) for array in arrays} - {"float32", "bfloat16"}
    if dtypes:
        return f"takes float32 and bfloat16, not {', '.join(sorted(dtypes))}"
    if (q_BSKX.shape[-1], v_BSKY.shape[-1]) != (KEY_DIM, VALUE_DIM):
        return f"takes keys of {KEY_DIM} and values of {VALUE_DIM}, not {q_BSKX.shape[-1]} and {v_BSKY.shape[-1]}"
    return None


def mlstm_chunkwise(
    q_BSKX: Float[Array, "B S K X"],
    k_BSKX: Float[Array, "B S K X"],
    v_BSKY: Float[Array, "B S K Y"],
    i_BSK: Float[Array, "B S K"],
    f_BSK: Float[Array, "B S K"],
    state: MLSTMState,
    segment_BS: Int[Array, "B S"],
    chunk: int,
):
    """See `api.mlstm_chunkwise`. Chunks are of 128 positions, whatever `chunk` asks for."""
    S, dtype = segment_BS.shape[1], v_BSKY.dtype
    arrays = q_BSKX, k_BSKX, v_BSKY, i_BSK, f_BSK
    q_BSKX, k_BSKX, v_BSKY, i_BSK, f_BSK = (
        jnp.pad(x.astype(jnp.float32), [(0, 0), (0, -S % CHUNK)] + [(0, 0)] * (x.ndim - 2)) for x in arrays
    )
    segment_BS = jnp.pad(segment_BS, ((0, 0), (0, -S % CHUNK)))
    i_BKnL, f_BKnL = _by_chunk(i_BSK), _by_chunk(f_BSK)
    run_BS = jnp.where(segment_BS != 0, segment_runs(segment_BS), -1)
    run_BnL = run_BS.reshape(run_BS.shape[0], -1, CHUNK)
    # Padding forgets nothing, and is of weight 0.
    real_B1nL = (run_BnL >= 0)[:, None]
    b_BKnL = RunningSum.of(jnp.where(real_B1nL, jax.nn.log_sigmoid(f_BKnL), 0.0))
    i_BKnL = jnp.where(real_B1nL, i_BKnL, -jnp.inf)
    memory = state.c_BKXY.astype(jnp.float32), state.n_BKX.astype(jnp.float32)
    weights = _weights(*lax.stop_gradient((b_BKnL, i_BKnL, state.m_BK.astype(jnp.float32))), run_BnL)
    sum_BSKY, total_BKnL, (c_BKXY, n_BKX) = _run(q_BSKX, k_BSKX, v_BSKY, b_BKnL, i_BKnL, memory, weights, run_BnL)
    divisor_BKnL = jnp.maximum(jnp.abs(total_BKnL), jnp.exp(-weights.unit_BKnL)) + EPSILON
    h_BSKY = sum_BSKY / _by_position(divisor_BKnL)[..., None]
    return h_BSKY[:, :S].astype(dtype), MLSTMState(c_BKXY, n_BKX, weights.last_unit_BK)


class _Weights(NamedTuple):
    """What gates make of tokens and memories; nothing is differentiated through it.

    Attributes:
        unit_BKnL: log of the unit of each read-out.
        read_BKnL: of the memory that enters the chunk, in the read-out of each position.
        write_BKnL: of each token, in the memory that leaves the chunk.
        share_BKmm: of what came from one place, in the memory at an edge between chunks. Places are the memory before
            the row, then each chunk; edges the start of the row, then the end of each chunk.
        last_unit_BK: log of the unit of the memory after the row.
    """

    unit_BKnL: jax.Array
    read_BKnL: jax.Array
    write_BKnL: jax.Array
    share_BKmm: jax.Array
    last_unit_BK: jax.Array


def _weights(b_BKnL, i_BKnL, unit_BK, run_BnL) -> _Weights:
    last_run_Bn = running_max(jnp.max(run_BnL, axis=-1).clip(0))
    run_Bm = jnp.pad(last_run_Bn, ((0, 0), (1, 0)))
    in_last_BnL = (run_BnL >= 0) & (run_BnL == last_run_Bn[..., None])
    log_write_BKnL = jnp.where(in_last_BnL[:, None], b_BKnL.to_end() + i_BKnL, -jnp.inf)

    # Sums of the chunks between two edges, not differences of running sums: those would be of large numbers.
    m = jnp.arange(run_Bm.shape[1])
    passed_BKmn = jnp.where(m[:, None] <= m[:-1], b_BKnL.end[:, :, None], 0.0)
    between_BKmm = jnp.pad(jnp.cumsum(passed_BKmn, axis=-1), ((0, 0), (0, 0), (0, 0), (1, 0)))
    there_BKmm = ((m[:, None] <= m) & (run_Bm[:, :, None] == run_Bm[:, None]))[:, None]

    def at_edges(source_unit_BKm):
        return jnp.where(there_BKmm, between_BKmm + source_unit_BKm[..., None], -jnp.inf)

    def sources(of_chunks_BKn):
        return jnp.concatenate([unit_BK[..., None], of_chunks_BKn], axis=-1)

    edge_unit_BKm = jnp.max(at_edges(sources(jnp.max(log_write_BKnL, axis=-1))), axis=-2).clip(0)
    share_BKmm = jnp.exp(at_edges(sources(edge_unit_BKm[..., 1:])) - edge_unit_BKm[:, :, None])

    continues_BnL = (run_BnL >= 0) & (run_BnL == run_Bm[:, :-1, None])
    log_read_BKnL = jnp.where(continues_BnL[:, None], b_BKnL.after(edge_unit_BKm[..., :-1]), -jnp.inf)
    L = jnp.arange(CHUNK)
    seen_BnLL = (L[:, None] >= L) & (run_BnL[..., None] == run_BnL[..., None, :])
    of_token_BKnLL = b_BKnL.between() + i_BKnL[..., None, :]
    largest_BKnL = jnp.max(jnp.where(seen_BnLL[:, None], of_token_BKnLL, -jnp.inf), axis=-1)
    unit_BKnL = jnp.maximum(largest_BKnL, log_read_BKnL).clip(0)
    return _Weights(
        unit_BKnL,
        jnp.exp(log_read_BKnL - unit_BKnL),
        jnp.exp(log_write_BKnL - edge_unit_BKm[..., 1:, None]),
        share_BKmm,
        edge_unit_BKm[..., -1],
    )


@jax.custom_vjp
def _run(q_BSKX, k_BSKX, v_BSKY, b_BKnL, i_BKnL, memory, weights, run_BnL):
    """Read-outs before their division, what they are to be divided by, and the memory after the row."""
    return _run_and_keep(q_BSKX, k_BSKX, v_BSKY, b_BKnL, i_BKnL, memory, weights, run_BnL)[0]


def _run_and_keep(q_BSKX, k_BSKX, v_BSKY, b_BKnL, i_BKnL, memory, weights, run_BnL):
    written = gpu_kernels.outer_products(k_BSKX, v_BSKY, weights.write_BKnL, weights.write_BKnL)
    share_BKmm = weights.share_BKmm

    def at_edges(first, written):  # [B, K, ...], [B, K, n, ...]
        # What the first chunk leaves of the row's memory is as if that chunk had written it.
        written = written.at[:, :, 0].add(_times(share_BKmm[:, :, 0, 1], first))
        entering = _einsum("BKse,BKs...->BKe...", share_BKmm[:, :, 1:, :-1], written)
        entering = entering.at[:, :, 0].set(_times(share_BKmm[:, :, 0, 0], first))
        return entering, _einsum("BKs,BKs...->BK...", share_BKmm[:, :, 1:, -1], written)

    (entering_c, last_c), (entering_n, last_n) = map(at_edges, memory, written)
    gates_BKn8L = gpu_kernels.gates(b_BKnL, -weights.unit_BKnL, i_BKnL, run_BnL, weights.read_BKnL)
    sum_BSKY, total_BKnL = gpu_kernels.to_values(q_BSKX, k_BSKX, v_BSKY, entering_c, entering_n, gates_BKn8L, FORWARDS)
    last = last_c, last_n
    kept = q_BSKX, k_BSKX, v_BSKY, b_BKnL, i_BKnL, weights, run_BnL, (entering_c, entering_n), last
    return (sum_BSKY, total_BKnL, last), kept


def _gradients(kept, cotangents):
    q_BSKX, k_BSKX, v_BSKY, b_BKnL, i_BKnL, weights, run_BnL, entering, last = kept
    dsum_BSKY, dtotal_BKnL, dlast = cotangents
    share_BKmm, unit_BKnL = weights.share_BKmm, weights.unit_BKnL
    dentering = gpu_kernels.outer_products(q_BSKX, dsum_BSKY, weights.read_BKnL, weights.read_BKnL * dtotal_BKnL)

    def of_leaving(dentering, dlast):  # [B, K, n, ...], [B, K, ...]
        later = _einsum("BKse,BKe...->BKs...", share_BKmm[:, :, 1:, :-1], dentering)
        dleaving = later + _times(share_BKmm[:, :, 1:, -1], dlast[:, :, None])
        dfirst = _times(share_BKmm[:, :, 0, 0], dentering[:, :, 0]) + _times(share_BKmm[:, :, 0, 1], dleaving[:, :, 0])
        return dfirst, dleaving

    (dfirst_c, dleaving_c), (dfirst_n, dleaving_n) = map(of_leaving, dentering, dlast)
    dleaving, one_BKnL = (dleaving_c, dleaving_n), jnp.ones_like(dtotal_BKnL)
    forth = gpu_kernels.gates(b_BKnL, -unit_BKnL, i_BKnL, run_BnL, weights.read_BKnL, dtotal_BKnL, one_BKnL)
    back = gpu_kernels.gates(b_BKnL, i_BKnL, -unit_BKnL, run_BnL, weights.write_BKnL, one_BKnL, dtotal_BKnL)
    dq_BSKX = gpu_kernels.to_keys(dsum_BSKY, v_BSKY, k_BSKX, *entering, forth, FORWARDS)
    dk_BSKX = gpu_kernels.to_keys(v_BSKY, dsum_BSKY, q_BSKX, *dleaving, back, BACKWARDS)
    dv_BSKY, _ = gpu_kernels.to_values(k_BSKX, q_BSKX, dsum_BSKY, *dleaving, back, BACKWARDS)

    def kept_through(dleaving, entering, last):
        leaving = jnp.concatenate([entering[:, :, 1:], last[:, :, None]], axis=2)
        return jnp.sum(dleaving * leaving, axis=range(3, leaving.ndim))

    di_BKnL = _by_chunk(jnp.sum(k_BSKX * dk_BSKX, axis=-1))
    db_BKnL = _by_chunk(jnp.sum(q_BSKX * dq_BSKX, axis=-1)) - di_BKnL
    db_BKnL = db_BKnL.at[..., -1].add(sum(map(kept_through, dleaving, entering, last)))
    db_BKnL = RunningSum(jnp.zeros_like(db_BKnL), db_BKnL)
    return dq_BSKX, dk_BSKX, dv_BSKY, db_BKnL, di_BKnL, (dfirst_c, dfirst_n), None, None


_run.defvjp(_run_and_keep, _gradients)


def _times(weight, x):
    """`weight` along the first axes of x."""
    return weight.reshape(*weight.shape, *[1] * (x.ndim - weight.ndim)) * x


def _by_chunk(x_BSK):
    return jnp.moveaxis(x_BSK.reshape(x_BSK.shape[0], -1, CHUNK, x_BSK.shape[-1]), 3, 1)


def _by_position(x_BKnL):
    return jnp.moveaxis(x_BKnL.reshape(*x_BKnL.shape[:2], -1), 1, 2)
