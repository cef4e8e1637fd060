"""`scorer_step`: the contract, and the choice of a back end."""

from jaxtyping import Array, Float

from pallas_kernels.backend import Backend, select_backend
from pallas_kernels.leaving import Leaving
from pallas_kernels.meshes import per_shard
from pallas_kernels.mlstm_chunkwise.state import MLSTMState
from pallas_kernels.scorer_step import gpu, reference
from pallas_kernels.scorer_step.weights import ScorerWeights, age_decay, unit_rms

__all__ = ["ScorerWeights", "age_decay", "scorer_step", "unit_rms"]

_BACKENDS = {
    "gpu": Backend(gpu.scorer_step, "gpu", gpu.refuses),
    "reference": Backend(reference.scorer_step),
}
_WEIGHTS = ScorerWeights("KIX", "KIX", "KIY", "E2K", "2K", "KY", "K", "K")  # type: ignore[arg-type]
_LEAVING = Leaving("B", "BKC", "BKC", "BKC", "BKW")  # type: ignore[arg-type]


def scorer_step(
    weights: ScorerWeights,
    state: MLSTMState,
    hidden_BE: Float[Array, "B E"],
    k_BKD: Float[Array, "B K D"],
    v_BKD: Float[Array, "B K D"],
    leaving: Leaving,
    *,
    soft_cap: float,
    decay_max: float,
    backend: str = "auto",
) -> tuple[MLSTMState, Float[Array, "B K"]]:
    """Writes the new token into the memory of each KV head, then reads it with the token that leaves the window.

    With x = [k; v], each half at unit root mean square, gates g = cap tanh((hidden W + bias) / cap), and the memory of
    `mlstm_chunkwise`:

        h = mLSTM(q = W_q x_leaving / sqrt(X), k = W_k x, v = W_v x, i, f)
        priority = out . h / rms(h) + out_bias + min(exp(log_decay), decay_max) * (position of the leaving token)

    (KVpop, arXiv 2607.05061, sections 1.4 and 1.7.)

    Args:
        weights: float32 (float64 in a reference); for each KV head its own.
        state: of the memory before the new token; donate it, so that it is moved on in place.
        hidden_BE: the layer's input at the new token, any float dtype.
        k_BKD, v_BKD: of the new token, as they are cached.
        leaving: the token that leaves the window, read out of the cache where it lies: a head that does not hold it
            reads with x_leaving = 0. Kernels refuse quantised rows, and "auto" takes the reference.
        soft_cap: bound of the gates' inputs.
        decay_max: bound of the age decay, lambda; 0 leaves age out.
        backend: "auto" or the name of a back end.

    Returns:
        The state after the new token, and the leaving token's priority, in the dtype of the weights.
        Differentiable by the reference only.

    Raises:
        BackendError: the back end is unknown or refuses the arguments.
    """
    arguments = weights, state, hidden_BE, k_BKD, v_BKD, leaving, soft_cap, decay_max
    run = _BACKENDS[select_backend("scorer_step", backend, _BACKENDS, arguments)].run
    takes = _WEIGHTS, "BK", "BE", "BKD", "BKD", _LEAVING, None, None
    return per_shard(run, arguments, takes, (MLSTMState("BKXY", "BKX", "BK"), "BK"))  # type: ignore[arg-type]
