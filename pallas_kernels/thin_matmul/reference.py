"""Plain JAX `thin_matmul`."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def norm_matmul(x, norm_E, w_EO, eps):
    """See `api.norm_matmul`."""
    normed = rms_norm(x, norm_E, eps)
    return normed, normed @ w_EO


def norm_swiglu(x, norm_E, w_E2F, eps):
    """See `api.norm_swiglu`."""
    gate, up = jnp.split(rms_norm(x, norm_E, eps) @ w_E2F.reshape(x.shape[-1], -1), 2, axis=-1)
    return jax.nn.silu(gate) * up


def matmul_add(x, w_FE, residual):
    """See `api.matmul_add`."""
    return residual + x @ w_FE


def rms_norm(x: Float[Array, "... E"], weight_E: Float[Array, "E"], eps: float) -> Float[Array, "... E"]:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in at least float32; keeps the dtype of `x`."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale * weight_E).astype(x.dtype)
