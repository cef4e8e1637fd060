"""`received_log_mass`: the contract, and the choice of a back end."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.backend import Backend, select_backend
from pallas_kernels.meshes import per_shard
from pallas_kernels.received_log_mass import gpu, reference, tpu

_BACKENDS = {
    "gpu": Backend(gpu.received_log_mass, "gpu", gpu.refuses),
    "tpu": Backend(tpu.received_log_mass, "tpu", tpu.refuses),
    "reference": Backend(reference.received_log_mass),
}


def received_log_mass(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    lse_BHT: Float[Array, "B H T"],
    segment_BS: Int[Array, "B S"],
    *,
    delay: int,
    query_BT: Bool[Array, "B T"] | None = None,
    backend: str = "auto",
) -> Float[Array, "B H S"]:
    """log of the probability mass that key `t` receives from the queries `d >= t + delay` of its segment:

        log sum_d exp(q_d k_t / sqrt(D) - lse_d)

    over queries with a finite `lse` (KVpop section 1.3: attention transposed, keys asking queries). The sum is taken as
    a log-sum-exp because with the log-sum-exp of a sparse pass the terms of evicted keys may exceed 1.

    Args:
        q_BTHD, k_BSKD: as in `masked_attention`, T = S.
        lse_BHT: normaliser of each query, from a dense or a sparse pass.
        segment_BS: document of each position, in contiguous runs; 0 for padding.
        delay: queries nearer than this do not count (the window).
        query_BT: which queries count at all; None for all of them.

    Returns:
        One value per query head, in float32 (float64 for float64 inputs); -inf where no query counts. Not
        differentiable: it is a target.

    Raises:
        BackendError: the back end is unknown or refuses the arguments.
    """
    arguments = q_BTHD, k_BSKD, lse_BHT, segment_BS, delay, query_BT
    run = _BACKENDS[select_backend("received_log_mass", backend, _BACKENDS, arguments)].run
    return per_shard(run, arguments, ("BTHD", "BSKD", "BHT", "BS", None, "BT"), "BHS")
