"""Which blocks of queries and keys a kernel visits, what that costs, and which form of the operation costs least.

The kernels know one predicate. With S key slots for T query rows and `old = S - T`,

    row r sees slot j   iff   j - old <= r   and   r < life[j]

that is, causal attention of the last T positions, in which every key carries the first row that no longer sees it. A
plain sequence is `old = 0` with `life = expiry`; a chunk of it is `old = capacity` survivors followed by the chunk.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels.tpu_tiles import LANES, round_up

CHUNKS = (256, 512, 1024, 2048)
"""Lengths of a chunk that are considered."""

# A block of queries holds all query heads of its KV head, so that K and V are read once for the group.
_ROWS = 1024
_KEYS = 512
# Scalar memory holds a megabyte; one bound per block of keys stays far below it, at any length of the row.
_MAX_BOUNDS = 32768
# FLOPs that take as long as a byte of HBM: 240 on v5e, 166 on v5p, 560 on v6e, 312 on tpu7x.
_FLOPS_PER_BYTE = 300


@dataclass(frozen=True)
class Blocks:
    """The grid of one call, per batch row and KV head.

    Attributes:
        rows, slots: T and S, multiples of the blocks.
        q, k: queries (each with all its heads) and keys of a block.
        heads: B * K.
    """

    rows: int
    slots: int
    q: int
    k: int
    heads: int

    @property
    def old(self) -> int:
        """Slots that come before the first row."""
        return self.slots - self.rows

    @property
    def num_q(self) -> int:
        return self.rows // self.q

    @property
    def num_k(self) -> int:
        return self.slots // self.k

    @property
    def grain(self) -> int:
        """Blocks of keys that share a bound: more than one where bounds would crowd scalar memory."""
        return -(-self.num_k * self.heads // _MAX_BOUNDS)

    @property
    def num_bounds(self) -> int:
        return -(-self.num_k // self.grain)

    def bounds(self, life_BKS: Int[Array, "B K S"]) -> Int[Array, "N"]:
        """The largest life of every group of blocks, flat: what goes to scalar memory."""
        B, K, S = life_BKS.shape
        padded_BKS = jnp.pad(life_BKS, ((0, 0), (0, 0), (0, self.num_bounds * self.grain * self.k - S)))
        return padded_BKS.reshape(B * K * self.num_bounds, -1).max(-1)

    def bound(self, bounds_ref, head, j):
        """What `bounds` says of block `j` of keys."""
        return bounds_ref[head * self.num_bounds + j // self.grain]

    def diagonal(self, i):
        """The last block of keys that causality shows to block `i` of queries."""
        return ((i + 1) * self.q - 1 + self.old) // self.k

    def first_q(self, j):
        """The first block of queries to which causality shows block `j` of keys."""
        return jnp.maximum(j * self.k - self.old, 0) // self.q

    def visible(self, i, j, bound):
        """Whether any row of block `i` may see any slot of block `j`, whose lives are at most `bound`."""
        return (j <= self.diagonal(i)) & (bound > i * self.q)

    @property
    def causal_pairs(self) -> int:
        """Pairs of blocks that are left when nothing has expired: what a static cost can know."""
        return sum(min(int(self.diagonal(i)), self.num_k - 1) + 1 for i in range(self.num_q))

    def cost(self, group: int, head_dim: int, itemsize: int, *, matmuls: int, arrays: int) -> pl.CostEstimate:
        """For `matmuls` products per pair, `arrays` of q's size moved once, and K and V moved for every block of q."""
        pairs = self.heads * self.causal_pairs
        scores = pairs * self.q * self.k * group
        moved_q = self.heads * self.rows * group * (arrays * head_dim * itemsize + 8)
        moved_k = pairs * self.k * (2 * head_dim * itemsize + 4)
        return pl.CostEstimate(
            flops=2 * matmuls * scores * head_dim, transcendentals=scores, bytes_accessed=moved_q + moved_k
        )


def blocks_for(rows: int, old: int, group: int, heads: int) -> Blocks:
    """Block sizes for `rows` queries after `old` slots, both of which the caller then pads to what `Blocks` says."""
    q = _fitting(min(512, max(LANES, 1 << (_ROWS // group).bit_length() - 1)), rows)
    k = _fitting(_KEYS, rows, old)
    rows = round_up(rows, max(q, k))
    return Blocks(rows, round_up(old, k) + rows, q, k, heads)


def _fitting(block: int, *lengths: int) -> int:
    """The largest power of two up to `block` that pads by less than an eighth, but no less than a row of lanes."""
    while block > LANES and any(round_up(length, block) - length > length // 8 for length in lengths):
        block //= 2
    return block


def chosen_chunk(length: int, capacity: int | None, group: int, heads: int, head_dim: int, itemsize: int) -> int | None:
    """Queries per chunk of the cheapest compacted form, or None where the plain form is cheaper.

    The rule: time is FLOPs / peak + bytes / bandwidth at the ratio of a typical TPU. The plain form pays for all causal
    pairs, whatever has expired; the compacted one for `capacity` survivors and the chunk's own keys, and for
    gathering both. Without a capacity there is only the plain form.
    """
    best, chunk = _seconds(blocks_for(length, 0, group, heads), group, head_dim, itemsize), None
    if capacity is None:
        return None
    for candidate in (size for size in CHUNKS if size < length):
        blocks = blocks_for(candidate, capacity, group, heads)
        # Rows of k and v are read and written by the gather, then read by the kernel (which its own cost says).
        gathered = heads * blocks.slots * head_dim * itemsize * 4
        time = _seconds(blocks, group, head_dim, itemsize) + gathered * _FLOPS_PER_BYTE
        time *= -(-length // candidate)
        if time < best:
            best, chunk = time, candidate
    return chunk


def _seconds(blocks: Blocks, group: int, head_dim: int, itemsize: int) -> float:
    """In units of a FLOP."""
    cost = blocks.cost(group, head_dim, itemsize, matmuls=2, arrays=2)
    return cost.flops + cost.bytes_accessed * _FLOPS_PER_BYTE
