"""The norm of the decoder, which models use and kernels take into the products beside it."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "... E"], weight_E: Float[Array, "E"], eps: float) -> Float[Array, "... E"]:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in at least float32; keeps the dtype of `x`."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale * weight_E).astype(x.dtype)
