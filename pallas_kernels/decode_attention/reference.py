"""Plain JAX `decode_attention`."""

import jax
import jax.numpy as jnp
from jax import lax


def decode_attention(q_BHD, k_BKCD, v_BKCD, position_BKC, k_new_BKD, v_new_BKD, slot_BK, return_probabilities):
    """See `api.decode_attention`."""
    B, H, D = q_BHD.shape
    K, C = k_BKCD.shape[1:3]
    acc = jnp.promote_types(q_BHD.dtype, jnp.float32)
    precision = lax.Precision.HIGHEST if q_BHD.dtype == jnp.float32 else None
    k_BKCD = _write(k_BKCD, slot_BK, k_new_BKD)
    v_BKCD = _write(v_BKCD, slot_BK, v_new_BKD)

    q_BKGD = q_BHD.reshape(B, K, H // K, D)
    s_BKGC = jnp.einsum("BKGD,BKCD->BKGC", q_BKGD, k_BKCD, preferred_element_type=acc, precision=precision)
    occupied_BKC = position_BKC >= 0
    s_BKGC = jnp.where(occupied_BKC[:, :, None], s_BKGC * D**-0.5, -jnp.inf)
    lse_BKG = jax.nn.logsumexp(s_BKGC, axis=-1)
    p_BKGC = jnp.exp(s_BKGC - jnp.where(jnp.isfinite(lse_BKG), lse_BKG, 0)[..., None])
    o_BKGD = jnp.einsum(
        "BKGC,BKCD->BKGD", p_BKGC.astype(v_BKCD.dtype), v_BKCD, preferred_element_type=acc, precision=precision
    )
    probabilities = p_BKGC.reshape(B, H, C) if return_probabilities else None
    return o_BKGD.reshape(B, H, D).astype(q_BHD.dtype), lse_BKG.reshape(B, H), k_BKCD, v_BKCD, probabilities


def _write(rows_BKCD, slot_BK, new_BKD):
    B, K = slot_BK.shape
    # `.at[].set` drops an index out of range; `dynamic_update_slice` would clamp it onto the last slot.
    return rows_BKCD.at[jnp.arange(B)[:, None], jnp.arange(K), slot_BK].set(new_BKD, mode="drop")
