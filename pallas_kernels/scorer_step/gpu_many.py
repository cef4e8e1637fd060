"""The products of `scorer_step` for many rows: the tensor cores, with the maps' columns along their rows.

A thread block has 64 columns of one map of a KV head, and eight rows of the batch: the narrowest tile of a wgmma. Maps
are in pieces (`bf16_pieces`); cached keys and values are bfloat16 already. Rows past the last one are that one again.
The halves of the features, keys and values, are multiplied as they are cached and brought to unit size after.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.bf16_pieces import PIECES, pairs, split
from pallas_kernels.scorer_step.weights import ROOT_EPSILON

_L = 64  # columns of a block, and inputs of a tile
_W = 8  # rows of a block
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_WGMMA = plgpu.Layout.WGMMA
_COLUMN, _ROW = _WGMMA.reduce(1), _WGMMA.reduce(0)  # one value for each row, each column


def multiply(k_BKD, v_BKD, leaving, weights):
    """The memory's query [B, K, X], key [B, K, X] and value [B, K, Y] of every row and head."""
    B, K, D = k_BKD.shape
    X, Y = weights.q_KIX.shape[2], weights.v_KIY.shape[2]
    tiles, f32, bf16 = 2 * D // _L, jnp.float32, jnp.bfloat16
    of_row = 1 if all(x.dtype == bf16 for x in (k_BKD, v_BKD, leaving.k_BKCD, leaving.v_BKCD)) else PIECES
    return plgpu.kernel(
        _kernel,
        out_type=tuple(jax.ShapeDtypeStruct((B, K, n), f32) for n in (X, X, Y)),
        scratch_types=dict(
            map_smem=plgpu.SMEM((tiles, PIECES, _L, _L), bf16, transforms=_TILED),
            x_smem=plgpu.SMEM((tiles, of_row, _W, _L), bf16, transforms=_TILED),
            scale_smem=plgpu.SMEM((2, _W), f32),
            out_smem=plgpu.SMEM((_W, _L), f32),
        ),
        grid=((2 * X + Y) // _L, K, pl.cdiv(B, _W)),
        grid_names=("columns", "head", "rows"),
        kernel_name="scorer_step_multiply_many",
    )(
        k_BKD, v_BKD, leaving.arriving_B, leaving.k_BKCD, leaving.v_BKCD, leaving.position_BKC, leaving.ring_BKW,
        weights.q_KIX, weights.k_KIX, weights.v_KIY,
    )  # fmt: skip


def _kernel(
    k_ref, v_ref, arriving_ref, k_cache_ref, v_cache_ref, position_ref, ring_ref, q_map_ref, k_map_ref, v_map_ref,
    q_out_ref, k_out_ref, v_out_ref, *, map_smem, x_smem, scale_smem, out_smem,
):  # fmt: skip
    columns, head, first = lax.axis_index("columns"), lax.axis_index("head"), lax.axis_index("rows") * _W
    B, slots, window = k_ref.shape[0], position_ref.shape[2], ring_ref.shape[2]
    rows = [jnp.minimum(first + i, B - 1) for i in range(_W)]
    of_query, of_key = q_map_ref.shape[2] // _L, (q_map_ref.shape[2] + k_map_ref.shape[2]) // _L

    is_query, is_value = columns < of_query, columns >= of_key
    is_key = ~is_query & ~is_value
    stage = partial(_stage, head=head, map_smem=map_smem, x_smem=x_smem, scale_smem=scale_smem)

    @pl.when(is_query)
    def _leaving():
        arriving = [arriving_ref[row] for row in rows]
        ring = [ring_ref[row, head, lax.rem(p, jnp.int32(window))] for row, p in zip(rows, arriving, strict=True)]
        places = [(row, head, jnp.minimum(slot, slots - 1)) for row, slot in zip(rows, ring, strict=True)]
        held = [(p >= window) & (position_ref[place] == p - window) for p, place in zip(arriving, places, strict=True)]
        stage(q_map_ref, columns, [[cache.at[place] for place in places] for cache in (k_cache_ref, v_cache_ref)], held)

    token, all_held = [[ref.at[row, head] for row in rows] for ref in (k_ref, v_ref)], [first >= 0] * _W
    pl.when(is_key)(lambda: stage(k_map_ref, columns - of_query, token, all_held))
    pl.when(is_value)(lambda: stage(v_map_ref, columns - of_key, token, all_held))
    plgpu.commit_smem()
    tiles = map_smem.shape[0] // 2
    out_LW = sum(
        _product(map_smem, x_smem, range(half * tiles, (half + 1) * tiles))
        * lax.broadcast_in_dim(plgpu.load(scale_smem.at[half], layout=_ROW), (_L, _W), [1])
        for half in range(2)
    )
    column_LW = plgpu.broadcasted_iota(jnp.int32, (_L, _W), 1, layout=_WGMMA)
    for i in range(_W):
        out_smem[i] = jnp.where(column_LW == i, out_LW, 0.0).sum(axis=1)
    plgpu.commit_smem()

    def write(out_ref, columns):
        here = pl.ds(pl.multiple_of(columns * _L, _L), _L)
        for i, row in enumerate(rows):
            plgpu.copy_smem_to_gmem(out_smem.at[i], out_ref.at[row, head, here])

    pl.when(is_query)(lambda: write(q_out_ref, columns))
    pl.when(is_key)(lambda: write(k_out_ref, columns - of_query))
    pl.when(is_value)(lambda: write(v_out_ref, columns - of_key))
    plgpu.wait_smem_to_gmem(0)


def _stage(map_ref, columns, refs, held, *, head, map_smem, x_smem, scale_smem):
    """Brings 64 columns of a map, and rows of keys and of values as columns of tiles, into shared memory.

    And what brings each row to unit size, 0 where it is not held.
    """
    every = range(map_smem.shape[0])
    tiles = [pl.ds(t * _L, _L) for t in every]
    here = pl.ds(pl.multiple_of(columns * _L, _L), _L)
    # All in flight together.
    maps = [plgpu.load(map_ref.at[head, tile, here], layout=_WGMMA, optimized=False) for tile in tiles]
    x = [
        [plgpu.load(ref.at[tile], layout=_COLUMN, optimized=False) for ref in of_rows]
        for of_rows in refs
        for tile in tiles[: len(tiles) // 2]
    ]

    for t, tile_LL in enumerate(maps):
        for p, piece in enumerate(split(tile_LL)):
            map_smem[t, p] = piece
    column_LW = plgpu.broadcasted_iota(jnp.int32, (_L, _W), 1, layout=_WGMMA)
    column_W = plgpu.broadcasted_iota(jnp.int32, (_W,), 0, layout=_ROW)
    held_W = plgpu.layout_cast(jnp.zeros((_W,), jnp.float32), _ROW)
    for i, of_row in enumerate(held):
        held_W = jnp.where(column_W == i, of_row.astype(jnp.float32), held_W)
    none_LW = plgpu.layout_cast(jnp.zeros((_L, _W), jnp.float32), _WGMMA)
    squares = [none_LW, none_LW]
    for t, of_rows in enumerate(x):
        x_LW = none_LW
        for i, x_L in enumerate(of_rows):
            row_LW = lax.broadcast_in_dim(x_L.astype(jnp.float32), x_LW.shape, [0])
            x_LW = jnp.where(column_LW == i, row_LW, x_LW)
        for p, piece in enumerate(split(x_LW)[: x_smem.shape[1]]):  # all but the first of a bfloat16 row are 0
            x_smem.at[t, p].transpose((1, 0))[...] = piece
        half = 2 * t // len(x)
        squares[half] += x_LW * x_LW
    for half, square_LW in enumerate(squares):
        mean_W = square_LW.sum(axis=0) / (len(x) // 2 * _L)
        scale_smem[half] = held_W * lax.rsqrt(mean_W + ROOT_EPSILON)


def _product(map_smem, x_smem, tiles):
    def multiply(acc_ref):
        for a, b in pairs(map_smem.shape[1], x_smem.shape[1]):
            for t in tiles:
                plgpu.wgmma(acc_ref, map_smem.at[t, a].transpose((1, 0)), x_smem.at[t, b].transpose((1, 0)))
        return acc_ref[...]

    return pl.run_scoped(multiply, plgpu.ACC((_L, _W), jnp.float32))
