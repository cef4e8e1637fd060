"""Plain JAX mLSTM: what each chunk writes, the states between chunks, then all read-outs at once.

Within a chunk of L positions, b is the running sum of f (log forget gates; in two parts, see `sums`) and
a_j = b_L - b_j + i_j the log weight with which token j reaches the end of the chunk. A position t reads

    the state that entered the chunk, with log weight b_t + m, and each token j <= t, with log weight b_t - b_j + i_j

both relative to M_t, their maximum (at least 0), which is the stabiliser m of the recurrent form at t. States between
chunks are read from what all chunks before wrote, by the same rule. Memory is S x L for the read-outs, (S / L) X Y for
the states and (S / L)^2 for the weights between chunks; the S x L arrays are recomputed for the gradient.

The normaliser n is what the memory c would hold for a value that is always 1. It is computed beside the memory, not as
a last column of it: matrices of Y + 1 columns fill no tile of a GPU.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mlstm_chunkwise.state import MLSTMState
from pallas_kernels.mlstm_chunkwise.sums import RunningSum
from pallas_kernels.scans import running_max

EPSILON = 1e-6
# Accelerators would round the factors; scores are ranked.
_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def mlstm_chunkwise(q_BSKX, k_BSKX, v_BSKY, i_BSK, f_BSK, state, segment_BS, chunk):
    """See `api.mlstm_chunkwise`."""
    dtype = jnp.promote_types(q_BSKX.dtype, jnp.float32)
    B, S, K, Y = v_BSKY.shape
    L = max(1, min(chunk, S))

    def split(array):
        """[B, S, ...] to [chunks, B, L, ...], filled up with zeros, which is padding where segments are concerned."""
        array = jnp.pad(array, [(0, 0), (0, -S % L)] + [(0, 0)] * (array.ndim - 2))
        return jnp.moveaxis(array.reshape(B, -1, L, *array.shape[2:]), 1, 0)

    def split_heads(array):
        """[B, S, K, ...] to [chunks, B, K, L, ...]: once, and no product has to."""
        return jnp.moveaxis(split(array.astype(dtype)), 3, 2)

    q_nBKLX, k_nBKLX, v_nBKLY, i_nBKL, f_nBKL = map(split_heads, (q_BSKX, k_BSKX, v_BSKY, i_BSK, f_BSK))
    real_nBL, run_nBL = split(segment_BS != 0), split(segment_runs(segment_BS))
    # Padding forgets nothing, and is masked wherever it would write or read.
    b_nBKL = RunningSum.of(jnp.where(real_nBL[:, :, None], jax.nn.log_sigmoid(f_nBKL), 0))
    last_run_nB = running_max(jnp.max(run_nBL, axis=2).T).T
    run_mB = jnp.concatenate([jnp.zeros_like(last_run_nB[:1]), last_run_nB])
    entering_run_nB = run_mB[:-1]

    writes = jax.vmap(_chunk_writes)
    writes_n = writes(k_nBKLX, v_nBKLY, i_nBKL, b_nBKL, real_nBL, run_nBL, last_run_nB)
    first = MLSTMState(*(x.astype(dtype) for x in (state.c_BKXY, state.n_BKX, lax.stop_gradient(state.m_BK))))
    entering_n, final = _chunk_states(first, writes_n, b_nBKL.end, run_mB)

    # The S x L arrays are made again for the gradient; sums and norms are small, and kept.
    reads = jax.checkpoint(jax.vmap(_chunk_reads))
    sum_nBKLY, norm_nBKL = reads(
        entering_n, q_nBKLX, k_nBKLX, v_nBKLY, i_nBKL, b_nBKL, real_nBL, run_nBL, entering_run_nB
    )
    h_nBKLY = sum_nBKLY / (norm_nBKL + EPSILON)[..., None]
    h_BSKY = jnp.transpose(h_nBKLY, (1, 0, 3, 2, 4)).reshape(B, -1, K, Y)[:, :S]
    return h_BSKY.astype(v_BSKY.dtype), final


def mlstm_step(state, q_BKX, k_BKX, v_BKY, i_BK, f_BK):
    """See `api.mlstm_step`."""
    dtype = jnp.promote_types(q_BKX.dtype, jnp.float32)
    q_BKX, k_BKX, i_BK, f_BK = (array.astype(dtype) for array in (q_BKX, k_BKX, i_BK, f_BK))
    kept_BK = jax.nn.log_sigmoid(f_BK) + lax.stop_gradient(state.m_BK).astype(dtype)
    m_BK = _stabiliser(kept_BK, i_BK)
    forget_BK1 = jnp.exp(kept_BK - m_BK)[..., None]
    write_BKX = jnp.exp(i_BK - m_BK)[..., None] * k_BKX
    n_BKX = forget_BK1 * state.n_BKX.astype(dtype) + write_BKX
    written_BKXY = write_BKX[..., None] * v_BKY.astype(dtype)[:, :, None]
    c_BKXY = forget_BK1[..., None] * state.c_BKXY.astype(dtype) + written_BKXY
    sum_BKY = _einsum("BKX,BKXY->BKY", q_BKX, c_BKXY)
    norm_BK = jnp.sum(q_BKX * n_BKX, axis=-1)
    h_BKY = sum_BKY / (_bounded(norm_BK, m_BK) + EPSILON)[..., None]
    return MLSTMState(c_BKXY, n_BKX, m_BK), h_BKY.astype(v_BKY.dtype)


def segment_runs(segment_BS):
    """Numbers the segments of each row 0, 1, ... in order; padding keeps the number of the segment before it."""
    real_BS = segment_BS != 0
    place_BS = jnp.where(real_BS, jnp.arange(segment_BS.shape[1]), -1)
    last_BS = running_max(place_BS)
    before_BS = jnp.pad(last_BS, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    previous_BS = jnp.take_along_axis(segment_BS, jnp.maximum(before_BS, 0), axis=1)
    starts_BS = real_BS & (before_BS >= 0) & (previous_BS != segment_BS)
    return jnp.cumsum(starts_BS, axis=1)


def _chunk_writes(k_BKLX, v_BKLY, i_BKL, b_BKL, real_BL, run_BL, last_run_B):
    """What the last segment of a chunk adds to the memory at the chunk's end, in units of exp(m), and that m."""
    in_last_BL = real_BL & (run_BL == last_run_B[:, None])
    a_BKL = jnp.where(in_last_BL[:, None], b_BKL.to_end() + i_BKL, -jnp.inf)
    m_BK = _stabiliser(jnp.max(a_BKL, axis=-1))
    weighted_BKLX = jnp.exp(a_BKL - m_BK[..., None])[..., None] * k_BKLX
    return MLSTMState(_einsum("BKLX,BKLY->BKXY", weighted_BKLX, v_BKLY), weighted_BKLX.sum(axis=2), m_BK)


def _chunk_states(first, writes_n, total_forget_nBK, run_mB):
    """The memory that enters each chunk, and that which leaves the last: at m = n + 1 edges, each the sum of what was
    there before the row and what the chunks before the edge write.

    One product of matrices: a scan over chunks would be thousands of small launches on a GPU. It is n x n, not m x m,
    as n is the round number that fills tiles.
    """
    m = jnp.arange(run_mB.shape[0])
    # Sums of the chunks between two edges, not differences of running sums: those would be of large numbers.
    passed_mnBK = jnp.where((m[:, None] <= m[:-1])[..., None, None], total_forget_nBK, 0)
    between_mmBK = jnp.pad(jnp.cumsum(passed_mnBK, axis=1), ((0, 0), (1, 0), (0, 0), (0, 0)))
    there_mmB = (m[:, None] <= m)[..., None] & (run_mB[:, None] == run_mB)
    source_mBK = jnp.concatenate([first.m_BK[None], writes_n.m_BK])
    weight_mmBK = jnp.where(there_mmB[..., None], between_mmBK + source_mBK[:, None], -jnp.inf)
    edge_mBK = _stabiliser(jnp.max(weight_mmBK, axis=0))
    share_mmBK = jnp.exp(weight_mmBK - edge_mBK)

    def memory(edges):
        of_first, of_chunks = share_mmBK[0, edges], share_mmBK[1:, edges]
        c = _einsum("s...BK,sBKXY->...BKXY", of_chunks, writes_n.c_BKXY) + of_first[..., None, None] * first.c_BKXY
        n = _einsum("s...BK,sBKX->...BKX", of_chunks, writes_n.n_BKX) + of_first[..., None] * first.n_BKX
        return MLSTMState(c, n, edge_mBK[edges])

    return memory(slice(-1)), memory(-1)


def _chunk_reads(entering, q_BKLX, k_BKLX, v_BKLY, i_BKL, b_BKL, real_BL, run_BL, entering_run_B):
    """What every position of a chunk reads, given the state that entered it, and what that is to be divided by."""
    L = run_BL.shape[1]
    from_memory_BL = real_BL & (run_BL == entering_run_B[:, None])
    causal_LL = jnp.arange(L)[:, None] >= jnp.arange(L)
    within_BLL = causal_LL & (run_BL[:, :, None] == run_BL[:, None, :]) & real_BL[:, :, None] & real_BL[:, None, :]

    # What gates change in a weight they might as well change in the query or the key that it multiplies: their gradient
    # goes that way, and no array of L x L has to be summed along both axes for it.
    q_BKLX, k_BKLX = _growing(q_BKLX, b_BKL.fine), _growing(k_BKLX, i_BKL - b_BKL.fine)
    i_BKL, b_BKL = lax.stop_gradient((i_BKL, b_BKL))
    memory_weight_BKL = jnp.where(from_memory_BL[:, None], b_BKL.after(entering.m_BK), -jnp.inf)
    token_weight_BKLL = b_BKL.between() + i_BKL[..., None, :]
    token_weight_BKLL = jnp.where(within_BLL[:, None], token_weight_BKLL, -jnp.inf)
    m_BKL = _stabiliser(memory_weight_BKL, jnp.max(token_weight_BKLL, axis=-1))

    scores_BKLL = _einsum("BKLX,BKMX->BKLM", q_BKLX, k_BKLX) * jnp.exp(token_weight_BKLL - m_BKL[..., None])
    weighted_BKLX = q_BKLX * jnp.exp(memory_weight_BKL - m_BKL)[..., None]
    # XLA would join products that share a factor, here with what chunks write and in the gradient with each other, into
    # 192 rows or columns: not a size of GPU tiles, and half as fast. Not past a barrier.
    of_memory_BKLY = lax.optimization_barrier(_einsum("BKLX,BKXY->BKLY", weighted_BKLX, entering.c_BKXY))
    sum_BKLY = of_memory_BKLY + _einsum("BKLM,BKMY->BKLY", scores_BKLL, lax.optimization_barrier(v_BKLY))
    norm_BKL = jnp.sum(scores_BKLL, axis=-1) + jnp.sum(weighted_BKLX * entering.n_BKX[:, :, None], axis=-1)
    return sum_BKLY, _bounded(norm_BKL, m_BKL)


def _bounded(norm, m):
    return jnp.maximum(jnp.abs(norm), jnp.exp(-m))


@jax.custom_jvp
def _growing(x_X, rate):
    """`x`, differentiated as exp(rate - c) x for the constant c = rate."""
    return x_X


@_growing.defjvp
def _growing_jvp(primals, tangents):
    (x_X, _), (x_dot_X, rate_dot) = primals, tangents
    return x_X, x_dot_X + x_X * rate_dot[..., None]


def _stabiliser(*log_weights):
    """The largest log weight, 0 at least: a unit of measure, so a constant to the gradient."""
    largest = jnp.zeros_like(log_weights[0])
    for log_weight in log_weights:
        largest = jnp.maximum(largest, log_weight)
    return lax.stop_gradient(largest)
