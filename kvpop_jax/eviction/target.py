"""The future-attention target: how much attention a token receives once it has left the window (KVpop 1.2, 1.3)."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvpop_jax.eviction.layout import TokenLayout, segment_stop
from pallas_kernels.received_log_mass import received_log_mass


def future_attention_target(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    lse_BHT: Float[Array, "B H T"],
    layout: TokenLayout,
    *,
    window: int,
    group: Literal["max", "mean"] = "max",
    power: float = 1.0,
    query_BT: Bool[Array, "B T"] | None = None,
    floor: float = 1e-8,
) -> Float[Array, "B K S"]:
    """log of the mean attention that later queries pay to each token, one value per KV head, in nats.

        m_t = (1 / N_t) sum_{d >= t + w} p(d -> t),    r_t = Agg over the group of log(floor + m_t)

    with N_t the number of exactly those queries, at least 1. The mean over the group, if asked for, is of the masses.
    `power` a above 1 takes the power mean ((1 / N_t) sum p^a)^(1/a) instead: one query that needs the token then weighs
    more than many that barely touch it. The transposed pass gives it as well, from a q and a lse.

    Args:
        q_BTHD, k_BSKD: the layer's queries and keys after rotary embedding.
        lse_BHT: normaliser of each query. That of the student's sparse attention (the paper's choice) weighs query d
            by 1 / A_d, A_d being the share of dense mass its kept set holds; that of a dense pass weighs all alike.
        layout: documents of the row.
        window: `w`.
        group: how the query heads that share a KV head are joined.
        power: a; 1 is the paper's mean, and the limit of large a is the largest attention any query pays.
        query_BT: the queries to sample; None for all.
        floor: keeps tokens that receive nothing finite.

    Returns:
        The target; not differentiable.
    """
    B, K = q_BTHD.shape[0], k_BSKD.shape[2]
    log_sum_BHS = received_log_mass(
        power * q_BTHD, k_BSKD, power * lse_BHT, layout.segment_BS, delay=window, query_BT=query_BT
    )
    count_BS = _later_queries(layout, window, query_BT)
    log_mean_BHS = (log_sum_BHS - jnp.log(jnp.maximum(count_BS, 1))[:, None]) / power
    log_mean_BKGS = log_mean_BHS.reshape(B, K, -1, count_BS.shape[1])
    joined_BKS = {
        "max": lambda x: jnp.max(x, axis=2),
        "mean": lambda x: jax.nn.logsumexp(x, axis=2) - jnp.log(x.shape[2]),
    }[group](log_mean_BKGS)
    return jnp.logaddexp(joined_BKS, jnp.log(jnp.asarray(floor, joined_BKS.dtype)))


def _later_queries(layout, window, query_BT):
    """How many (sampled) queries of its document see each token from outside the window."""
    S = layout.segment_BS.shape[1]
    asks_BT = layout.segment_BS > 0 if query_BT is None else query_BT & (layout.segment_BS > 0)
    before_BS = jnp.pad(jnp.cumsum(asks_BT, axis=1), ((0, 0), (1, 0)))
    stop_BS = segment_stop(layout.segment_BS)
    first_BS = jnp.minimum(jnp.arange(S) + window, stop_BS)
    return jnp.take_along_axis(before_BS, stop_BS, axis=1) - jnp.take_along_axis(before_BS, first_BS, axis=1)
