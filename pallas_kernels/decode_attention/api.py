"""`decode_attention`: the contract, and the choice of a back end."""

from jaxtyping import Array, Float, Int

from pallas_kernels.backend import Backend, select_backend
from pallas_kernels.decode_attention import gpu, reference, tpu
from pallas_kernels.meshes import per_shard
from pallas_kernels.rows import Rows

_BACKENDS = {
    "gpu": Backend(gpu.decode_attention, "gpu", gpu.refuses, gpu.pays),
    "tpu": Backend(tpu.decode_attention, "tpu", tpu.refuses),
    "reference": Backend(reference.decode_attention),
}


def decode_attention(
    q_BHD: Float[Array, "B H D"],
    k_BKCD: Rows,
    v_BKCD: Rows,
    position_BKC: Int[Array, "B K C"],
    k_new_BKD: Float[Array, "B K D"],
    v_new_BKD: Float[Array, "B K D"],
    slot_BK: Int[Array, "B K"],
    *,
    return_probabilities: bool = False,
    backend: str = "auto",
) -> tuple[
    Float[Array, "B H D"],
    Float[Array, "B H"],
    Rows,
    Rows,
    Float[Array, "B H C"] | None,
]:
    """Writes the new row into its slot and attends over the occupied slots, scores scaled by 1 / sqrt(D).

    Args:
        q_BHD: one query per row, after rotary embedding.
        k_BKCD, v_BKCD: the cache, [B, K, C, D], plain or quantised (`rows`); donate it, so that the row is written in
            place. Quantised rows are read in 8 bits; kernels refuse them, and "auto" takes the reference.
        position_BKC: position of the token in each slot, the new one included; negative slots are empty.
        k_new_BKD, v_new_BKD: the row of the new token, which is attended to as the cache has it.
        slot_BK: where it lands. A slot of C or more writes nothing.
        return_probabilities: also return the attention paid to every slot.

    Returns:
        Output (dtype of q), log-sum-exp (float32, or float64 for float64 inputs), both caches, and the probabilities
        (0 at empty slots) or None. A row whose slots are all empty gets output 0 and log-sum-exp -inf.

    Raises:
        BackendError: the back end is unknown or refuses the arguments.
    """
    arguments = q_BHD, k_BKCD, v_BKCD, position_BKC, k_new_BKD, v_new_BKD, slot_BK, return_probabilities
    run = _BACKENDS[select_backend("decode_attention", backend, _BACKENDS, arguments)].run
    takes = "BHD", "BKC", "BKC", "BKC", "BKD", "BKD", "BK", None
    return per_shard(run, arguments, takes, ("BHD", "BH", "BKC", "BKC", "BHC" if return_probabilities else None))
