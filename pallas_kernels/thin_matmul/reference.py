"""Plain JAX `thin_matmul`."""

import jax
import jax.numpy as jnp

from pallas_kernels.norms import rms_norm


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
