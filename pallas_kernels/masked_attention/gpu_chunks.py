"""How the GPU kernels see a row: chunks of queries, the keys that outlive each chunk's start, and the tiles they visit.

A chunk of L queries sees two lists of keys: its own L, which lie in K and V side by side, and its *survivors*, at most
C older keys, whose rows are gathered. Survivors are sorted by their end, latest first. The tiles that a block of
queries sees are then the first so many, and of those the first so many are seen by all of its queries: they need no
mask at all. A whole row is one chunk with no survivors (one tile of empty places), so that there is one set of kernels.

Everything here is XLA. Memory is S (C / L + 1) rows of K and V.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

KEYS = 128
"""Keys of a tile: what one step of a kernel loads."""
ROWS = 64
"""Queries of a block, all of one head: the rows that a warpgroup multiplies."""
_CHUNKS_A_TURN = 4
"""Whose rows one turn of a loop adds: beside a scatter of ten microseconds a turn's other launches count."""
_ALL_AT_ONCE = 1 << 25
"""Entries of the table of chunks by keys that are made at once, while survivors are looked for."""


class Survivors(NamedTuple):
    """Keys before each chunk that its queries may still see, latest end first.

    Empty places come last: they end at 0 and their positions lie past the row, all different.
    """

    position_BKnC: Int[Array, "B K n C"]
    end_BKnC: Int[Array, "B K n C"]
    fits_BKn: Bool[Array, "B K n"]
    """Whether there was room for all of them."""


def survivors(end_BKS: Int[Array, "B K S"], chunk: int, capacity: int) -> Survivors:
    """Those of every chunk of a row whose length is a multiple of `chunk`; `capacity` is rounded up to whole tiles."""
    B, K, S = end_BKS.shape
    C = round_up(capacity, KEYS)
    if chunk == S:
        # Nothing precedes the only chunk: no need to sort.
        position_BKnC = jnp.broadcast_to(S + jnp.arange(C, dtype=jnp.int32), (B, K, 1, C))
        return Survivors(position_BKnC, jnp.zeros_like(position_BKnC), jnp.ones((B, K, 1), bool))
    position_BKS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), end_BKS.shape)
    # One sort for all chunks: of what is alive at a chunk's start, the order is the same.
    earliest_BKS, position_BKS = lax.sort((-end_BKS, position_BKS), num_keys=1, is_stable=False)

    def at(first):
        alive_BKS = (position_BKS < first) & (-earliest_BKS > first)
        place_BKS = jnp.cumsum(alive_BKS, axis=-1, dtype=jnp.int32) - 1
        # Places past the last one are dropped.
        place_BKS = jnp.where(alive_BKS, place_BKS, C + position_BKS)
        return jax.vmap(jax.vmap(put))(position_BKS, place_BKS), alive_BKS.sum(-1) <= capacity

    def put(position_S, place_S):
        empty_C = S + jnp.arange(C, dtype=jnp.int32)
        return empty_C.at[place_S].set(position_S, mode="drop", unique_indices=True)

    firsts_n = jnp.arange(0, S, chunk, dtype=jnp.int32)
    position_nBKC, fits_nBK = lax.map(at, firsts_n, batch_size=max(1, _ALL_AT_ONCE // end_BKS.size))
    position_BKnC, fits_BKn = jnp.moveaxis(position_nBKC, 0, 2), jnp.moveaxis(fits_nBK, 0, 2)
    take = jax.vmap(jax.vmap(lambda end_S, at_nC: end_S.at[at_nC].get(mode="fill", fill_value=0)))
    return Survivors(position_BKnC, take(end_BKS, position_BKnC), fits_BKn)


def gathered(x_BSKD: Float[Array, "B S K D"], old: Survivors) -> Float[Array, "B K N D"]:
    """Rows of the survivors of all chunks, N = n C; empty places repeat some row: nothing sees them."""
    B, S, K, D = x_BSKD.shape
    row_BKN = _rows(old, K, jnp.minimum(old.position_BKnC, S - 1))
    return jax.vmap(lambda x_MD, row_KN: x_MD.at[row_KN].get(mode="promise_in_bounds"))(
        x_BSKD.reshape(B, S * K, D), row_BKN
    )


def scattered(own: Sequence[Float[Array, "B S K D"]], of_old: Sequence[Float[Array, "B K N D"]], old: Survivors):
    """Each of `own` plus the rows of all chunks where they belong, chunk by chunk, so that sums have one order."""
    B, S, K, D = own[0].shape
    n, C = old.position_BKnC.shape[2:]
    row_BKnC = _rows(old, K, old.position_BKnC).reshape(B, K, n, C)
    of_chunks = [x_BKND.reshape(B, K, n, C, D) for x_BKND in of_old]
    put = jax.vmap(lambda total_MD, row_N, x_ND: total_MD.at[row_N].add(x_ND, mode="drop", unique_indices=True))

    def add(totals, chunk):
        # Sliced here: scanned over, all chunks would be copied to lie first.
        row_BKC, *rows = (lax.dynamic_index_in_dim(x, chunk, 2, keepdims=False) for x in (row_BKnC, *of_chunks))
        row_BN = row_BKC.reshape(B, K * C)
        return [
            put(total_BMD, row_BN, x_BKCD.reshape(B, K * C, D)) for total_BMD, x_BKCD in zip(totals, rows, strict=True)
        ], None

    totals = [x_BSKD.reshape(B, S * K, D) for x_BSKD in own]
    totals, _ = lax.scan(add, totals, jnp.arange(n), unroll=min(n, _CHUNKS_A_TURN))
    return [total_BMD.reshape(B, S, K, D) for total_BMD in totals]


def query_spans(end_BKS: Int[Array, "B K S"], old: Survivors, chunk: int, group: int) -> Int[Array, "B K n I 6"]:
    """Which tiles each pair of query blocks visits, as counts.

    Pairs are consecutive blocks in the order (position, head of the group). For each: survivors' tiles that every query
    sees whole, survivors' tiles that any query sees, first own tile that any sees, own tiles from the chunk's start
    that all see whole, and own tiles up to the diagonal; and whether the survivors had room.
    """
    B, K, S = end_BKS.shape
    n, C = old.end_BKnC.shape[2:]
    pair_I = jnp.arange(chunk // ROWS * group // 2, dtype=jnp.int32)
    lower_I, upper_I = 2 * pair_I // group * ROWS, ((2 * pair_I + 1) // group + 1) * ROWS  # of its queries
    first_n1 = jnp.arange(0, S, chunk, dtype=jnp.int32)[:, None]
    earliest_nI, latest_nI = (first_n1 + x_I for x_I in (lower_I, upper_I - 1))
    old_BKnjC = old.end_BKnC.reshape(B, K, n, C // KEYS, KEYS)
    own_BKnjL = end_BKS.reshape(B, K, n, chunk // KEYS, KEYS)

    def count(reached_BKnIj):
        return reached_BKnIj.sum(-1, dtype=jnp.int32)

    def leading(reached_BKnIj):
        tiles = reached_BKnIj.shape[-1]
        return jnp.where(reached_BKnIj, tiles, jnp.arange(tiles, dtype=jnp.int32)).min(-1)

    def last(x_BKnjC):
        return x_BKnjC.max(-1)[:, :, :, None]

    def least(x_BKnjC):
        return x_BKnjC.min(-1)[:, :, :, None]

    whole_BKnI = count(least(old_BKnjC) > latest_nI[..., None])
    some_BKnI = count(last(old_BKnjC) > earliest_nI[..., None])
    gone_BKnI = leading(last(own_BKnjL) <= earliest_nI[..., None])
    own_BKnI = jnp.minimum(leading(least(own_BKnjL) > latest_nI[..., None]), (lower_I + 1) // KEYS)
    stop_BKnI = jnp.broadcast_to(-(-upper_I // KEYS), whole_BKnI.shape)
    fits_BKnI = jnp.broadcast_to(old.fits_BKn[..., None], whole_BKnI.shape).astype(jnp.int32)
    return jnp.stack([whole_BKnI, some_BKnI, jnp.minimum(gone_BKnI, stop_BKnI), own_BKnI, stop_BKnI, fits_BKnI], -1)


def key_spans(end_BKS: Int[Array, "B K S"], old: Survivors, chunk: int) -> Int[Array, "B K n J 4"]:
    """Blocks of queries for each tile of survivors, then of own keys, as half-open spans of the chunk's blocks.

    First those that see any of its keys, then those that see all of them.
    """
    B, K, S = end_BKS.shape
    n, C = old.end_BKnC.shape[2:]
    end_BKnC = jnp.concatenate([old.end_BKnC, end_BKS.reshape(B, K, n, chunk)], axis=-1)
    end_BKnJC = end_BKnC.reshape(B, K, n, -1, KEYS) - jnp.arange(0, S, chunk, dtype=jnp.int32)[:, None, None]
    own_J = jnp.arange(-(C // KEYS), chunk // KEYS, dtype=jnp.int32)
    first_J = jnp.maximum(own_J, 0) * (KEYS // ROWS)
    whole_J = jnp.maximum(own_J + 1, 0) * (KEYS // ROWS)
    stop_BKnJ = -(-jnp.clip(end_BKnJC.max(-1), 0, chunk) // ROWS)
    stop_whole_BKnJ = jnp.clip(end_BKnJC.min(-1), 0, chunk) // ROWS
    spans = first_J, stop_BKnJ, whole_J, stop_whole_BKnJ
    return jnp.stack([jnp.broadcast_to(x, stop_BKnJ.shape) for x in spans], axis=-1)


def _rows(old: Survivors, K: int, position_BKnC):
    """Which row of [S * K, D] each place is."""
    row_BKnC = position_BKnC * K + jnp.arange(K, dtype=jnp.int32)[:, None, None]
    return row_BKnC.reshape(*row_BKnC.shape[:2], -1)


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
