"""The boundary loss: one comparison per query, at the edge of the pool (KVpop 1.5)."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvpop_jax.eviction.expiry import expiry_from_priority, ranks
from kvpop_jax.eviction.layout import TokenLayout, eligible_range, segment_stop
from pallas_kernels.masked_attention import NEVER
from pallas_kernels.scans import running_min


@dataclass(frozen=True)
class BoundarySettings:
    """How the boundary loss weighs its comparisons.

    Attributes:
        temperature: tau, in nats of score; the loss is softplus of the signed margin over tau.
        balance: weigh keep and drop comparisons so that each makes up half of the loss, per KV head of the batch (of
            each part, where a step takes it in parts).
        balance_limit: the least and the largest of those weights.
        margin_weight: weigh by 1 - exp(-|gap of the targets|), so that near ties count little.
    """

    temperature: float = 1.0
    balance: bool = True
    balance_limit: tuple[float, float] = (0.5, 5.0)
    margin_weight: bool = True


@partial(jax.tree_util.register_dataclass, data_fields=["keep_rate", "accuracy", "comparisons"], meta_fields=[])
@dataclass(frozen=True)
class BoundaryMetrics:
    """Attributes: share of comparisons the target keeps, share the scorer gets right, and their number."""

    keep_rate: Float[Array, ""]
    accuracy: Float[Array, ""]
    comparisons: Float[Array, ""]


def boundary_loss(
    score_BKS: Float[Array, "B K S"],
    decay_K: Float[Array, "K"],
    target_BKS: Float[Array, "B K S"],
    layout: TokenLayout,
    *,
    window: int,
    settings: BoundarySettings,
) -> tuple[Float[Array, ""], BoundaryMetrics]:
    """Teaches the scorer which of two tokens the pool should hold: the one that just left the window, or the incumbent.

        mean over q, head of  omega * softplus(-y * (r(t_new) - r(t_incumbent)) / tau),   r(t) = score_t + lambda * t

    `t_new = q - w`; the incumbent is the weakest member of the target's pool at q - 1 (not at q, where t_new itself may
    be the cutoff and the margin would be zero); y = +1 if the target ranks t_new above it. Nothing is compared before
    the pool is full. Targets are aged by the same lambda, but without gradient: otherwise lambda could make every
    comparison a keep and the loss vanish (KVpop section 4, row 2).

    Args:
        score_BKS: the scorer's output; gradients reach it, and lambda.
        decay_K: lambda per KV head, in nats per token, >= 0.
        target_BKS: from `future_attention_target`.
        layout: documents, pins and pools.
        window: `w`.
        settings: temperature and weights.

    Returns:
        The loss (0 if there was nothing to compare) and its metrics.
    """
    S = score_BKS.shape[-1]
    target_BKS = lax.stop_gradient(_aged(target_BKS, lax.stop_gradient(decay_K), layout))
    priority_BKS = _aged(score_BKS, decay_K, layout)
    new_S = jnp.arange(S) - window
    start_BS, stop_BS = eligible_range(layout, window)
    # The pool of query q - 1 is chosen from the same range without its newest token, and must be full.
    earlier_stop_BS = jnp.maximum(stop_BS - 1, start_BS)
    valid_BS = (earlier_stop_BS - start_BS >= layout.pool_BS) & (layout.pool_BS > 0) & (layout.segment_BS > 0)
    joins_BKS, incumbent_BKS = incumbents(target_BKS, layout, window)

    def gap(x_BKS):
        new_BKS = jnp.take(x_BKS, jnp.maximum(new_S, 0), axis=-1)
        return new_BKS - jnp.take_along_axis(x_BKS, incumbent_BKS, axis=-1)

    target_gap_BKS, margin_BKS = gap(target_BKS), gap(priority_BKS)
    keep_BKS = jnp.take(joins_BKS, jnp.maximum(new_S, 0), axis=-1)
    sign_BKS = jnp.where(keep_BKS, 1.0, -1.0)
    valid_BKS = jnp.broadcast_to(valid_BS[:, None], keep_BKS.shape).astype(margin_BKS.dtype)
    weight_BKS = valid_BKS
    if settings.balance:
        weight_BKS *= _balance(keep_BKS, valid_BKS, settings.balance_limit)
    if settings.margin_weight:
        weight_BKS *= -jnp.expm1(-jnp.abs(target_gap_BKS))
    count = jnp.maximum(valid_BKS.sum(), 1)
    loss = jnp.sum(weight_BKS * jax.nn.softplus(-sign_BKS * margin_BKS / settings.temperature)) / count
    metrics = BoundaryMetrics(
        keep_rate=jnp.sum(valid_BKS * keep_BKS) / count,
        accuracy=jnp.sum(valid_BKS * ((margin_BKS > 0) == keep_BKS)) / count,
        comparisons=valid_BKS.sum(),
    )
    return loss, lax.stop_gradient(metrics)


def incumbents(
    priority_BKS: Float[Array, "B K S"], layout: TokenLayout, window: int
) -> tuple[Bool[Array, "B K S"], Int[Array, "B K S"]]:
    """Which tokens join the pool when they leave the window, and the weakest member of the pool before every query.

    The weakest is the next to leave. So it is read off the departures, of which a query has one at most, and from the
    last one on it is the weakest of those that stay.

    Returns:
        Joins; and the row index of the weakest token of the pool of query q - 1, which means something where that pool
        is full.
    """
    S = priority_BKS.shape[-1]
    index_S = jnp.arange(S, dtype=jnp.int32)
    start_BS, _ = eligible_range(layout, window)
    stop_BS = segment_stop(layout.segment_BS)
    expiry_BKS = expiry_from_priority(priority_BKS, layout, window)
    competes_BS = (index_S >= start_BS) & (index_S + window < stop_BS)
    joins_BKS = competes_BS[:, None] & (expiry_BKS > index_S + window)
    gone_BKS = jnp.where(joins_BKS & (expiry_BKS < S), expiry_BKS, S)
    leaver_BKS = _per_head(lambda gone_S, i_S: jnp.full_like(i_S, S).at[gone_S].set(i_S, mode="drop"))(
        gone_BKS, jnp.broadcast_to(index_S, layout.position_BS.shape)
    )
    next_BKS = running_min(jnp.where(leaver_BKS < S, index_S, S), reverse=True)
    leaves_BKS = jnp.take_along_axis(leaver_BKS, jnp.minimum(next_BKS, S - 1), axis=-1)

    rank_BKS, token_BKS = ranks(priority_BKS)
    stays_BKS = joins_BKS & (expiry_BKS == NEVER)
    # Documents are told apart by their first token.
    first_BS = index_S - layout.position_BS
    lowest_BKS = _per_head(lambda rank_S, first_S: jnp.zeros_like(rank_S).at[first_S].max(rank_S)[first_S])(
        jnp.where(stays_BKS, rank_BKS, 0), first_BS
    )
    last_BKS = jnp.take_along_axis(token_BKS, lowest_BKS, axis=-1)
    return joins_BKS, jnp.where(next_BKS < stop_BS[:, None], leaves_BKS, last_BKS)


def _per_head(function):
    """Of arrays [B, K, S] and [B, S]."""
    return jax.vmap(jax.vmap(function, in_axes=(0, None)))


def _aged(score_BKS, decay_K, layout):
    """Static priority score + lambda * t: it ranks as score - lambda * (q - t) does at every q."""
    return score_BKS + decay_K[:, None] * layout.position_BS[:, None].astype(score_BKS.dtype)


def _balance(keep_BKS, valid_BKS, limit):
    """1 / (2 x share of the comparison's own class), per KV head of the batch."""
    total = jnp.maximum(valid_BKS.sum(axis=(0, 2), keepdims=True), 1)
    keep_share = jnp.sum(valid_BKS * keep_BKS, axis=(0, 2), keepdims=True) / total
    share = jnp.where(keep_BKS, keep_share, 1 - keep_share)
    return jnp.clip(1 / (2 * jnp.maximum(share, 1e-6)), *limit)
