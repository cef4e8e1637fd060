"""Rotary position embedding of one array, given the rotation of every position."""

import jax.numpy as jnp
from jaxtyping import Array, Float

Rotation = tuple[Float[Array, "*T F"], Float[Array, "*T F"]]
"""Cosine and sine of every position's F = D / 2 angles."""


def apply_rope(x: Float[Array, "*T H D"], rotation: Rotation) -> Float[Array, "*T H D"]:
    """Rotates the pairs (i, i + D/2) of every head by the position's angles; keeps the dtype of `x`."""
    cos, sin = (table[..., None, :] for table in rotation)
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
