"""Plain JAX mLSTM: what each chunk writes, the states between chunks, then all read-outs at once.

Within a chunk of L positions, b is the running sum of f (log forget gates) and a_j = b_L - b_j + i_j the log weight
with which token j reaches the end of the chunk. A position t reads

    the state that entered the chunk, with log weight b_t + m, and each token j <= t, with log weight b_t - b_j + i_j

both relative to M_t, their maximum (at least 0), which is the stabiliser m of the recurrent form at t. States between
chunks are read from what all chunks before wrote, by the same rule. Memory is S x L for the read-outs, (S / L) X Y for
the states and (S / L)^2 for the weights between chunks; the S x L arrays are recomputed for the gradient.

The normaliser n is what the memory c would hold for a value that is always 1. So every value gets a last entry 1, and
one matrix of Z = Y + 1 columns carries both: its read-out is the numerator and, last, the denominator.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mlstm_chunkwise.state import MLSTMState
from pallas_kernels.scans import running_max

EPSILON = 1e-6


def mlstm_chunkwise(q_BSKX, k_BSKX, v_BSKY, i_BSK, f_BSK, state, segment_BS, chunk):
    """See `api.mlstm_chunkwise`."""
    dtype = jnp.promote_types(q_BSKX.dtype, jnp.float32)
    B, S, K, Y = v_BSKY.shape
    L = max(1, min(chunk, S))

    def split(array):
        """[B, S, ...] to [chunks, B, L, ...], filled up with zeros, which is padding where segments are concerned."""
        array = jnp.pad(array, [(0, 0), (0, -S % L)] + [(0, 0)] * (array.ndim - 2))
        return jnp.moveaxis(array.reshape(B, -1, L, *array.shape[2:]), 1, 0)

    q_nBLKX, k_nBLKX, i_nBLK, f_nBLK = (split(array.astype(dtype)) for array in (q_BSKX, k_BSKX, i_BSK, f_BSK))
    v_nBLKZ = split(_with_one(v_BSKY.astype(dtype)))
    real_nBL, run_nBL = split(segment_BS != 0), split(segment_runs(segment_BS))
    # Padding forgets nothing, and is masked wherever it would write or read.
    b_nBLK = jnp.cumsum(jnp.where(real_nBL[..., None], jax.nn.log_sigmoid(f_nBLK), 0), axis=2)
    last_run_nB = running_max(jnp.max(run_nBL, axis=2).T).T
    run_mB = jnp.concatenate([jnp.zeros_like(last_run_nB[:1]), last_run_nB])
    entering_run_nB = run_mB[:-1]

    writes_n = jax.vmap(_chunk_writes)(k_nBLKX, v_nBLKZ, i_nBLK, b_nBLK, real_nBL, run_nBL, last_run_nB)
    sources_m = jax.tree.map(lambda x, y_n: jnp.concatenate([x[None], y_n]), _pack(state, dtype), writes_n)
    states_m = _chunk_states(sources_m, b_nBLK[:, :, -1], run_mB)
    entering_n, final = jax.tree.map(lambda x: x[:-1], states_m), jax.tree.map(lambda x: x[-1], states_m)

    reads = jax.checkpoint(jax.vmap(_chunk_reads))
    h_nBLKY = reads(entering_n, q_nBLKX, k_nBLKX, v_nBLKZ, i_nBLK, b_nBLK, real_nBL, run_nBL, entering_run_nB)
    h_BSKY = jnp.moveaxis(h_nBLKY, 0, 1).reshape(B, -1, K, Y)[:, :S]
    return h_BSKY.astype(v_BSKY.dtype), _unpack(*final)


def mlstm_step(state, q_BKX, k_BKX, v_BKY, i_BK, f_BK):
    """See `api.mlstm_step`."""
    # Memory and normaliser apart, not packed as in the chunkwise form: a step is bound by launches and copies.
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


def _chunk_writes(k_BLKX, v_BLKZ, i_BLK, b_BLK, real_BL, run_BL, last_run_B):
    """What the last segment of a chunk adds to the memory at the chunk's end, in units of exp(m), and that m."""
    in_last_BL = real_BL & (run_BL == last_run_B[:, None])
    a_BLK = jnp.where(in_last_BL[..., None], b_BLK[:, -1:] - b_BLK + i_BLK, -jnp.inf)
    m_BK = _stabiliser(jnp.max(a_BLK, axis=1))
    weighted_BLKX = jnp.exp(a_BLK - m_BK[:, None])[..., None] * k_BLKX
    return _einsum("BLKX,BLKZ->BKXZ", weighted_BLKX, v_BLKZ), m_BK


def _chunk_states(sources, total_forget_nBK, run_mB):
    """Memory and m at every edge between chunks, m = n + 1 of them, from what each edge adds: the first the state that
    the row begins with, every other what the chunk before it writes.

    One product of matrices: a scan over chunks would be thousands of small launches on a GPU.
    """
    source_mBKXZ, unit_mBK = sources
    m = jnp.arange(run_mB.shape[0])
    # Sums of the chunks between two edges, not differences of running sums: those would be of large numbers.
    passed_mnBK = jnp.where((m[:, None] <= m[:-1])[..., None, None], total_forget_nBK, 0)
    between_mmBK = jnp.pad(jnp.cumsum(passed_mnBK, axis=1), ((0, 0), (1, 0), (0, 0), (0, 0)))
    there_mmB = (m[:, None] <= m)[..., None] & (run_mB[:, None] == run_mB)
    weight_mmBK = jnp.where(there_mmB[..., None], between_mmBK + unit_mBK[:, None], -jnp.inf)
    edge_mBK = _stabiliser(jnp.max(weight_mmBK, axis=0))
    return _einsum("smBK,sBKXZ->mBKXZ", jnp.exp(weight_mmBK - edge_mBK), source_mBKXZ), edge_mBK


def _chunk_reads(entering, q_BLKX, k_BLKX, v_BLKZ, i_BLK, b_BLK, real_BL, run_BL, entering_run_B):
    """The read-out at every position of a chunk, given the memory and m that entered it."""
    memory_BKXZ, entering_BK = entering
    L = run_BL.shape[1]
    from_memory_BL = real_BL & (run_BL == entering_run_B[:, None])
    causal_LL = jnp.arange(L)[:, None] >= jnp.arange(L)
    within_BLL = causal_LL & (run_BL[:, :, None] == run_BL[:, None, :]) & real_BL[:, :, None] & real_BL[:, None, :]

    b_BKL, i_BKL = jnp.swapaxes(b_BLK, 1, 2), jnp.swapaxes(i_BLK, 1, 2)
    memory_weight_BKL = jnp.where(from_memory_BL[:, None], b_BKL + entering_BK[..., None], -jnp.inf)
    token_weight_BKLL = b_BKL[..., None] - b_BKL[..., None, :] + i_BKL[..., None, :]
    token_weight_BKLL = jnp.where(within_BLL[:, None], token_weight_BKLL, -jnp.inf)
    m_BKL = _stabiliser(memory_weight_BKL, jnp.max(token_weight_BKLL, axis=-1))

    scores_BKLL = _einsum("BLKX,BMKX->BKLM", q_BLKX, k_BLKX) * jnp.exp(token_weight_BKLL - m_BKL[..., None])
    sum_BKLZ = _einsum("BLKX,BKXZ->BKLZ", q_BLKX, memory_BKXZ) * jnp.exp(memory_weight_BKL - m_BKL)[..., None]
    sum_BKLZ = sum_BKLZ + _einsum("BKLM,BMKZ->BKLZ", scores_BKLL, v_BLKZ)
    return jnp.swapaxes(_divide(sum_BKLZ, m_BKL), 1, 2)


def _with_one(v_Y):
    return jnp.concatenate([v_Y, jnp.ones_like(v_Y[..., :1])], axis=-1)


def _pack(state, dtype):
    """The state as one matrix and its unit; the unit is a constant to the gradient."""
    memory_BKXZ = jnp.concatenate([state.c_BKXY, state.n_BKX[..., None]], axis=-1)
    return memory_BKXZ.astype(dtype), lax.stop_gradient(state.m_BK).astype(dtype)


def _unpack(memory_BKXZ, m_BK):
    return MLSTMState(memory_BKXZ[..., :-1], memory_BKXZ[..., -1], m_BK)


def _divide(sum_Z, m):
    return sum_Z[..., :-1] / (_bounded(sum_Z[..., -1], m) + EPSILON)[..., None]


def _bounded(norm, m):
    return jnp.maximum(jnp.abs(norm), jnp.exp(-m))


def _stabiliser(*log_weights):
    """The largest log weight, 0 at least: a unit of measure, so a constant to the gradient."""
    largest = jnp.zeros_like(log_weights[0])
    for log_weight in log_weights:
        largest = jnp.maximum(largest, log_weight)
    return lax.stop_gradient(largest)


def _einsum(spec, *arrays):
    # Accelerators round float32 factors to bfloat16 or TF32 unless told otherwise; scores are ranked, so they are kept.
    return jnp.einsum(spec, *arrays, precision=lax.Precision.HIGHEST)
