"""Plain JAX `split_qkv`."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.thin_matmul import rms_norm

Rotation = tuple[Float[Array, "*T F"], Float[Array, "*T F"]]
"""Cosine and sine of every position's F = D / 2 angles."""


def split_qkv(qkv, rotation, q_norm_D, k_norm_D, eps):
    """See `api.split_qkv`."""
    *tokens, _, _, D = qkv.shape
    q, k, v = qkv[..., :-2, :].reshape(*tokens, -1, D), qkv[..., -2, :], qkv[..., -1, :]
    if q_norm_D is not None:
        q = rms_norm(q, q_norm_D, eps)
    if k_norm_D is not None:
        k = rms_norm(k, k_norm_D, eps)
    return apply_rope(q, rotation), apply_rope(k, rotation), v


def apply_rope(x: Float[Array, "*T H D"], rotation: Rotation) -> Float[Array, "*T H D"]:
    """Rotates the pairs (i, i + D/2) of every head by the position's angles; keeps the dtype of `x`."""
    cos, sin = (table[..., None, :] for table in rotation)
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
