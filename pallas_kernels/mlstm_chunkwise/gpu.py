"""`mlstm_chunkwise` for GPUs: the plain form, its products on the tensor cores.

Products of float32 would run outside of them, at a tenth of their speed. Each factor is cut into three bfloat16, 24
bits, and the six largest of the nine products are summed in float32: the error is that of float32.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mlstm_chunkwise import reference

_PRECISION = lax.DotAlgorithmPreset.BF16_BF16_F32_X6


def refuses(q_BSKX, k_BSKX, v_BSKY, i_BSK, f_BSK, state, segment_BS, chunk) -> str | None:
    """See `backend.Backend`."""
    if any(x.dtype == jnp.float64 for x in (q_BSKX, k_BSKX, v_BSKY, i_BSK, f_BSK, state.c_BKXY)):
        return "computes in float32, not in float64"
    if jax.default_backend() == "gpu" and not jax.devices()[0].compute_capability.startswith("9."):
        return "is for Hopper GPUs (compute capability 9)"
    return None


def mlstm_chunkwise(*arguments):
    """See `api.mlstm_chunkwise`."""
    return reference.mlstm_chunkwise(*arguments, precision=_PRECISION)
