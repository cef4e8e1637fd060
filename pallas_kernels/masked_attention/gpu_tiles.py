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
_LONG_AGO = -(1 << 30)
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


def masked(s_QS, unmasked, query, key, end_smem):
    """Scores of queries from position `query` on; -inf where causality or the end of a key hides it."""

    def mask(s_QS):
        end_S = plgpu.load(end_smem, layout=WGMMA.reduce(0))
        query_QS = query + plgpu.broadcasted_iota(jnp.int32, s_QS.shape, 0, layout=WGMMA)
        key_QS = key + plgpu.broadcasted_iota(jnp.int32, s_QS.shape, 1, layout=WGMMA)
        seen_QS = (key_QS <= query_QS) & (query_QS < lax.broadcast_in_dim(end_S, s_QS.shape, [1]))
        return jnp.where(seen_QS, s_QS, -jnp.inf)

    return lax.cond(unmasked, lambda s_QS: s_QS, mask, s_QS)


def first_key(span: Span, i, first):
    """The position of the first key of step `i` of a chunk that starts at `first`."""
    return jnp.where(i < span.old, _LONG_AGO, first + span.own_tile(i) * KEYS)


def product(a, b):
    """a b in float32, at once; one of them, or both, in shared memory."""

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        return acc_ref[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def plus_product(x, a, b):
    """x + a b, summed where x is. (An interpreted GPU knows no `run_state`: tests replace this one function.)"""
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, a, b))(plgpu.ACC.init(x))


def zeros(*shape: int):
    """In the layout of accumulators."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA if len(shape) == 2 else WGMMA.reduce(1))


def block_of(pair, wg, group: int):
    """Offset in the chunk, and head of the group, of the queries of one warpgroup of a pair."""
    unit = 2 * pair + wg
    block = lax.div(unit, jnp.int32(group))
    return block * ROWS, unit - block * group
