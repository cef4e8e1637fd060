"""Turning keys and queries to other positions than those they were cached at."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def turn(x: Float[Array, "... D"], angle: Float[Array, "... D2"]) -> Float[Array, "... D"]:
    """Rotates the pairs (i, i + D/2) by the angles, in radians: rotary embedding of angle / frequency positions more.

    In at least float32; keeps the dtype of `x`.
    """
    return linear_turn(x, jnp.cos(angle), jnp.sin(angle))


def linear_turn(
    x: Float[Array, "... D"], cos: Float[Array, "... D2"], sin: Float[Array, "... D2"]
) -> Float[Array, "... D"]:
    """The same with any factors in place of a cosine and a sine, such as means of many."""
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
