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
    # Batch axes first and the free axes of each operand side by side: the order in which XLA multiplies fast on CPUs.
    q_BKGTD = jnp.moveaxis(q_BTHD.reshape(B, T, K, H // K, D), 1, 3)
    lse_BKGT = lse_BHT.reshape(B, K, H // K, T).astype(acc)
    counts_BKGT = jnp.isfinite(lse_BKGT) & (segment_BS > 0)[:, None, None]
    if query_BT is not None:
        counts_BKGT &= query_BT[:, None, None]
    finite_BKGT = jnp.where(counts_BKGT, lse_BKGT, 0)

    def block(first_and_k):
        first, k_BKLD = first_and_k
        key_L = first + jnp.arange(L)
        k_segment_BL = jnp.take(segment_BS, key_L, axis=1, mode="fill", fill_value=0)
        later_BLT = (jnp.arange(T) >= key_L[:, None] + delay) & (k_segment_BL[:, :, None] == segment_BS[:, None])
        s_BKLGT = jnp.einsum("BKLD,BKGTD->BKLGT", k_BKLD, q_BKGTD, preferred_element_type=acc, precision=precision)
        mass_BKLGT = s_BKLGT * D**-0.5 - finite_BKGT[:, :, None]
        counted = later_BLT[:, None, :, None] & counts_BKGT[:, :, None]
        return jax.nn.logsumexp(jnp.where(counted, mass_BKLGT, -jnp.inf), axis=-1)

    k_BKSD = jnp.swapaxes(jnp.pad(k_BSKD, ((0, 0), (0, -S % L), (0, 0), (0, 0))), 1, 2)
    k_nBKLD = jnp.moveaxis(k_BKSD.reshape(B, K, -1, L, D), 2, 0)
    mass_nBKLG = lax.map(block, (jnp.arange(k_nBKLD.shape[0]) * L, k_nBKLD))
    return jnp.transpose(mass_nBKLG, (1, 2, 4, 0, 3)).reshape(B, H, -1)[..., :S]
