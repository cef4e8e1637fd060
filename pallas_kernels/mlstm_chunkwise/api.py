"""`mlstm_chunkwise` and `mlstm_step`: the contract, and the choice of a back end.

Per head, with f = log sigmoid(forget gate) and i = input gate (xLSTM, arXiv 2405.04517, the mLSTM, stabilised):

    m_t = max(0, f_t + m_{t-1}, i_t)
    c_t = exp(f_t + m_{t-1} - m_t) c_{t-1} + exp(i_t - m_t) k_t v_t^T          n_t likewise, with k_t alone
    h_t = c_t^T q_t / (max(|n_t . q_t|, exp(-m_t)) + 1e-6)

In units of exp(m) the bound of the denominator is 1 whatever `m` is, so any `m` that prevents overflow gives the same
`h`; keeping it at 0 or above leaves no infinity in rows that have seen nothing yet.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.backend import Backend, select_backend
from pallas_kernels.meshes import per_shard
from pallas_kernels.mlstm_chunkwise import gpu, reference, tpu
from pallas_kernels.mlstm_chunkwise.state import MLSTMState, mlstm_initial_state

__all__ = ["MLSTMState", "mlstm_chunkwise", "mlstm_initial_state", "mlstm_step"]

_BACKENDS = {
    "gpu": Backend(gpu.mlstm_chunkwise, "gpu", gpu.refuses),
    "tpu": Backend(tpu.mlstm_chunkwise, "tpu", tpu.refuses),
    "reference": Backend(reference.mlstm_chunkwise),
}


def mlstm_chunkwise(
    q_BSKX: Float[Array, "B S K X"],
    k_BSKX: Float[Array, "B S K X"],
    v_BSKY: Float[Array, "B S K Y"],
    i_BSK: Float[Array, "B S K"],
    f_BSK: Float[Array, "B S K"],
    state: MLSTMState | None,
    segment_BS: Int[Array, "B S"],
    *,
    chunk: int = 128,
    backend: str = "auto",
) -> tuple[Float[Array, "B S K Y"], MLSTMState]:
    """Runs the memory over whole rows in linear time and reads it at every position.

    Args:
        q_BSKX: queries, already scaled by 1 / sqrt(X); any float dtype, like `k` and `v`.
        k_BSKX, v_BSKY: what each token writes.
        i_BSK, f_BSK: gates before their activation: `i` is the log of a weight, `f` goes through log sigmoid here.
            Log sigmoids that sum to less than -4,096 in a chunk cost precision after them; `f` of -inf gives NaN.
        state: the memory that the first segment of each row continues; None is the empty one.
        segment_BS: document of each position. The memory restarts where it changes; 0 is padding, which leaves the
            memory alone and reads 0.
        chunk: positions handled at once. It changes speed and memory, not results. S need not be a multiple of it.
        backend: "auto" or the name of a back end.

    Returns:
        The read-outs in the dtype of `v`, and the state after each row's last token that is not padding. Differentiable
        in all float inputs, kernels in reverse mode only; `m` takes and gives no gradient (see `MLSTMState`).

    Raises:
        BackendError: the back end is unknown or refuses the arguments.
        ValueError: `chunk` is below 1.
    """
    if chunk < 1:
        raise ValueError(f"mlstm_chunkwise: chunk={chunk} must be at least 1")
    if state is None:
        (B, _, K, X), Y = q_BSKX.shape, v_BSKY.shape[-1]
        state = mlstm_initial_state(B, K, X, Y)
    arguments = q_BSKX, k_BSKX, v_BSKY, i_BSK, f_BSK, state, segment_BS, chunk
    run = _BACKENDS[select_backend("mlstm_chunkwise", backend, _BACKENDS, arguments)].run
    takes = "BSKX", "BSKX", "BSKY", "BSK", "BSK", "BK", "BS", None
    return per_shard(run, arguments, takes, ("BSKY", MLSTMState("BKXY", "BKX", "BK")))  # type: ignore[arg-type]


def mlstm_step(
    state: MLSTMState,
    q_BKX: Float[Array, "B K X"],
    k_BKX: Float[Array, "B K X"],
    v_BKY: Float[Array, "B K Y"],
    i_BK: Float[Array, "B K"],
    f_BK: Float[Array, "B K"],
) -> tuple[MLSTMState, Float[Array, "B K Y"]]:
    """Writes one token, then reads with one query: the recurrent form, for decoding.

    The query need not come from the token written: the delayed scorer reads with the token that leaves the window.
    Shapes, dtypes and gates as in `mlstm_chunkwise`. Returns the new state and the read-out in the dtype of `v`.
    """
    return reference.mlstm_step(state, q_BKX, k_BKX, v_BKY, i_BK, f_BK)
