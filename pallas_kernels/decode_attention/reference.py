"""Plain JAX `decode_attention`."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import platform
from pallas_kernels.rows import QuantisedRows, as_factors, slots_of, write_rows

_WIDENED_BYTES = {"cpu": 1 << 21}
"""Of quantised rows as factors of a product, at once: accelerators widen them within the product, CPUs write them out,
into their caches if it is no more than this."""


def decode_attention(q_BHD, k_BKCD, v_BKCD, position_BKC, k_new_BKD, v_new_BKD, slot_BK, return_probabilities):
    """See `api.decode_attention`."""
    B, H, D = q_BHD.shape
    K, C = k_BKCD.shape[1:3]
    acc = jnp.promote_types(q_BHD.dtype, jnp.float32)
    precision = lax.Precision.HIGHEST if q_BHD.dtype == jnp.float32 else None
    einsum = partial(jnp.einsum, preferred_element_type=acc, precision=precision)
    k_BKCD, v_BKCD = write_rows(k_BKCD, slot_BK, k_new_BKD), write_rows(v_BKCD, slot_BK, v_new_BKD)
    block = _slots_at_once(k_BKCD, q_BHD.dtype)

    q_BKGD = q_BHD.reshape(B, K, H // K, D)
    s_BKGC = _scores(einsum, q_BKGD, k_BKCD, block) * D**-0.5
    s_BKGC = jnp.where((position_BKC >= 0)[:, :, None], s_BKGC, -jnp.inf)
    lse_BKG = jax.nn.logsumexp(s_BKGC, axis=-1)
    p_BKGC = jnp.exp(s_BKGC - jnp.where(jnp.isfinite(lse_BKG), lse_BKG, 0)[..., None])
    o_BKGD = _weighted_sum(einsum, p_BKGC, v_BKCD, block, q_BHD.dtype)
    probabilities = p_BKGC.reshape(B, H, C) if return_probabilities else None
    return o_BKGD.reshape(B, H, D).astype(q_BHD.dtype), lse_BKG.reshape(B, H), k_BKCD, v_BKCD, probabilities


def _scores(einsum, q_BKGD, k_BKCD, block):
    """q k for every slot, `block` slots at a time."""
    C = k_BKCD.shape[2]

    def of(start):
        key_BKcD, scale = as_factors(slots_of(k_BKCD, start, block), q_BKGD.dtype)
        return einsum("BKGD,BKCD->BKGC", q_BKGD, key_BKcD) * scale

    if block == C:
        return of(0)
    # The last block is moved back over what the one before it had.
    start_n = jnp.minimum(jnp.arange(0, C, block), C - block)
    none_BKGC = jnp.zeros((*q_BKGD.shape[:3], C), jax.eval_shape(of, 0).dtype)
    write = partial(lax.dynamic_update_slice_in_dim, axis=3)
    return lax.fori_loop(0, len(start_n), lambda n, s_BKGC: write(s_BKGC, of(start_n[n]), start_n[n]), none_BKGC)


def _weighted_sum(einsum, p_BKGC, v_BKCD, block, dtype):
    """p v over all slots, `block` slots at a time."""
    C = v_BKCD.shape[2]

    def of(start, first):
        value_BKcD, scale = as_factors(slots_of(v_BKCD, start, block), dtype)
        p_BKGc = lax.dynamic_slice_in_dim(p_BKGC, start, block, axis=3)
        p_BKGc = jnp.where(start + jnp.arange(block) >= first, p_BKGc * scale, 0)
        return einsum("BKGC,BKCD->BKGD", p_BKGc.astype(value_BKcD.dtype), value_BKcD)

    if block == C:
        return of(0, 0)
    first_n = jnp.arange(0, C, block)

    def add(n, o_BKGD):
        return o_BKGD + of(jnp.minimum(first_n[n], C - block), first_n[n])

    none = jax.eval_shape(of, 0, 0)
    return lax.fori_loop(0, len(first_n), add, jnp.zeros(none.shape, none.dtype))


def _slots_at_once(rows, dtype):
    B, K, C, D = rows.shape
    if platform() not in _WIDENED_BYTES or not isinstance(rows, QuantisedRows):
        return C
    return min(C, max(1, _WIDENED_BYTES[platform()] // (B * K * D * jnp.dtype(dtype).itemsize)))
