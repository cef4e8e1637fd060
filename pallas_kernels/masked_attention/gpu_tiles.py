"""Inside the GPU kernels: where a thread block is, the tiles it visits, and the mask of one."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.masked_attention.gpu_chunks import KEYS, ROWS

LOG2_E = math.log2(math.e)
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
WGMMA = plgpu.Layout.WGMMA
LONG_AGO = -(1 << 30)
"""The position of every survivor, as far as causality asks."""


class Place(NamedTuple):
    """Indices of a thread block of a grid (pair or tile, head, chunk of a batch row)."""

    batch: jax.Array
    head: jax.Array
    chunk: jax.Array


def place(chunks: int) -> Place:
    batch_and_chunk = lax.axis_index("chunk")
    batch = lax.div(batch_and_chunk, jnp.int32(chunks))
    return Place(batch, lax.axis_index("head"), batch_and_chunk - batch * chunks)


class Span(NamedTuple):
    """The tiles of a pair of query blocks, see `gpu_chunks.query_spans`: survivors' first, then the chunk's own."""

    whole: jax.Array
    old: jax.Array
    first_own: jax.Array
    own_whole: jax.Array
    stop_own: jax.Array
    fits: jax.Array

    @property
    def total(self) -> jax.Array:
        return self.old + self.stop_own - self.first_own

    def own_tile(self, i) -> jax.Array:
        """Which of the chunk's own tiles step `i` visits, once survivors' tiles are done."""
        return i - self.old + self.first_own

    def unmasked(self, i) -> jax.Array:
        return (i < self.whole) | ((i >= self.old) & (i - self.old < self.own_whole))


def span_at(span_ref, index) -> Span:
    """Entry `index` of a flat table of spans."""
    return Span(*(span_ref[index * len(Span._fields) + field] for field in range(len(Span._fields))))


def masked(s, unmasked, query, key, end_smem, key_axis: int):
    """Scores of queries from position `query` on and keys from `key` on; -inf where a key is later or has ended."""
    along_keys = WGMMA.reduce(1 - key_axis)

    def mask(s):
        key_S = key + plgpu.broadcasted_iota(jnp.int32, end_smem.shape, 0, layout=along_keys)
        life_S = jnp.maximum(plgpu.load(end_smem, layout=along_keys) - key_S, 0)
        age = query + plgpu.broadcasted_iota(jnp.int32, s.shape, 1 - key_axis, layout=WGMMA)
        age -= lax.broadcast_in_dim(key_S, s.shape, [key_axis])
        # One comparison for both: without a sign, an age below 0 is above every life. Registers are short here.
        life = lax.broadcast_in_dim(life_S.astype(jnp.uint32), s.shape, [key_axis])
        return jnp.where(age.astype(jnp.uint32) < life, s, -jnp.inf)

    return lax.cond(unmasked, lambda s: s, mask, s)


def first_key(span: Span, i, first):
    """The position of the first key of step `i` of a chunk that starts at `first`."""
    return jnp.where(i < span.old, LONG_AGO, first + span.own_tile(i) * KEYS)


def plus_products(*terms):
    """x + a b for each (x, a, b) of the terms, summed where x is.

    `a` is a function: that of a later term runs while earlier products do. (An interpreted GPU has no `run_state`, and
    no products of a register operand: its tests replace this function.)
    """
    xs, _, _ = zip(*terms, strict=True)

    def multiply(acc_refs):
        for acc_ref, (_, a, b) in zip(acc_refs, terms, strict=True):
            plgpu.wgmma(acc_ref, a(), b)

    return pl.run_state(multiply)(tuple(plgpu.ACC.init(x) for x in xs))


def zeros(*shape: int):
    """In the layout of accumulators."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA if len(shape) == 2 else WGMMA.reduce(1))


def block_of(pair, wg, group: int):
    """Offset in the chunk, and head of the group, of the queries of one warpgroup of a pair."""
    unit = 2 * pair + wg
    block = lax.div(unit, jnp.int32(group))
    return block * ROWS, unit - block * group


class Keys(NamedTuple):
    """K, V and the ends of keys: in global memory, or one stage of each in shared memory."""

    k: jax.Array
    v: jax.Array
    end: jax.Array


class Ring(NamedTuple):
    """Barriers of the stages of `Keys` in shared memory."""

    k_loaded: jax.Array
    v_loaded: jax.Array
    k_used: jax.Array
    v_used: jax.Array


def load_tiles(span: Span, at: Place, own: Keys, old: Keys, chunks: int, smem: Keys, ring: Ring) -> None:
    """What the third warpgroup does: loads the tiles of a span in their order, as stages become free."""
    stages = smem.k.shape[0]
    first, first_old = at.chunk * (own.k.shape[1] // chunks), at.chunk * (old.k.shape[2] // chunks)

    @pl.loop(0, span.total)
    def _tile(i):
        stage = lax.rem(i, jnp.int32(stages))
        again = i >= stages

        def load(k, v, end):
            pl.when(again)(lambda: plgpu.barrier_wait(ring.k_used.at[stage]))
            plgpu.copy_gmem_to_smem(k, smem.k.at[stage], ring.k_loaded.at[stage])
            plgpu.copy_gmem_to_smem(end, smem.end.at[stage], ring.k_loaded.at[stage])
            pl.when(again)(lambda: plgpu.barrier_wait(ring.v_used.at[stage]))
            plgpu.copy_gmem_to_smem(v, smem.v.at[stage], ring.v_loaded.at[stage])

        @pl.when(i < span.old)
        def _survivors():
            here = at.batch, at.head, pl.ds(pl.multiple_of(first_old + i * KEYS, KEYS), KEYS)
            load(*(ref.at[here] for ref in old))

        @pl.when(i >= span.old)
        def _own():
            rows = pl.ds(pl.multiple_of(first + span.own_tile(i) * KEYS, KEYS), KEYS)
            of_head = at.batch, rows, at.head
            load(own.k.at[of_head], own.v.at[of_head], own.end.at[at.batch, at.head, rows])
