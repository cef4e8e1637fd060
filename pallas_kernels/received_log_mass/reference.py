"""Plain JAX `received_log_mass`: blocks of keys against all queries."""

import jax
import jax.numpy as jnp
from jax import lax

KEY_BLOCK = 128


def received_log_mass(q_BTHD, k_BSKD, lse_BHT, segment_BS, delay, query_BT):
    """See `api.received_log_mass`."""
    q_BTHD, k_BSKD, lse_BHT = lax.stop_gradient((q_BTHD, k_BSKD, lse_BHT))
    B, T, H, D = q_BTHD.shape
    S, K = k_BSKD.shape[1:3]
    L = min(KEY_BLOCK, S)
    acc = jnp.promote_types(q_BTHD.dtype, jnp.float32)
    precision = lax.Precision.HIGHEST if q_BTHD.dtype == jnp.float32 else None
    q_BTKGD = q_BTHD.reshape(B, T, K, H // K, D)
    lse_BKGT = lse_BHT.reshape(B, K, H // K, T).astype(acc)
    counts_BKGT = jnp.isfinite(lse_BKGT) & (segment_BS > 0)[:, None, None]
    if query_BT is not None:
        counts_BKGT &= query_BT[:, None, None]

    def block(first_and_k):
        first, k_BLKD = first_and_k
        key_L = first + jnp.arange(L)
        k_segment_BL = jnp.take(segment_BS, key_L, axis=1, mode="fill", fill_value=0)
        later_BLT = (jnp.arange(T) >= key_L[:, None] + delay) & (k_segment_BL[:, :, None] == segment_BS[:, None])
        s_BKGLT = (
            jnp.einsum("BLKD,BTKGD->BKGLT", k_BLKD, q_BTKGD, preferred_element_type=acc, precision=precision) * D**-0.5
        )
        mass_BKGLT = s_BKGLT - jnp.where(counts_BKGT, lse_BKGT, 0)[..., None, :]
        counted = later_BLT[:, None, None] & counts_BKGT[..., None, :]
        return jax.nn.logsumexp(jnp.where(counted, mass_BKGLT, -jnp.inf), axis=-1)

    k_BSKD = jnp.pad(k_BSKD, ((0, 0), (0, -S % L), (0, 0), (0, 0)))
    k_nBLKD = jnp.moveaxis(k_BSKD.reshape(B, -1, L, K, D), 1, 0)
    mass_nBKGL = lax.map(block, (jnp.arange(k_nBLKD.shape[0]) * L, k_nBLKD))
    return jnp.moveaxis(mass_nBKGL, 0, 3).reshape(B, H, -1)[..., :S]
