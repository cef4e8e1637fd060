"""`scorer_step`: the contract, and the choice of a back end."""

from jaxtyping import Array, Float

from pallas_kernels.backend import Backend, select_backend
from pallas_kernels.meshes import per_shard
from pallas_kernels.mlstm_chunkwise.state import MLSTMState
from pallas_kernels.scorer_step import gpu, reference
from pallas_kernels.scorer_step.weights import ScorerWeights, unit_rms

__all__ = ["ScorerWeights", "scorer_step", "unit_rms"]

_BACKENDS = {
    "gpu": Backend(gpu.scorer_step, "gpu", gpu.refuses, gpu.pays),
    "reference": Backend(reference.scorer_step),
}
_SHARDS = ScorerWeights("KIX", "KIX", "KIY", "E2K", "2K", "KY")  # type: ignore[arg-type]


def scorer_step(
    weights: ScorerWeights,
    state: MLSTMState,
    hidden_BE: Float[Array, "B E"],
    k_BKD: Float[Array, "B K D"],
    v_BKD: Float[Array, "B K D"],
    leaving_k_BKD: Float[Array, "B K D"],
    leaving_v_BKD: Float[Array, "B K D"],
    *,
    soft_cap: float,
    backend: str = "auto",
) -> tuple[MLSTMState, Float[Array, "B K"]]:
    """Writes the new token into the memory of each KV head, then reads it with the token that leaves the window.

    With x = [k; v], each half at unit root mean square, gates g = cap tanh((hidden W + bias) / cap), and the memory of
    `mlstm_chunkwise`:

        h = mLSTM(q = W_q x_leaving / sqrt(X), k = W_k x, v = W_v x, i, f)       score = out . h / rms(h)

    (KVpop, arXiv 2607.05061, section 1.7.)

    Args:
        weights: float32 (float64 in a reference); for each KV head its own.
        state: of the memory before the new token; donate it, so that it is moved on in place.
        hidden_BE: the layer's input at the new token, any float dtype.
        k_BKD, v_BKD: of the new token, as they are cached.
        leaving_k_BKD, leaving_v_BKD: of the token that leaves the window.
        soft_cap: bound of the gates' inputs.
        backend: "auto" or the name of a back end.

    Returns:
        The state after the new token, and the leaving token's score without a bias, in the dtype of the weights.
        Differentiable by the reference only.

    Raises:
        BackendError: the back end is unknown or refuses the arguments.
    """
    arguments = weights, state, hidden_BE, k_BKD, v_BKD, leaving_k_BKD, leaving_v_BKD, soft_cap
    run = _BACKENDS[select_backend("scorer_step", backend, _BACKENDS, arguments)].run
    takes = _SHARDS, "BK", "BE", "BKD", "BKD", "BKD", "BKD", None
    return per_shard(run, arguments, takes, (MLSTMState("BKXY", "BKX", "BK"), "BK"))  # type: ignore[arg-type]
