"""Exact sparse attention from survivors only: the way to linear cost.

For a chunk of queries that starts at `c0`, a visible key is either alive at `c0` (at most the budget of them) or inside
the chunk. So each chunk attends over `capacity + chunk` gathered keys per KV head instead of the whole row, and the
sequence costs S x (capacity + chunk). The same form is chunked prefill, and with a chunk of 1 it is decode.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def survivors(
    expiry_BKS: Int[Array, "B K S"], segment_BS: Int[Array, "B S"], first: Int[Array, ""], capacity: int
) -> tuple[Int[Array, "B K C"], Bool[Array, "B K"]]:
    """Row indices of the keys before `first` that a query at `first` or later may still see, and whether all fit.

    Empty places hold S. Keys of earlier documents do not count: the query at `first` is in another segment.
    """
    S = segment_BS.shape[1]
    index_S = jnp.arange(S)
    here_B1 = jnp.take(segment_BS, jnp.minimum(first, S - 1), axis=1)[:, None]
    alive_BKS = (index_S < first) & (expiry_BKS > first) & ((segment_BS == here_B1) & (segment_BS > 0))[:, None]
    place_BKS = jnp.where(alive_BKS, jnp.cumsum(alive_BKS, axis=-1) - 1, capacity)
    scatter = jax.vmap(jax.vmap(lambda place_S: jnp.full(capacity, S).at[place_S].set(index_S, mode="drop")))
    return scatter(place_BKS), alive_BKS.sum(-1) <= capacity


def compacted_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    v_BSKD: Float[Array, "B S K D"],
    expiry_BKS: Int[Array, "B K S"],
    segment_BS: Int[Array, "B S"],
    *,
    chunk: int,
    capacity: int,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B H T"], Bool[Array, ""]]:
    """`masked_attention` computed chunk by chunk over `capacity + chunk` keys.

    Args:
        q_BTHD, k_BSKD, v_BSKD, expiry_BKS, segment_BS: as in `masked_attention`.
        chunk: queries per step.
        capacity: survivors a chunk may start with; sinks + window + pool is always enough for a capped rule.

    Returns:
        Output, log-sum-exp, and whether the survivors fitted everywhere. Where they did not, the result is wrong and
        the caller must say so: an uncapped rule (dense, DMS) chooses its capacity.
    """
    B, S, H, D = q_BTHD.shape
    K = k_BSKD.shape[2]
    padding = -S % chunk
    if padding:
        q_BTHD, k_BSKD, v_BSKD = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q_BTHD, k_BSKD, v_BSKD))
        expiry_BKS = jnp.pad(expiry_BKS, ((0, 0), (0, 0), (0, padding)))
        segment_BS = jnp.pad(segment_BS, ((0, 0), (0, padding)))
    acc = jnp.promote_types(q_BTHD.dtype, jnp.float32)
    precision = lax.Precision.HIGHEST if q_BTHD.dtype == jnp.float32 else None
    einsum = partial(jnp.einsum, preferred_element_type=acc, precision=precision)

    @jax.checkpoint
    def attend(first):
        old_BKC, fits_BK = survivors(expiry_BKS, segment_BS, first, capacity)
        own_L = first + jnp.arange(chunk)
        key_BKC = jnp.concatenate([old_BKC, jnp.broadcast_to(own_L, (B, K, chunk))], axis=-1)
        gather = jax.vmap(jax.vmap(lambda x_S, key_C: jnp.take(x_S, key_C, axis=0, mode="fill", fill_value=0)))
        k_BKCD, v_BKCD = (gather(jnp.swapaxes(x, 1, 2), key_BKC) for x in (k_BSKD, v_BSKD))
        expiry_BKC = gather(expiry_BKS, key_BKC)
        segment_BKC = gather(jnp.broadcast_to(segment_BS[:, None], expiry_BKS.shape), key_BKC)
        q_segment_BL = lax.dynamic_slice_in_dim(segment_BS, first, chunk, axis=1)
        same_BKLC = (q_segment_BL[:, None, :, None] == segment_BKC[:, :, None]) & (segment_BKC[:, :, None] > 0)
        q_L1 = own_L[:, None]
        visible_BKLC = (key_BKC[:, :, None] <= q_L1) & (q_L1 < expiry_BKC[:, :, None]) & same_BKLC

        q_BLKGD = lax.dynamic_slice_in_dim(q_BTHD, first, chunk, axis=1).reshape(B, chunk, K, H // K, D)
        s_BKGLC = einsum("BLKGD,BKCD->BKGLC", q_BLKGD, k_BKCD) * D**-0.5
        s_BKGLC = jnp.where(visible_BKLC[:, :, None], s_BKGLC, -jnp.inf)
        lse_BKGL = jax.nn.logsumexp(s_BKGLC, axis=-1)
        safe_BKGL = jnp.where(jnp.isfinite(lse_BKGL), lse_BKGL, 0)
        p_BKGLC = jnp.where(visible_BKLC[:, :, None], jnp.exp(s_BKGLC - safe_BKGL[..., None]), 0)
        o_BLKGD = einsum("BKGLC,BKCD->BLKGD", p_BKGLC.astype(v_BKCD.dtype), v_BKCD)
        return o_BLKGD.reshape(B, chunk, H, D).astype(q_BTHD.dtype), lse_BKGL.reshape(B, H, chunk), fits_BK.all()

    o_nBLHD, lse_nBHL, fits_n = lax.map(attend, jnp.arange(0, S + padding, chunk))
    o_BTHD = jnp.moveaxis(o_nBLHD, 0, 1).reshape(B, -1, H, D)[:, :S]
    lse_BHT = jnp.moveaxis(lse_nBHL, 0, 2).reshape(B, H, -1)[..., :S]
    return o_BTHD, lse_BHT, fits_n.all()
