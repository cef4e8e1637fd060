"""`masked_attention`: the contract, and the choice of a back end."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.backend import Backend, select_backend
from pallas_kernels.masked_attention import cudnn, gpu, reference, tpu
from pallas_kernels.masked_attention.dense import as_arrays
from pallas_kernels.meshes import per_shard


def _of_arrays(run: Callable[..., Any]) -> Callable[..., Any]:
    """For back ends that want an expiry and a segment of every key."""

    def run_filled(q_BTHD, k_BSKD, v_BSKD, expiry_BKS, segment_BS, *rest):
        return run(q_BTHD, k_BSKD, v_BSKD, *as_arrays(k_BSKD, expiry_BKS, segment_BS), *rest)

    return run_filled


_BACKENDS = {
    "cudnn": Backend(cudnn.masked_attention, "gpu", cudnn.refuses),
    "gpu": Backend(_of_arrays(gpu.masked_attention), "gpu", gpu.refuses),
    "tpu": Backend(_of_arrays(tpu.masked_attention), "tpu", tpu.refuses),
    "reference": Backend(_of_arrays(reference.masked_attention)),
}


def masked_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    v_BSKD: Float[Array, "B S K D"],
    expiry_BKS: Int[Array, "B K S"] | None,
    segment_BS: Int[Array, "B S"] | None,
    *,
    bias_BKS: Float[Array, "B K S"] | None = None,
    bias_delay: int = 0,
    capacity: int | None = None,
    backend: str = "auto",
) -> tuple[Float[Array, "B T H D"], Float[Array, "B H T"]]:
    """Causal grouped-query attention under expiry, scaled by 1 / sqrt(D).

    Query `q` sees key `t` iff `t <= q`, `q < expiry[t]`, and both are in the same segment. `t`, `q` and `expiry` count
    positions in the row (T = S). Query head `h` reads KV head `h // (H / K)`.

    Args:
        q_BTHD, k_BSKD, v_BSKD: after rotary embedding; any float dtype.
        expiry_BKS: first query position that no longer sees the key; `NEVER` keeps it. None: nothing
            expires; a back end that is for dense attention takes nothing else.
        segment_BS: document of each position, in contiguous runs; 0 is padding, which sees nothing and is seen by
            nothing. None: every row is one document, without padding.
        bias_BKS: added to the score of key `t` for queries `q >= t + bias_delay` (soft eviction, as in DMS and DMC).
        capacity: a promise: no query sees more keys than that, itself included; None promises nothing. A back end may
            use it to visit survivors only, and must then give NaN where it is broken.
        backend: "auto" or the name of a back end.

    Returns:
        Output in the dtype of `q`, and the log-sum-exp of the scaled scores in float32 (float64 for float64 inputs).
        A query that sees nothing gets output 0 and log-sum-exp -inf. Both are differentiable in q, k, v and the bias.

    Raises:
        BackendError: the back end is unknown or refuses the arguments.
    """
    arguments = q_BTHD, k_BSKD, v_BSKD, expiry_BKS, segment_BS, bias_BKS, bias_delay, capacity
    run = _BACKENDS[select_backend("masked_attention", backend, _BACKENDS, arguments)].run
    takes = "BTHD", "BSKD", "BSKD", "BKS", "BS", "BKS", None, None
    return per_shard(run, arguments, takes, ("BTHD", "BHT"))
