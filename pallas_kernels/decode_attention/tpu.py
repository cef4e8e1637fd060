"""Pallas TPU `decode_attention`: every row of keys and values is read once, and one tile of each cache is written.

A cache row is one KV head of one batch row: its `C` slots and the `G` query heads that read them. The grid walks groups
of cache rows, then blocks of slots; the softmax is carried over the blocks in VMEM. A step holds `rows` cache rows of
`block` slots, so that many short rows make a step worth its overhead and one long row is cut into pieces.

The caches are aliased to the outputs, which stay in HBM. Their rows are tiled, so the new row can't be stored alone:
the tile that holds its slot is merged in VMEM and copied out in the step that has read it. Nothing reads that tile
again, so no read meets the write. The attention itself takes the new row from the arguments, never from the cache.
A last tile that reaches past the cache is there in HBM, whole. XLA's own layout of caches whose slots are no multiple
of `TILE` is another, though; they are copied on the way in and out.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

HEAD_DIMS = 64, 128, 256
LANES = 128
TILE = 8
"""Slots written at once: the rows of a tile in HBM, of two bytes or four, in caches of 8 slots or more."""
LARGEST_BLOCK_BYTES = 2**21
"""Of one cache; two caches, each double-buffered, make four of them."""
SMALLEST_BLOCK_BYTES = 2**18
STEPS = 16
"""Steps wanted for small problems: the first block is read with nothing to compute beside it."""
LARGEST_GROUP = 16
"""Cache rows in a step; the code for the writes is unrolled over them."""
MINUS_INFINITY = float("-inf")


def refuses(q_BHD, k_BKCD, v_BKCD, position_BKC, k_new_BKD, v_new_BKD, slot_BK, return_probabilities) -> str | None:
    """Why the kernel cannot take these arguments, in one line; None if it can."""
    D, dtypes = q_BHD.shape[-1], {jnp.dtype(array.dtype) for array in (q_BHD, k_BKCD, v_BKCD)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}:
        return f"takes float32 or bfloat16, the same for q, k and v, not {', '.join(sorted(map(str, dtypes)))}"
    if D not in HEAD_DIMS:
        return f"takes head dimensions {', '.join(map(str, HEAD_DIMS))}, not {D}"
    return None


def decode_attention(
    q_BHD: Float[Array, "B H D"],
    k_BKCD: Float[Array, "B K C D"],
    v_BKCD: Float[Array, "B K C D"],
    position_BKC: Int[Array, "B K C"],
    k_new_BKD: Float[Array, "B K D"],
    v_new_BKD: Float[Array, "B K D"],
    slot_BK: Int[Array, "B K"],
    return_probabilities: bool,
):
    """See `api.decode_attention`."""
    (B, H, D), (K, C) = q_BHD.shape, k_BKCD.shape[1:3]
    R, G, dtype = B * K, H // K, k_BKCD.dtype
    if C < TILE:
        # Arrays this small have smaller tiles; they are padded, which costs nothing worth counting.
        return _padded(q_BHD, k_BKCD, v_BKCD, position_BKC, k_new_BKD, v_new_BKD, slot_BK, return_probabilities)
    o_RGD, lse_RG1, k_RCD, v_RCD, *scores = _attend(
        slot_BK.reshape(R).astype(jnp.int32),
        q_BHD.reshape(R, G, D),
        position_BKC.reshape(R, 1, C).astype(jnp.int32),
        k_new_BKD.reshape(R, 1, D).astype(dtype),
        v_new_BKD.reshape(R, 1, D).astype(dtype),
        k_BKCD.reshape(R, C, D),
        v_BKCD.reshape(R, C, D),
        return_probabilities,
    )
    probabilities = None
    if return_probabilities:
        # A block of slots can't know the sum over all. XLA fuses this with what sums the probabilities anyway.
        finite_RG1 = jnp.where(jnp.isfinite(lse_RG1), lse_RG1, 0)
        probabilities = jnp.exp(scores[0] - finite_RG1).reshape(B, H, C)
    # JAX's TPU interpreter hands aliased outputs back padded to whole blocks. To the compiler the slice is nothing.
    k_RCD, v_RCD = (lax.slice_in_dim(rows_RCD, 0, C, axis=1) for rows_RCD in (k_RCD, v_RCD))
    caches = k_RCD.reshape(k_BKCD.shape), v_RCD.reshape(v_BKCD.shape)
    return o_RGD.reshape(B, H, D), lse_RG1.reshape(B, H), *caches, probabilities


def _padded(q_BHD, k_BKCD, v_BKCD, position_BKC, k_new_BKD, v_new_BKD, slot_BK, return_probabilities):
    """`decode_attention` with empty slots added up to a tile, none of which a slot out of range may hit."""
    C = k_BKCD.shape[2]
    more = (0, 0), (0, 0), (0, TILE - C)
    k_BKCD, v_BKCD = (jnp.pad(array, (*more, (0, 0))) for array in (k_BKCD, v_BKCD))
    position_BKC = jnp.pad(position_BKC, more, constant_values=-1)
    slot_BK = jnp.where(slot_BK < C, slot_BK, TILE)
    o_BHD, lse_BH, k_BKCD, v_BKCD, p_BHC = decode_attention(
        q_BHD, k_BKCD, v_BKCD, position_BKC, k_new_BKD, v_new_BKD, slot_BK, return_probabilities
    )
    return o_BHD, lse_BH, k_BKCD[:, :, :C], v_BKCD[:, :, :C], p_BHC if p_BHC is None else p_BHC[..., :C]


@dataclass(frozen=True)
class Blocks:
    """What a step takes of the cache: `rows` cache rows, `block` slots of each."""

    rows: int
    block: int


def choose_blocks(R: int, C: int, D: int, dtype) -> Blocks:
    """Steps near a sixteenth of the cache, between 1/4 and 2 MiB; whole rows where they fit."""
    dtype = jnp.dtype(dtype)
    slot_bytes = max(D, LANES) * dtype.itemsize
    wanted = min(max(R * C * slot_bytes // STEPS, SMALLEST_BLOCK_BYTES), LARGEST_BLOCK_BYTES)
    pieces = pl.cdiv(C * slot_bytes, wanted)
    block = pl.cdiv(pl.cdiv(C, pieces), LANES) * LANES
    most = min(LARGEST_GROUP, max(1, wanted // (block * slot_bytes))) if pieces == 1 else 1
    rows = next(rows for rows in range(most, 0, -1) if R % rows == 0)
    return Blocks(rows, block)


def _attend(slot_R, q_RGD, position_R1C, k_new_R1D, v_new_R1D, k_RCD, v_RCD, return_scores):
    (R, G, D), C = q_RGD.shape, k_RCD.shape[1]
    blocks = choose_blocks(R, C, D, k_RCD.dtype)
    rows, block = blocks.rows, blocks.block

    def along_rows(*shape):
        return pl.BlockSpec((rows, *shape), lambda r, c, slot_R: (r, 0, 0))

    cache = pl.BlockSpec((rows, block, D), lambda r, c, slot_R: (r, c, 0))
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    out_shape = [
        jax.ShapeDtypeStruct(q_RGD.shape, q_RGD.dtype),
        jax.ShapeDtypeStruct((R, G, 1), jnp.float32),
        jax.ShapeDtypeStruct(k_RCD.shape, k_RCD.dtype),
        jax.ShapeDtypeStruct(v_RCD.shape, v_RCD.dtype),
    ]
    out_specs = [along_rows(G, D), along_rows(G, 1), in_hbm, in_hbm]
    if return_scores:
        out_shape.append(jax.ShapeDtypeStruct((R, G, C), jnp.float32))
        out_specs.append(pl.BlockSpec((rows, G, block), lambda r, c, slot_R: (r, 0, c)))
    cache_bytes = 2 * k_RCD.size * k_RCD.dtype.itemsize
    return pl.pallas_call(
        partial(_kernel, blocks=blocks, C=C, return_scores=return_scores),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(R // rows, pl.cdiv(C, block)),
            in_specs=[
                along_rows(G, D),
                pl.BlockSpec((rows, 1, block), lambda r, c, slot_R: (r, 0, c)),
                along_rows(1, D),
                along_rows(1, D),
                cache,
                cache,
            ],
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.VMEM((rows, G, D), jnp.float32),
                pltpu.VMEM((rows, G, 1), jnp.float32),
                pltpu.VMEM((rows, G, 1), jnp.float32),
                pltpu.VMEM((2, rows, TILE, D), k_RCD.dtype),
                pltpu.SemaphoreType.DMA((2, rows)),
            ],
        ),
        out_shape=out_shape,
        input_output_aliases={5: 2, 6: 3},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * R * G * C * D,
            transcendentals=R * G * C,
            bytes_accessed=cache_bytes + 4 * R * C * (1 + G * return_scores) + 4 * q_RGD.size * q_RGD.dtype.itemsize,
        ),
        name="decode_attention",
    )(slot_R, q_RGD, position_R1C, k_new_R1D, v_new_R1D, k_RCD, v_RCD)


def _kernel(slot_R, q, position, k_new, v_new, k, v, *rest, blocks, C, return_scores):
    o, lse, k_out, v_out, *scores, acc, largest, total, tiles, semaphores = rest
    rows, block = blocks.rows, blocks.block
    r, c = pl.program_id(0), pl.program_id(1)

    @pl.when(c == 0)
    def _():
        acc[...] = jnp.zeros_like(acc)
        largest[...] = jnp.full_like(largest, MINUS_INFINITY)
        total[...] = jnp.zeros_like(total)

    writes = [_Write(slot_R[r * rows + i], r * rows + i, i, c, blocks, C) for i in range(rows)]
    for write in writes:
        write.start(((k_new, k, k_out), (v_new, v, v_out)), tiles, semaphores)

    q_rGD, k_rcD, v_rcD = q[...], k[...], v[...]
    left = C - c * block
    if C % block:
        # The last block reaches past the cache, into whatever lies there; 0 * NaN would be NaN.
        inside_c1 = lax.broadcasted_iota(jnp.int32, (block, 1), 0) < left
        v_rcD = jnp.where(inside_c1, v_rcD, 0)
    s_rGc = _dot(q_rGD, k_rcD, contract=(2, 2))
    new_rG1 = jnp.sum(q_rGD.astype(jnp.float32) * k_new[...].astype(jnp.float32), axis=-1, keepdims=True)
    column_1c = lax.broadcasted_iota(jnp.int32, (1, block), 1)
    # [rows, 1, block], true at the slot of the new row.
    written_r1c = jnp.stack([column_1c == write.place for write in writes])
    occupied_r1c = position[...] >= 0
    if C % block:
        occupied_r1c &= column_1c < left
    s_rGc = jnp.where(written_r1c, new_rG1, s_rGc) * q.shape[-1] ** -0.5
    s_rGc = jnp.where(occupied_r1c, s_rGc, MINUS_INFINITY)
    if return_scores:
        scores[0][...] = s_rGc

    before_rG1 = largest[...]
    after_rG1 = jnp.maximum(before_rG1, jnp.max(s_rGc, axis=-1, keepdims=True))
    # Rows that have seen no slot yet stay at -inf; they are shifted by 0, so that no -inf meets another.
    shift_rG1 = jnp.where(after_rG1 == MINUS_INFINITY, 0.0, after_rG1)
    p_rGc = jnp.exp(s_rGc - shift_rG1)
    kept_rG1 = jnp.exp(before_rG1 - shift_rG1)
    p_new_rG1 = jnp.sum(jnp.where(written_r1c, p_rGc, 0.0), axis=-1, keepdims=True)
    read_rGD = _dot(jnp.where(written_r1c, 0.0, p_rGc).astype(v.dtype), v_rcD, contract=(2, 1))
    largest[...] = after_rG1
    total[...] = kept_rG1 * total[...] + jnp.sum(p_rGc, axis=-1, keepdims=True)
    acc[...] = kept_rG1 * acc[...] + read_rGD + p_new_rG1 * v_new[...].astype(jnp.float32)

    for write in writes:
        write.wait((k_out, v_out), tiles, semaphores)

    @pl.when(c == pl.num_programs(1) - 1)
    def _():
        total_rG1 = total[...]
        empty_rG1 = total_rG1 == 0.0
        o[...] = (acc[...] / jnp.where(empty_rG1, 1.0, total_rG1)).astype(o.dtype)
        lse[...] = jnp.where(empty_rG1, MINUS_INFINITY, jnp.log(total_rG1) + largest[...])


class _Write:
    """The new row of one cache row on its way to its slot, if the slot lies in the block at hand."""

    def __init__(self, slot, row, i, c, blocks, C):
        self.row, self.i, self.blocks, self.C = row, i, blocks, C
        self.place = slot - c * blocks.block  # in the block
        self.here = (self.place >= 0) & (self.place < blocks.block) & (slot < C)
        self.start_of_tile = slot // TILE * TILE

    def start(self, caches, tiles, semaphores):
        @pl.when(self.here)
        def _():
            first = self.place // TILE * TILE
            is_new_t1 = lax.broadcasted_iota(jnp.int32, (TILE, 1), 0) == self.place - first
            for which, (new, rows, _out) in enumerate(caches):
                old_tD = rows[self.i, pl.ds(pl.multiple_of(first, TILE), TILE), :]
                tiles[which, self.i] = jnp.where(is_new_t1, new[self.i], old_tD)
            for copy in self._copies([out for _, _, out in caches], tiles, semaphores):
                copy.start()

    def wait(self, outs, tiles, semaphores):
        @pl.when(self.here)
        def _():
            for copy in self._copies(outs, tiles, semaphores):
                copy.wait()

    def _copies(self, outs, tiles, semaphores):
        at = pl.ds(pl.multiple_of(self.start_of_tile, TILE), TILE)
        return [
            pltpu.make_async_copy(tiles.at[which, self.i], out.at[self.row, at, :], semaphores.at[which, self.i])
            for which, out in enumerate(outs)
        ]


def _dot(a, b, contract):
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((0,), (0,))),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT,
    )
