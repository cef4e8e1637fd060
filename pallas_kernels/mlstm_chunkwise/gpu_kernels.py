"""The kernels of `gpu`, in Pallas Mosaic GPU: what happens within a chunk of one head.

Products are of float32 numbers, in pieces of bfloat16 (`bf16_pieces`). Each of a thread block's two warpgroups has half
of the chunk's rows. The row operand of a product is in registers, the other one in shared memory, loaded, split and
stored by both warpgroups and read by both. A thread block fills a multiprocessor's shared memory, so loads wait for
nothing but each other.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.bf16_pieces import PIECES, pairs, split

KEY_DIM, VALUE_DIM = 64, 128  # X and Y: of the scorer of a model with heads of 128
_ROWS = 64  # of a wgmma
CHUNK = 2 * _ROWS
FORWARDS, BACKWARDS = 1, -1
"""In time: which way columns lie that a row sees."""
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_WGMMA = plgpu.Layout.WGMMA
_COLUMN, _ROW = _WGMMA.reduce(1), _WGMMA.reduce(0)  # one value for each row, each column

_COARSE, _FINE, _OF_ROW, _OF_COLUMN, _RUN, _MEMORY, _ROW_ONE, _COLUMN_ONE = range(8)


def gates(b_BKnL, row_BKnL, column_BKnL, run_BnL, memory_BKnL, row_one_BKnL=0.0, column_one_BKnL=0.0):
    """What the kernels read of gates, [B, K, n, 8, L].

    In row r, column c of the same run weighs exp(row_r + column_c - |b_r - b_c|), and the chunk's memory memory_r.
    The ones are what `to_keys` has beside the values of rows and of columns.
    """
    run_BKnL = jnp.broadcast_to(run_BnL[:, None].astype(jnp.float32), row_BKnL.shape)
    ones = (jnp.broadcast_to(one, row_BKnL.shape) for one in (row_one_BKnL, column_one_BKnL))
    return jnp.stack([b_BKnL.coarse, b_BKnL.fine, row_BKnL, column_BKnL, run_BKnL, memory_BKnL, *ones], axis=3)


@jax.jit  # lowering takes seconds: once for all layers of a model, not once for each
def outer_products(a_BSKX, b_BSKY, matrix_weight_BKnL, vector_weight_BKnL):
    """Of every chunk, the weighted sums of a b^T and of a: [B, K, n, X, Y] and [B, K, n, X]."""
    B, S, K, _ = a_BSKX.shape
    shape, f32 = (B, K, S // CHUNK, KEY_DIM), jnp.float32
    pieces = plgpu.SMEM((PIECES, CHUNK, _ROWS), jnp.bfloat16, transforms=_TILED)
    with jax.enable_x64(False):  # else the kernel's indices are of 64 bits, which Mosaic GPU does not take
        return plgpu.kernel(
            _outer_products_kernel,
            out_type=(jax.ShapeDtypeStruct((*shape, VALUE_DIM), f32), jax.ShapeDtypeStruct(shape, f32)),
            scratch_types=dict(a_smem=pieces, b_smem=pieces, vector_smem=plgpu.SMEM((KEY_DIM,), f32)),
            grid=(VALUE_DIM // _ROWS, S // CHUNK, B * K),
            grid_names=("columns", "chunk", "row"),
            kernel_name="mlstm_chunkwise_outer_products",
        )(a_BSKX, b_BSKY, jnp.stack([matrix_weight_BKnL, vector_weight_BKnL], axis=3))


def _outer_products_kernel(a_ref, b_ref, weights_ref, matrix_ref, vector_ref, *, a_smem, b_smem, vector_smem):
    batch, head, chunk = _place(a_ref.shape[2])
    columns = _half(lax.axis_index("columns"))
    halves = [pl.ds(half * _ROWS, _ROWS) for half in range(2)]
    rows = [_rows(chunk, half) for half in range(2)]
    # All in flight together.
    a_hRX = [_load(a_ref.at[batch, row, head]) for row in rows]
    b_hRC = [_load(b_ref.at[batch, row, head, columns]) for row in rows]
    matrix_hR, vector_hR = (
        [_load(weights_ref.at[batch, head, chunk, kind, half], _COLUMN) for half in halves] for kind in range(2)
    )
    for a_RX, b_RC, weight_R, half in zip(a_hRX, b_hRC, matrix_hR, halves, strict=True):
        _store(a_RX * _down(weight_R), a_smem, half)
        _store(b_RC, b_smem, half)
    first_RX, second_RX = (a_RX * _down(weight_R) for a_RX, weight_R in zip(a_hRX, vector_hR, strict=True))
    vector_smem[...] = (first_RX + second_RX).sum(axis=0)
    plgpu.commit_smem()

    def multiply(acc_ref):
        for a, b in pairs():
            plgpu.wgmma(acc_ref, a_smem.at[a].transpose((1, 0)), b_smem.at[b])
        return acc_ref[...]

    matrix_ref[batch, head, chunk, :, columns] = pl.run_scoped(multiply, plgpu.ACC((KEY_DIM, _ROWS), jnp.float32))

    @pl.when(lax.axis_index("columns") == 0)  # every block of the chunk has the same
    def _():
        plgpu.copy_smem_to_gmem(vector_smem, vector_ref.at[batch, head, chunk])
        plgpu.wait_smem_to_gmem(0)


@partial(jax.jit, static_argnums=6)
def to_values(a_BSKX, b_BSKX, e_BSKY, matrix_BKnXY, vector_BKnX, gates_BKn8L, direction):
    """sum_c (a_r . b_c) w_rc e_c + memory_r matrix^T a_r, [B, S, K, Y]; and, with 1 for e and `vector` for `matrix`, a
    number for each row, [B, K, n, L]."""
    B, S, K, _ = a_BSKX.shape
    out_type = (
        jax.ShapeDtypeStruct(e_BSKY.shape, jnp.float32),
        jax.ShapeDtypeStruct((B, K, S // CHUNK, CHUNK), jnp.float32),
    )
    kernel = partial(_to_values_kernel, direction=direction)
    scratch = dict(total_smem=plgpu.SMEM((2, _ROWS), jnp.float32))
    return _call(kernel, out_type, scratch, a_BSKX, b_BSKX, e_BSKY, matrix_BKnXY, vector_BKnX, gates_BKn8L)


def _to_values_kernel(
    a_ref, b_ref, e_ref, matrix_ref, vector_ref, gates_ref, out_ref, total_ref, *,
    b_smem, e_smem, matrix_smem, staged, total_smem, direction,
):  # fmt: skip
    here, of_chunk, wg = _own(a_ref.shape[2])
    a_RX = _load(a_ref.at[here])
    _stage((b_ref.at[here], e_ref.at[here], matrix_ref.at[of_chunk]), (b_smem, e_smem, matrix_smem), staged)
    a, rows = split(a_RX), _Rows(gates_ref.at[of_chunk], wg, direction)
    vector_X = _load(vector_ref.at[of_chunk], _ROW)
    out_RY = _plus(_zeros(VALUE_DIM), a, lambda p: matrix_smem.at[p]) * _down(rows.memory_R, VALUE_DIM)
    total_R = rows.memory_R * (a_RX * _across(vector_X)).sum(axis=1)

    def tile(column, carry):
        out_RY, total_R = carry
        s_RC = _plus(_zeros(_ROWS), a, lambda p: b_smem.at[p, column].transpose((1, 0)))
        s_RC *= rows.weights(column)
        out_RY = _plus(out_RY, split(s_RC), lambda p: e_smem.at[p, column])
        return out_RY, total_R + s_RC.sum(axis=1)

    out_ref[here], total_smem[wg] = rows.over_columns(tile, (out_RY, total_R))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(total_smem.at[wg], total_ref.at[*of_chunk, _half(wg)])
    plgpu.wait_smem_to_gmem(0)


@partial(jax.jit, static_argnums=6)
def to_keys(a_BSKY, b_BSKY, e_BSKX, matrix_BKnXY, vector_BKnX, gates_BKn8L, direction):
    """sum_c (a_r . b_c + ones_r ones_c) w_rc e_c + memory_r (matrix a_r + ones_r vector), [B, S, K, X]."""
    out_type = jax.ShapeDtypeStruct(e_BSKX.shape, jnp.float32)
    kernel = partial(_to_keys_kernel, direction=direction)
    return _call(kernel, out_type, {}, a_BSKY, b_BSKY, e_BSKX, matrix_BKnXY, vector_BKnX, gates_BKn8L)


def _to_keys_kernel(
    a_ref, b_ref, e_ref, matrix_ref, vector_ref, gates_ref, out_ref, *,
    b_smem, e_smem, matrix_smem, staged, direction,
):  # fmt: skip
    here, of_chunk, wg = _own(a_ref.shape[2])
    a_RY = _load(a_ref.at[here])
    _stage((b_ref.at[here], e_ref.at[here], matrix_ref.at[of_chunk]), (b_smem, e_smem, matrix_smem), staged)
    a, rows = split(a_RY), _Rows(gates_ref.at[of_chunk], wg, direction)
    out_RX = _down(rows.ones_R) * _across(_load(vector_ref.at[of_chunk], _ROW))
    out_RX = _plus(out_RX, a, lambda p: matrix_smem.at[p].transpose((1, 0))) * _down(rows.memory_R)

    def tile(column, out_RX):
        ones_RC = rows.ones(column)
        s_RC = _plus(ones_RC, a, lambda p: b_smem.at[p, column].transpose((1, 0)))
        s_RC *= rows.weights(column)
        return _plus(out_RX, split(s_RC), lambda p: e_smem.at[p, column])

    out_ref[here] = rows.over_columns(tile, out_RX)


def _call(kernel, out_type, scratch, a_BSKA, b_BSKA, e_BSKE, matrix_BKnXY, vector_BKnX, gates_BKn8L):
    """A thread block of two warpgroups for each chunk, head and row of the batch."""
    (B, S, K, A), E = b_BSKA.shape, e_BSKE.shape[-1]

    def pieces(*shape):
        return plgpu.SMEM((PIECES, *shape), jnp.bfloat16, transforms=_TILED)

    with jax.enable_x64(False):  # else the kernel's indices are of 64 bits, which Mosaic GPU does not take
        return plgpu.kernel(
            kernel,
            out_type=out_type,
            scratch_types=dict(
                b_smem=pieces(2, _ROWS, A),
                e_smem=pieces(2, _ROWS, E),
                matrix_smem=pieces(KEY_DIM, VALUE_DIM),
                staged=plgpu.Barrier(num_arrivals=2),
                **scratch,
            ),
            grid=(S // CHUNK, B * K),
            grid_names=("chunk", "row"),
            num_threads=2,
            thread_name="warpgroup",
            kernel_name=f"mlstm_chunkwise{kernel.func.__name__.removesuffix('_kernel')}",
        )(a_BSKA, b_BSKA, e_BSKE, matrix_BKnXY, vector_BKnX, gates_BKn8L)


def _place(heads):
    """Indices of a thread block: batch, head, chunk."""
    row = lax.axis_index("row")
    batch = lax.div(row, jnp.int32(heads))
    return batch, row - batch * heads, lax.axis_index("chunk")


def _own(heads):
    """Where a warpgroup's rows are in an array of all positions, where its chunk is, and which of the two it is."""
    batch, head, chunk = _place(heads)
    wg = lax.axis_index("warpgroup")
    return (batch, _rows(chunk, wg), head), (batch, head, chunk), wg


def _half(index):
    """One of two stretches of 64: the rows of a warpgroup in a chunk, the columns of a tile, half of the values."""
    return pl.ds(pl.multiple_of(index * _ROWS, _ROWS), _ROWS)


def _rows(chunk, half):
    return pl.ds(pl.multiple_of(chunk * CHUNK + half * _ROWS, _ROWS), _ROWS)


def _load(ref, layout=_WGMMA):
    return plgpu.load(ref, layout=layout, optimized=False)


def _stage(refs, smems, staged):
    """Brings a chunk's column operands and its memory into shared memory, in pieces: each warpgroup one half."""
    wg = lax.axis_index("warpgroup")
    (b_ref, e_ref, matrix_ref), (b_smem, e_smem, matrix_smem) = refs, smems
    half = _half(wg)
    loaded = _load(b_ref), _load(e_ref), _load(matrix_ref.at[:, half])  # all in flight together
    for smem, x in zip((b_smem, e_smem), loaded[:2], strict=True):
        _store(x, smem, wg)
    _store(loaded[2], matrix_smem, slice(None), half)
    plgpu.commit_smem()
    plgpu.barrier_arrive(staged)
    plgpu.barrier_wait(staged)


def _store(x, smem, *place):
    for p, piece in enumerate(split(x)):
        smem[p, *place] = piece


def _plus(x, a, b):
    """x + a b: pieces in registers, and piece p in shared memory, `b(p)`.

    (An interpreted GPU has no `run_state`, and no products of a register operand: its tests replace the function.)
    """

    def multiply(acc_ref):
        for i, j in pairs():
            plgpu.wgmma(acc_ref, a[i], b(j))

    return pl.run_state(multiply)(plgpu.ACC.init(x))


def _zeros(columns):
    return plgpu.layout_cast(jnp.zeros((_ROWS, columns), jnp.float32), _WGMMA)


class _Rows:
    """What gates make of the rows of a warpgroup, and of each tile of columns beside them.

    Attributes:
        memory_R, ones_R: as `gates` has them.
    """

    def __init__(self, gates_ref, wg, direction):
        self._gates_ref, self._wg, self._direction = gates_ref, wg, direction
        self._first, self._tiles = (0, wg + 1) if direction == FORWARDS else (wg, 2 - wg)
        self.memory_R, self.ones_R = self._of_rows(_MEMORY), self._of_rows(_ROW_ONE)
        self._coarse_R, self._fine_R, self._weight_R, self._run_R = map(self._of_rows, (_COARSE, _FINE, _OF_ROW, _RUN))

    def over_columns(self, tile, carry):
        """`tile`, of the index of a tile of columns and a carry, over those that the rows see."""
        return lax.fori_loop(jnp.int32(0), self._tiles, lambda i, carry: tile(self._first + i, carry), carry)

    def weights(self, column):
        coarse_C, fine_C, weight_C, run_C = (
            self._of_columns(kind, column) for kind in (_COARSE, _FINE, _OF_COLUMN, _RUN)
        )
        row_RC, column_RC = (
            tile * _ROWS + plgpu.broadcasted_iota(jnp.int32, (_ROWS, _ROWS), axis, layout=_WGMMA)
            for axis, tile in enumerate((self._wg, column))
        )
        seen_RC = (_down(self._run_R) == _across(run_C)) & (self._direction * (row_RC - column_RC) >= 0)
        between_RC = (_down(self._coarse_R) - _across(coarse_C)) + (_down(self._fine_R) - _across(fine_C))
        log_RC = self._direction * between_RC + _down(self._weight_R) + _across(weight_C)
        return jnp.exp(jnp.where(seen_RC, log_RC, -jnp.inf))

    def ones(self, column):
        return _down(self.ones_R) * _across(self._of_columns(_COLUMN_ONE, column))

    def _of_rows(self, kind):
        return _load(self._gates_ref.at[kind, _half(self._wg)], _COLUMN)

    def _of_columns(self, kind, column):
        return _load(self._gates_ref.at[kind, _half(column)], _ROW)


def _down(x_R, columns=_ROWS):
    return lax.broadcast_in_dim(x_R, (_ROWS, columns), [0])


def _across(x_C):
    return lax.broadcast_in_dim(x_C, (_ROWS, *x_C.shape), [1])
