"""What the absence of an expiry, or of documents, means in arrays."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

NEVER = 2**31 - 1
"""The expiry of a token that is never evicted."""


def as_arrays(
    k_BSKD: Float[Array, "B S K D"], expiry_BKS: Int[Array, "B K S"] | None, segment_BS: Int[Array, "B S"] | None
) -> tuple[Int[Array, "B K S"], Int[Array, "B S"]]:
    """Expiry and segments, where None stands for keys that never expire and for rows that are one document."""
    B, S, K, _ = k_BSKD.shape
    return (
        jnp.full((B, K, S), NEVER, jnp.int32) if expiry_BKS is None else expiry_BKS,
        jnp.ones((B, S), jnp.int32) if segment_BS is None else segment_BS,
    )
