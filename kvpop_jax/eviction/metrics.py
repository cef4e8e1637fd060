"""What a kept set is worth: the dense attention it holds, and how much of the ideal set it shares."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvpop_jax.eviction.expiry import expiry_from_priority
from kvpop_jax.eviction.layout import TokenLayout, eligible_range


def kept_mass(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    lse_BHT: Float[Array, "B H T"],
    segment_BS: Int[Array, "B S"],
    *,
    stride: int,
) -> Float[Array, ""]:
    """Share of dense attention mass that the kept tokens hold, averaged over every `stride`-th query and all heads.

    A = exp(lse_sparse - lse_dense); only the sampled queries pay for a dense pass.
    """
    B, T, H, D = q_BTHD.shape
    K = k_BSKD.shape[2]
    query = _sampled(T, stride)
    q_BQKGD = q_BTHD[:, query].reshape(B, -1, K, H // K, D)
    # As precise as the log-sum-exp it is compared with: tf32 scores would bias the share.
    precision = lax.Precision.HIGHEST if q_BTHD.dtype == jnp.float32 else None
    s_BKGQS = D**-0.5 * jnp.einsum(
        "BQKGD,BSKD->BKGQS", q_BQKGD, k_BSKD, preferred_element_type=lse_BHT.dtype, precision=precision
    )
    same_BQS = (segment_BS[:, query, None] == segment_BS[:, None]) & (segment_BS[:, None] > 0)
    visible_BQS = same_BQS & (jnp.arange(T) <= query[:, None])
    s_BKGQS = jnp.where(visible_BQS[:, None, None], s_BKGQS, -jnp.inf)
    lse_BKGQ = lse_BHT[..., query].reshape(B, K, H // K, -1)
    counted_BKGQ = jnp.isfinite(lse_BKGQ)
    mass_BKGQ = jnp.where(counted_BKGQ, jnp.exp(lse_BKGQ - jax.nn.logsumexp(s_BKGQS, axis=-1)), 0)
    return mass_BKGQ.sum() / jnp.maximum(counted_BKGQ.sum(), 1)


def target_recall(
    priority_BKS: Float[Array, "B K S"],
    target_BKS: Float[Array, "B K S"],
    layout: TokenLayout,
    *,
    window: int,
    stride: int,
) -> Float[Array, ""]:
    """Share of the target's pool that the student's pool holds too, over every `stride`-th query with a full pool.

    Args:
        priority_BKS: the student's static priorities.
        target_BKS: the target's, aged by the same lambda.
    """
    start_BS, stop_BS = eligible_range(layout, window)
    query = _sampled(priority_BKS.shape[-1], stride)
    index_S = jnp.arange(priority_BKS.shape[-1])
    eligible_BQS = (index_S >= start_BS[:, query, None]) & (index_S < stop_BS[:, query, None])

    def pool(x_BKS):
        expiry_BKS = expiry_from_priority(x_BKS, layout, window)
        return (expiry_BKS[:, :, None] > query[:, None]) & eligible_BQS[:, None]

    overfull_BQ = ((stop_BS - start_BS > layout.pool_BS) & (layout.pool_BS > 0) & (layout.segment_BS > 0))[:, query]
    shared_BKQ = jnp.sum(pool(priority_BKS) & pool(target_BKS), axis=-1)
    share_BKQ = shared_BKQ / jnp.maximum(layout.pool_BS[:, None, query], 1)
    counted_BKQ = jnp.broadcast_to(overfull_BQ[:, None], share_BKQ.shape)
    return jnp.sum(jnp.where(counted_BKQ, share_BKQ, 0)) / jnp.maximum(counted_BKQ.sum(), 1)


def _sampled(length, stride):
    # From the end, where the pool has been full for longest.
    return jnp.arange(length - 1, -1, -stride)
