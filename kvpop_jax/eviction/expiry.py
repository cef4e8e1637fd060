"""Static priorities to expiry, without a loop over positions (KVpop section 1.8).

Because a priority never changes and the competing set only grows, a token that k others outrank stays outranked: an
evicted token never returns, and "the first query at which k eligible tokens outrank t" says all there is to say.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvpop_jax.eviction.layout import TokenLayout, eligible_range, segment_stop
from pallas_kernels.masked_attention import NEVER


def expiry_from_priority(priority_BKS: Float[Array, "B K S"], layout: TokenLayout, window: int) -> Int[Array, "B K S"]:
    """First query position (row index) at which `k` eligible tokens of its document outrank the token.

    Pinned tokens never expire. Equal priorities: the older token stays.

    Args:
        priority_BKS: one static priority per token and KV head, higher is kept; compared in float32.
        layout: documents, pins and pool sizes.
        window: `w`; the `w` most recent tokens, the query included, are protected.

    Returns:
        Expiry, `NEVER` where the token outlives its document.
    """
    rank_BKS = ranks(priority_BKS)
    start_BS, stop_BS = eligible_range(layout, window)
    cutoff_BKS = running_cutoff(rank_BKS, start_BS, stop_BS, layout.pool_BS)
    expiry_BKS = _first_query_past(cutoff_BKS, rank_BKS, layout, window)
    return jnp.where(layout.pinned_BS[:, None], NEVER, expiry_BKS)


def ranks(priority_BKS: Float[Array, "B K S"]) -> Int[Array, "B K S"]:
    """Rank of every token in its row, 0 for the highest priority; of equal priorities the older token ranks first."""
    best_first_BKS = jnp.argsort(-priority_BKS.astype(jnp.float32), axis=-1, stable=True)
    return inverse_permutation(best_first_BKS)


def inverse_permutation(order_BKS: Int[Array, "B K S"]) -> Int[Array, "B K S"]:
    """Where each index stands in `order`."""
    index_BKS = jnp.broadcast_to(jnp.arange(order_BKS.shape[-1], dtype=jnp.int32), order_BKS.shape)
    return _permute(index_BKS, order_BKS)


def running_cutoff(
    rank_BKS: Int[Array, "B K S"],
    start_BS: Int[Array, "B S"],
    stop_BS: Int[Array, "B S"],
    pool_BS: Int[Array, "B S"],
) -> Int[Array, "B K S"]:
    """The worst rank the pool holds at every query, of the tokens `[start, stop)` that compete there.

    Returns:
        The rank of the k-th best; S while the pool is not overfull (everything is kept), -1 where `k` is 0.
    """
    S = rank_BKS.shape[-1]
    cutoff_BKS = jnp.where(pool_BS[:, None] > 0, kth_rank(rank_BKS, start_BS, stop_BS, pool_BS), -1)
    return jnp.where((stop_BS - start_BS > pool_BS)[:, None], cutoff_BKS, S)


def kth_rank(
    rank_BKS: Int[Array, "B K S"],
    start_BS: Int[Array, "B S"],
    stop_BS: Int[Array, "B S"],
    k_BS: Int[Array, "B S"],
) -> Int[Array, "B K S"]:
    """The k-th smallest rank among the tokens `[start, stop)`, for every query at once.

    A wavelet matrix: the ranks are read bit by bit from the highest, the tokens stably parted by that bit, and every
    query follows the half that holds its k-th smallest: ceil(log2 S) rounds of cumulative sums and gathers, in O(S)
    memory.

    Args:
        rank_BKS: a permutation of 0..S-1 per row and head.
        start_BS, stop_BS: the range each query asks about.
        k_BS: from 1 to the size of the range; outside of that the result means nothing.
    """
    B, K, S = rank_BKS.shape
    left, right, k = (jnp.broadcast_to(x[:, None], (B, K, S)) for x in (start_BS, stop_BS, k_BS))
    bits = max(S - 1, 1).bit_length()

    def follow(i, carry):
        values, left, right, wanted, found = carry
        bit = bits - 1 - i
        high = (values >> bit) & 1
        # zeros_before[i]: how many of the first i tokens have this bit clear.
        zeros_before = jnp.pad(jnp.cumsum(1 - high, axis=-1), ((0, 0), (0, 0), (1, 0)))
        zeros = zeros_before[..., -1:]
        left_zeros, right_zeros = (jnp.take_along_axis(zeros_before, x, axis=-1) for x in (left, right))
        low_count = right_zeros - left_zeros
        goes_low = wanted < low_count
        lands = jnp.where(high == 0, zeros_before[..., :-1], zeros + jnp.arange(S) - zeros_before[..., :-1])
        return (
            _permute(values, lands),
            jnp.where(goes_low, left_zeros, zeros + left - left_zeros),
            jnp.where(goes_low, right_zeros, zeros + right - right_zeros),
            jnp.where(goes_low, wanted, wanted - low_count),
            jnp.where(goes_low, found, found | (1 << bit)),
        )

    # A loop, not unrolled: 14 rounds at S = 16k in every layer would dominate compilation.
    carry = (rank_BKS.astype(jnp.int32), left, right, k - 1, jnp.zeros((B, K, S), jnp.int32))
    return lax.fori_loop(0, bits, follow, carry)[-1]


def _permute(x_BKS, lands_BKS):
    """Moves every element to the index where it lands, a permutation."""
    scatter = jax.vmap(jax.vmap(lambda x_S, lands_S: jnp.zeros_like(x_S).at[lands_S].set(x_S, unique_indices=True)))
    return scatter(x_BKS, lands_BKS)


def _first_query_past(cutoff_BKS, rank_BKS, layout, window):
    """First query from `t + window` on, within the document, whose cutoff is better than the token's rank.

    The cutoff of a document only improves, so a binary search finds it; all tokens search together.
    """
    B, K, S = rank_BKS.shape
    index_S = jnp.arange(S)
    last_BS = segment_stop(layout.segment_BS)
    low = jnp.broadcast_to(jnp.minimum(index_S + window, last_BS)[:, None], (B, K, S))
    high = jnp.broadcast_to(last_BS[:, None], (B, K, S))

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        evicted = jnp.take_along_axis(cutoff_BKS, jnp.minimum(middle, S - 1), axis=-1) < rank_BKS
        open_ = low < high
        return jnp.where(open_ & ~evicted, middle + 1, low), jnp.where(open_ & evicted, middle, high)

    found, _ = lax.fori_loop(0, S.bit_length() + 1, halve, (low, high))
    return jnp.where(found >= last_BS[:, None], NEVER, found).astype(jnp.int32)


def eviction_mask(expiry_BKS: Int[Array, "B K S"], segment_BS: Int[Array, "B S"]) -> jax.Array:
    """The dense visibility `[B, K, T, S]` that an expiry stands for: for tests and pictures, never for a model."""
    t_S = jnp.arange(segment_BS.shape[1])
    q_T1 = t_S[:, None]
    same_BTS = (segment_BS[:, :, None] == segment_BS[:, None]) & (segment_BS[:, None] > 0)
    return (t_S <= q_T1) & (q_T1 < expiry_BKS[:, :, None]) & same_BTS[:, None]
