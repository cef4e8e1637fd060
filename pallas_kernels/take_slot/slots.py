"""What the numbers of a slot mean, shared by the contract and every back end."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

PROTECTED = jnp.inf
"""Priority of a token that may not be evicted: in the window, a sink, or pinned."""

EMPTY, CLOSED = -1, -2
"""Positions of slots without a token: one that the next may take, and one that fills the buffer only."""


def weakest_slot(key_BKC: Float[Array, "B K C"], position_BKC: Int[Array, "B K C"]) -> Int[Array, "B K"]:
    """The lexicographic minimum of (key, -position); of equal ones, which hold no token, the first."""
    lowest_BKC = key_BKC == jnp.min(key_BKC, axis=-1, keepdims=True)
    return jnp.argmax(jnp.where(lowest_BKC, position_BKC, CLOSED - 1), axis=-1)
