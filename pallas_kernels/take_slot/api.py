"""`take_slot`: the contract, and the choice of a back end."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.backend import Backend, select_backend
from pallas_kernels.meshes import per_shard
from pallas_kernels.take_slot import gpu, reference

_BACKENDS = {
    "gpu": Backend(gpu.take_slot, "gpu", gpu.refuses, gpu.pays),
    "reference": Backend(reference.take_slot),
}


def take_slot(
    position_BKC: Int[Array, "B K C"],
    priority_BKC: Float[Array, "B K C"],
    ring_BKW: Int[Array, "B K W"],
    leaving_priority_BK: Float[Array, "B K"],
    position_B: Int[Array, "B"],
    pinned_B: Int[Array, "B"],
    own_B: Bool[Array, "B"],
    *,
    backend: str = "auto",
) -> tuple[Int[Array, "B K C"], Float[Array, "B K C"], Int[Array, "B K W"], Int[Array, "B K"]]:
    """Finds every head's slot for a new token, and writes down that it lives there.

    The token that leaves the window gets its priority first, where a head still holds it and it is not pinned. Then
    an empty slot is taken, else that of the weakest token: the lexicographic minimum of (priority, -position).

    Args:
        position_BKC, priority_BKC, ring_BKW: of the cache, as in `kvpop_jax.cache.LayerCache`; donate them, so that
            they are written in place. Positions of tokens differ within a head, priorities are no NaN.
        leaving_priority_BK: of the token W positions before the new one.
        position_B: of the new token.
        pinned_B: tokens of each row that never compete, at least 0.
        own_B: the rows that get a token. Nothing changes in the others, and their slot is C, past the last one.

    Returns:
        Positions, priorities (the new token's is `PROTECTED`) and ring after the step, and the slots, int32.

    Raises:
        BackendError: the back end is unknown or refuses the arguments.
    """
    arguments = position_BKC, priority_BKC, ring_BKW, leaving_priority_BK, position_B, pinned_B, own_B
    run = _BACKENDS[select_backend("take_slot", backend, _BACKENDS, arguments)].run
    return per_shard(run, arguments, ("BKC", "BKC", "BKW", "BK", "B", "B", "B"), ("BKC", "BKC", "BKW", "BK"))
