"""Static priorities to expiry, without a loop over positions (KVpop section 1.8).

Because a priority never changes and the competing set only grows, a token that k others outrank stays outranked: an
evicted token never returns, and "the first query at which k eligible tokens outrank t" says all there is to say. That
query comes `window` after the k-th of those that outrank t, counted in the order of the row, or after t itself.
"""

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from kvpop_jax.eviction.layout import TokenLayout, eligible_range, segment_stop
from pallas_kernels.masked_attention import NEVER

_SIGN = np.uint32(1 << 31)
_WORD = 32  # bits
_GROUP = 16  # words, a power of 2
_MOST_BLOCKS = 512, 2048  # of a row; its table is as many / _WORD times as long as the row
_LONGEST_COLUMN = 64  # that is summed: longer sums of pairs are along rows


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
    rank_BKS, token_BKS = ranks(priority_BKS)
    start_BS, _ = eligible_range(layout, window)
    start_BKS, pool_BKS, stop_BKS = (
        _of_tokens(x_BS, token_BKS) for x_BS in (start_BS, layout.pool_BS, segment_stop(layout.segment_BS))
    )
    kth_BKS = kth_of_those_before(token_BKS, rank_BKS, start_BKS, pool_BKS)
    # Without a pool nobody need outrank it. Where fewer than k do, the k-th lies past the document.
    leaves_BKS = window + jnp.where(pool_BKS > 0, jnp.maximum(kth_BKS, token_BKS), token_BKS)
    expiry_BKS = jnp.where(leaves_BKS < stop_BKS, leaves_BKS, NEVER)
    expiry_BKS = jnp.take_along_axis(expiry_BKS, rank_BKS, axis=-1)
    return jnp.where(layout.pinned_BS[:, None], NEVER, expiry_BKS).astype(jnp.int32)


def ranks(priority_BKS: Float[Array, "B K S"]) -> tuple[Int[Array, "B K S"], Int[Array, "B K S"]]:
    """Rank of every token in its row, 0 for the highest priority, and the token of every rank.

    Of equal priorities the older token ranks first. Compared in float32.
    """
    lowest_first_BKS = -priority_BKS.astype(jnp.float32)
    # As unsigned integers of the same order: GPU compilers take twice as long over a sort of floats.
    bits_BKS = lax.bitcast_convert_type(jnp.where(lowest_first_BKS == 0, 0, lowest_first_BKS), jnp.uint32)
    key_BKS = jnp.where(bits_BKS < _SIGN, bits_BKS | _SIGN, ~bits_BKS)
    index_BKS = lax.broadcasted_iota(jnp.int32, key_BKS.shape, 2)
    _, token_BKS = lax.sort((key_BKS, index_BKS), num_keys=1, is_stable=True)
    return inverse_permutation(token_BKS), token_BKS


def inverse_permutation(order_BKS: Int[Array, "B K S"]) -> Int[Array, "B K S"]:
    """Where each index stands in `order`."""
    index_BKS = jnp.broadcast_to(jnp.arange(order_BKS.shape[-1], dtype=jnp.int32), order_BKS.shape)
    scatter = jax.vmap(jax.vmap(lambda order_S, i_S: jnp.zeros_like(i_S).at[order_S].set(i_S, unique_indices=True)))
    return scatter(order_BKS, index_BKS)


def _of_tokens(x_BS, token_BKS):
    return jnp.take_along_axis(x_BS[:, None], token_BKS, axis=-1)


def kth_of_those_before(
    x_BKS: Int[Array, "B K S"],
    inverse_BKS: Int[Array, "B K S"],
    least_BKS: Int[Array, "B K S"],
    k_BKS: Int[Array, "B K S"],
) -> Int[Array, "B K S"]:
    """The k-th smallest of the entries before each index that are at least `least`, for all indices at once.

    The row is cut into blocks. For each block a bit map says which values came before it, 32 to a word, and a table how
    many of them lie before each word. Every index finds the word of its answer by bisection of the table, the entries
    of its own block counted beside, and the bit by bisection of the word.

    Args:
        x_BKS: a permutation of 0..S-1 per row and head.
        inverse_BKS: where each value is.
        least_BKS: from 0 to S.
        k_BKS: at least 1.

    Returns:
        The values; S or more where there are fewer than k. Memory: bit map and table, together at most 128 S.
    """
    S = x_BKS.shape[-1]
    L = _block_length(S)
    x_BKnL, least_BKnL, k_BKnL = (_blocks(y_BKS, L, S) for y_BKS in (x_BKS, least_BKS, k_BKS))
    inverse_bBKW = jnp.moveaxis(_blocks(inverse_BKS, _WORD, S), -1, 0)
    n, W = x_BKnL.shape[2], inverse_bBKW.shape[-1]
    start_n1 = L * jnp.arange(n)[:, None]
    # Bit by bit: as one sum over bits it is the better part of all the work on a GPU.
    bits_BKnW = (
        jnp.where(inverse_BKW[:, :, None] < start_n1, jnp.uint32(1 << b), jnp.uint32(0))
        for b, inverse_BKW in enumerate(inverse_bBKW)
    )
    map_BKnW = reduce(jnp.bitwise_or, bits_BKnW)
    in_word_BKnW = lax.population_count(map_BKnW).astype(jnp.int32)
    table_BKnW = _sums_before(in_word_BKnW)
    at_L = jnp.arange(L)
    # Every index of a block beside every entry; sums are over the entries, along columns (faster on CPUs) or rows.
    along = -2 if L <= _LONGEST_COLUMN else -1
    entry_BKnLL = jnp.expand_dims(x_BKnL, -3 - along)
    earlier_LL = jnp.expand_dims(at_L, -3 - along) < jnp.expand_dims(at_L, along)

    def at_word(array_BKnW, word_BKnL):
        return jnp.take_along_axis(array_BKnW, word_BKnL, axis=-1)

    def own_below(limit_BKnL):
        """How many entries of the block before each index are below the limit."""
        own_BKnLL = earlier_LL & (entry_BKnLL < jnp.expand_dims(limit_BKnL, along))
        # Unsigned, so that XLA leaves Triton alone: of signed sums it makes tiles too large for the registers.
        return jnp.sum(own_BKnLL, axis=along, dtype=jnp.uint32).astype(jnp.int32)

    def before(word_BKnL):
        """How many of the entries before each index lie before the word."""
        return at_word(table_BKnW, word_BKnL) + own_below(_WORD * word_BKnL)

    def inside(word_BKnL):
        """Which values of the word are among the entries before each index."""
        own_BKnLL = earlier_LL & (entry_BKnLL // _WORD == jnp.expand_dims(word_BKnL, along))
        return at_word(map_BKnW, word_BKnL) | _word(own_BKnLL, entry_BKnLL % _WORD, axis=along)

    least_word_BKnL = jnp.minimum(least_BKnL // _WORD, W - 1)
    low_BKnL = ~(jnp.uint32(2**32 - 1) << (least_BKnL % _WORD).astype(jnp.uint32))
    smaller_BKnL = lax.population_count(at_word(map_BKnW, least_word_BKnL) & low_BKnL).astype(jnp.int32)
    k_BKnL += at_word(table_BKnW, least_word_BKnL) + smaller_BKnL + own_below(least_BKnL)
    bits = (W - 1).bit_length()

    def descend(i, carry):
        word_BKnL, before_BKnL = carry
        further_BKnL = word_BKnL + (1 << (bits - 1 - i))
        there_BKnL = jnp.minimum(further_BKnL, W - 1)
        count_BKnL = before(there_BKnL)
        goes_BKnL = (further_BKnL < W) & (count_BKnL < k_BKnL)
        return jnp.where(goes_BKnL, there_BKnL, word_BKnL), jnp.where(goes_BKnL, count_BKnL, before_BKnL)

    # A loop, not unrolled: every layer has one, and compilation counts.
    nothing_BKnL = jnp.zeros(x_BKnL.shape, jnp.int32)
    word_BKnL, before_BKnL = lax.fori_loop(0, bits, descend, (nothing_BKnL, nothing_BKnL))
    bit_BKnL = _kth_set_bit(inside(word_BKnL), k_BKnL - before_BKnL)
    # At least S is nothing; but where S fills its last word, that word is looked through for it.
    kth_BKnL = jnp.where((bit_BKnL < _WORD) & (least_BKnL < S), _WORD * word_BKnL + bit_BKnL, S)
    return kth_BKnL.reshape(*kth_BKnL.shape[:2], -1)[..., :S]


def _block_length(S):
    """The shortest that makes few blocks; where that has too many pairs, the shortest that makes more."""
    few, many = (_WORD * -(-S // (_WORD * most)) for most in _MOST_BLOCKS)
    return few if few <= _LONGEST_COLUMN else max(many, _LONGEST_COLUMN)


def _sums_before(x):
    """For each entry of the last axis the sum of those before it.

    In groups, within which the sums double their reach: GPU compilers make slow passes of a plain running sum.
    """
    grouped = _blocks(x, _GROUP, 0)
    upto, reach = grouped, 1
    while reach < _GROUP:
        upto += jnp.pad(upto, [(0, 0)] * x.ndim + [(reach, 0)])[..., :_GROUP]
        reach *= 2
    whole = upto[..., -1]
    before = (jnp.cumsum(whole, axis=-1) - whole)[..., None] + upto - grouped
    return before.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]


def _blocks(x, length, filler):
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % length)], constant_values=filler)
    return padded.reshape(*x.shape[:-1], -1, length)


def _word(is_set, bit, axis):
    """Words of the bits that are set, each by one entry at most."""
    one = jnp.uint32(1) << bit.astype(jnp.uint32)
    return jnp.sum(jnp.where(is_set, one, jnp.uint32(0)), axis=axis, dtype=jnp.uint32)


def _kth_set_bit(word, k):
    """Index of the k-th set bit, counted from 1 and from the lowest; 32 where fewer are set."""
    up_to_b = jnp.uint32(2**32 - 1) >> jnp.arange(_WORD - 1, -1, -1, dtype=jnp.uint32)
    count_b = lax.population_count(word[..., None] & up_to_b).astype(k.dtype)
    return jnp.sum(count_b < k[..., None], axis=-1, dtype=k.dtype)
