"""`split_qkv`: the contract, and the choice of a back end."""

from jaxtyping import Array, Float

from pallas_kernels.backend import Backend, select_backend
from pallas_kernels.rotary import Rotation
from pallas_kernels.split_qkv import gpu, reference

_BACKENDS = {
    "gpu": Backend(gpu.split_qkv, "gpu", gpu.refuses, gpu.pays),
    "reference": Backend(reference.split_qkv),
}


def split_qkv(
    qkv: Float[Array, "*T K J D"],
    rotation: Rotation,
    q_norm_D: Float[Array, "D"] | None,
    k_norm_D: Float[Array, "D"] | None,
    *,
    eps: float,
    backend: str = "auto",
) -> tuple[Float[Array, "*T H D"], Float[Array, "*T K D"], Float[Array, "*T K D"]]:
    """Queries, keys and values of every head: RMS norms where the model has them, then rotary embedding.

    Args:
        qkv: of any number of tokens; for each KV head its G = J - 2 queries, its key and its value.
        rotation: of every position; features i and i + F are a pair.
        q_norm_D, k_norm_D: weights of the norms over each head's features (Qwen3), or None.
        eps: added to the mean square.
        backend: "auto" or the name of a back end.

    Returns:
        q (H = K G heads), k and v in the dtype of `qkv`. Differentiable.

    Raises:
        BackendError: the back end is unknown or refuses the arguments.
    """
    arguments = qkv, rotation, q_norm_D, k_norm_D, eps
    return _BACKENDS[select_backend("split_qkv", backend, _BACKENDS, arguments)].run(*arguments)
