"""`scorer_step` for Hopper GPUs, in Pallas Mosaic GPU: two kernels where XLA makes a dozen launches or two.

The first multiplies; the one here is for few rows, that of `gpu_many` for more. Its thread blocks are (slice, KV head,
rows): each has an eighth of the columns of the head's query, key and value map in registers, for up to four rows, so
that one row is spread over the card and several read the maps once. The gates read the layer's whole input, which is
cut into tiles of 64 among the same blocks; each leaves its share of all gates. The leaving token's rows are where the
ring says, three loads that wait for each other: the first two are under those of maps and gates, the last under the
work on the new token.

The second, a thread block for each row and head, adds up those shares and has the memory in registers once: it forgets,
writes, reads and ranks. Memory, normaliser and stabiliser are `Ref`s, which JAX lowers to aliased outputs.

Compilers move no load across a barrier, and every sum over threads has one. So where a load stands says what it waits
for: all others stand before the first sum of a row.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backend import mosaic_gpu_is_missing
from pallas_kernels.mlstm_chunkwise.reference import EPSILON
from pallas_kernels.mlstm_chunkwise.state import MLSTMState
from pallas_kernels.scorer_step import gpu_many
from pallas_kernels.scorer_step.weights import ROOT_EPSILON

_SLICES = 8  # of the columns of each map: at least 8 of 64 are left, which is a sector of memory
_FEW = 16  # rows of a batch: from where on its products take less on the tensor cores lies between this and 32
_ROWS = 4  # at most, of a thread block of the first kernel
_TILE = 64  # inputs of the gates that are read at once: the rows of a WGMMA tile
_LARGEST = 8192  # entries of a memory: 64 registers of each thread, and as many for what is added to it
_WGMMA = plgpu.Layout.WGMMA
_COLUMN, _ROW = _WGMMA.reduce(1), _WGMMA.reduce(0)  # one value for each row, each column


def refuses(weights, state, hidden_BE, k_BKD, v_BKD, leaving, soft_cap, decay_max) -> str | None:
    """See `backend.Backend`."""
    if missing := mosaic_gpu_is_missing():
        return missing
    if any(x.dtype != jnp.float32 for x in jax.tree.leaves((weights, state))):
        return "takes float32 weights and states only"
    tokens = hidden_BE, k_BKD, v_BKD, leaving.k_BKCD, leaving.v_BKCD
    if any(x.dtype not in (jnp.float32, jnp.bfloat16) for x in tokens):
        return "takes float32 and bfloat16 tokens only"
    if any(x.dtype != jnp.int32 for x in (leaving.arriving_B, leaving.position_BKC, leaving.ring_BKW)):
        return "takes int32 positions and rings only"
    D, (X, Y), E = k_BKD.shape[2], state.c_BKXY.shape[2:], hidden_BE.shape[1]
    if X % 64 or D % 128 or Y % 128 or E % _TILE:
        return f"takes key and hidden sizes in 64s, head and value sizes in 128s, not {X}, {E}, {D} and {Y}"
    if X * Y > _LARGEST:
        return f"holds memories of up to {_LARGEST:,} entries in registers, not {X} x {Y}"
    return None


@partial(jax.jit, static_argnums=(6, 7))  # lowering takes seconds: once for all layers of a model, not once for each
def scorer_step(weights, state, hidden_BE, k_BKD, v_BKD, leaving, soft_cap, decay_max):
    """See `api.scorer_step`."""
    K = state.c_BKXY.shape[1]
    # Columns of a tile come in eights.
    pad = -2 * K % 8
    gates_EG = jnp.pad(weights.gates_E2K.reshape(-1, 2 * K), ((0, 0), (0, pad)))
    bias_G = jnp.pad(weights.gate_bias_2K.reshape(-1), (0, pad))
    c_ref, n_ref, m_ref = (jax.new_ref(x) for x in (state.c_BKXY, state.n_BKX, state.m_BK))
    with jax.enable_x64(False):  # else the kernels' indices are of 64 bits, which Mosaic GPU does not take
        if hidden_BE.shape[0] <= _FEW:
            *written, shares_BPG = _multiply(hidden_BE, k_BKD, v_BKD, leaving, weights, gates_EG)
            shares = K * _SLICES
        else:
            written, shares_BPG = gpu_many.multiply(k_BKD, v_BKD, leaving, weights), _gates(hidden_BE, gates_EG)
            shares = _TILE
        memory = c_ref, n_ref, m_ref
        priority_BK = _remember(*memory, *written, shares_BPG, shares, bias_G, weights, leaving, soft_cap, decay_max)
    return MLSTMState(c_ref[...], n_ref[...], m_ref[...]), priority_BK


def _gates(hidden_BE, gates_EG):
    """As many shares of the gates [B, 64, G]: a product for each, and none of them waits to be added up."""
    hidden_BPE = hidden_BE.reshape(hidden_BE.shape[0], _TILE, -1).astype(jnp.float32)
    gates_PEG = gates_EG.reshape(_TILE, -1, gates_EG.shape[1])
    return jnp.einsum("BPE,PEG->BPG", hidden_BPE, gates_PEG, precision=lax.Precision.HIGHEST)


def _multiply(hidden_BE, k_BKD, v_BKD, leaving, weights, gates_EG):
    """The memory's query, key and value of every row and head, and shares of the gates [B, P, G] to be added up.

    P is a multiple of 64, a block's share stands at its number, and what is past the last block was never written.
    """
    B, K, _ = k_BKD.shape
    X, Y, G = weights.q_KIX.shape[2], weights.v_KIY.shape[2], gates_EG.shape[1]
    P = pl.cdiv(K * _SLICES, _TILE) * _TILE
    rows = next(n for n in range(_ROWS, 0, -1) if B % n == 0)
    f32 = jnp.float32
    return plgpu.kernel(
        partial(_multiply_kernel, rows=rows),
        out_type=tuple(jax.ShapeDtypeStruct(shape, f32) for shape in ((B, K, X), (B, K, X), (B, K, Y), (B, P, G))),
        scratch_types=[plgpu.SMEM((n,), f32) for n in (X // _SLICES, X // _SLICES, Y // _SLICES, G)],
        grid=(_SLICES, K, B // rows),
        grid_names=("slice", "head", "rows"),
        kernel_name="scorer_step_multiply",
    )(
        hidden_BE, k_BKD, v_BKD, leaving.arriving_B, leaving.k_BKCD, leaving.v_BKCD, leaving.position_BKC,
        leaving.ring_BKW, weights.q_KIX, weights.k_KIX, weights.v_KIY, gates_EG,
    )  # fmt: skip


def _multiply_kernel(
    hidden_ref, k_ref, v_ref, arriving_ref, k_cache_ref, v_cache_ref, position_ref, ring_ref, q_map_ref, k_map_ref,
    v_map_ref, gates_ref, q_out_ref, k_out_ref, v_out_ref, shares_ref, q_smem, k_smem, v_smem, gates_smem, *, rows,
):  # fmt: skip
    part, head, first = lax.axis_index("slice"), lax.axis_index("head"), lax.axis_index("rows") * rows
    blocks, block = k_ref.shape[1] * _SLICES, head * _SLICES + part
    D, slots, window = k_ref.shape[2], position_ref.shape[2], ring_ref.shape[2]
    E, G = gates_ref.shape

    def columns(width):
        return pl.ds(pl.multiple_of(part * width, 8), width)

    def half(map_ref, which):
        here = map_ref.at[head, pl.ds(which * D, D), columns(map_ref.shape[2] // _SLICES)]
        return plgpu.load(here, layout=_WGMMA, optimized=False)

    def product(x, of_map):
        return (_down(x[0], of_map[0]) + _down(x[1], of_map[1])).sum(axis=0)

    arriving = [arriving_ref[first + i] for i in range(rows)]
    q_map, k_map, v_map = ([half(ref, 0), half(ref, 1)] for ref in (q_map_ref, k_map_ref, v_map_ref))
    ring = [ring_ref[first + i, head, lax.rem(p, jnp.int32(window))] for i, p in enumerate(arriving)]

    for i in range(rows):
        row = first + i
        token = [_row(ref.at[row, head]) for ref in (k_ref, v_ref)]

        def tile(t, share_TG, row=row):
            here = pl.ds(pl.multiple_of((block + t * blocks) * _TILE, _TILE), _TILE)
            hidden_T = plgpu.load(hidden_ref.at[row, here], layout=_COLUMN, optimized=False).astype(jnp.float32)
            return share_TG + _down(hidden_T, plgpu.load(gates_ref.at[here], layout=_WGMMA, optimized=False))

        none_TG = plgpu.layout_cast(jnp.zeros((_TILE, G), jnp.float32), _WGMMA)
        tiles = pl.cdiv(jnp.maximum(E // _TILE - block, 0), blocks)
        gates_smem[...] = lax.fori_loop(jnp.int32(0), tiles, tile, none_TG).sum(axis=0)
        slot, leaving = jnp.minimum(ring[i], slots - 1), arriving[i] - window
        held = (leaving >= 0) & (position_ref[row, head, slot] == leaving)
        left = [_row(ref.at[row, head, slot]) for ref in (k_cache_ref, v_cache_ref)]
        x = [_unit_rms(half_row) for half_row in token]
        k_smem[...] = product(x, k_map)
        v_smem[...] = product(x, v_map)
        x = [_unit_rms(half_row) for half_row in left]
        q_smem[...] = jnp.where(jnp.broadcast_to(held, q_smem.shape), product(x, q_map), 0.0)
        plgpu.commit_smem()
        for smem, ref in ((q_smem, q_out_ref), (k_smem, k_out_ref), (v_smem, v_out_ref)):
            plgpu.copy_smem_to_gmem(smem, ref.at[row, head, columns(smem.shape[0])])
        plgpu.copy_smem_to_gmem(gates_smem, shares_ref.at[row, block])
        plgpu.wait_smem_to_gmem(0)


def _remember(
    c_ref, n_ref, m_ref, q_BKX, k_BKX, v_BKY, shares_BPG, shares, bias_G, weights, leaving, soft_cap, decay_max
):
    """Moves the memory on in place, and gives the leaving token's priority [B, K]. `shares` of P are there."""
    B, K, X = q_BKX.shape
    f32 = jnp.float32
    return plgpu.kernel(
        partial(
            _remember_kernel, shares=shares, window=leaving.ring_BKW.shape[2], soft_cap=soft_cap, decay_max=decay_max
        ),
        out_type=jax.ShapeDtypeStruct((B, K), f32),
        scratch_types=[plgpu.SMEM((n,), f32) for n in (bias_G.shape[0], bias_G.shape[0], X, 8, v_BKY.shape[2])],
        grid=(K, B),
        grid_names=("head", "row"),
        kernel_name="scorer_step_remember",
    )(
        c_ref, n_ref, m_ref, q_BKX, k_BKX, v_BKY, shares_BPG, bias_G, weights.out_KY, weights.out_bias_K,
        weights.log_decay_K, leaving.arriving_B,
    )  # fmt: skip


def _remember_kernel(
    c_ref, n_ref, m_ref, q_ref, k_ref, v_ref, shares_ref, bias_ref, out_ref, out_bias_ref, log_decay_ref, arriving_ref,
    priority_ref, input_smem, forget_smem, n_smem, norm_smem, h_smem, *, shares, window, soft_cap, decay_max,
):  # fmt: skip
    head, row = lax.axis_index("head"), lax.axis_index("row")
    (_, heads, X, Y), here = c_ref.shape, (row, head)
    scale = X**-0.5
    shares_PG = plgpu.load(shares_ref.at[row], layout=_WGMMA, optimized=False)
    bias_G = plgpu.load(bias_ref, layout=_ROW, optimized=False)
    m_before, out_Y = m_ref[here], out_ref[head]
    out_bias, log_decay, leaving = out_bias_ref[head], log_decay_ref[head], arriving_ref[row] - window
    n_X, q_X, k_X = (plgpu.load(ref.at[here], layout=_COLUMN, optimized=False) for ref in (n_ref, q_ref, k_ref))
    v_Y = plgpu.load(v_ref.at[here], layout=_ROW, optimized=False)
    c_XY = plgpu.load(c_ref.at[here], layout=_WGMMA, optimized=False)

    block_PG = plgpu.broadcasted_iota(jnp.int32, shares_PG.shape, 0, layout=_WGMMA)
    raw_G = jnp.where(block_PG < shares, shares_PG, 0.0).sum(axis=0) + bias_G
    gate_G = soft_cap * jnp.tanh(raw_G / soft_cap)
    input_smem[...] = gate_G
    forget_smem[...] = _log_sigmoid(gate_G)
    plgpu.commit_smem()
    log_input, log_kept = input_smem[head], forget_smem[heads + head] + m_before
    m = jnp.maximum(jnp.maximum(log_kept, log_input), 0.0)
    forget, write_X = jnp.exp(log_kept - m), k_X * jnp.exp(log_input - m)

    n_X = n_X * forget + write_X
    c_XY = c_XY * forget + _down(write_X, lax.broadcast_in_dim(v_Y, (X, Y), [1]))
    c_ref[here] = c_XY
    n_smem[...] = n_X
    # One number, as the narrowest tile there is: summed over the columns of the memory it would cost what `h` does.
    norm_smem[...] = lax.broadcast_in_dim(q_X * n_X, (X, 8), [0]).sum(axis=0) * scale
    h_smem[...] = _down(q_X, c_XY).sum(axis=0) * scale
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(n_smem, n_ref.at[here])
    h_Y = h_smem[...] / (jnp.maximum(jnp.abs(norm_smem[0]), jnp.exp(-m)) + EPSILON)
    m_ref[here] = m
    score = jnp.sum(h_Y * out_Y) * lax.rsqrt(jnp.sum(h_Y * h_Y) / Y + ROOT_EPSILON)
    age = jnp.minimum(jnp.exp(log_decay), decay_max) * leaving.astype(jnp.float32)
    priority_ref[here] = score + out_bias + age
    plgpu.wait_smem_to_gmem(0)


def _row(ref):
    """A row of a token in the layout that can be summed whole, and as one value for each row of a tile."""
    return ref[...], plgpu.load(ref, layout=_COLUMN, optimized=False)


def _unit_rms(row):
    """What `_row` loaded at unit root mean square, one value for each row of a tile."""
    x_D, column_D = (x.astype(jnp.float32) for x in row)
    return column_D * lax.rsqrt(jnp.sum(x_D * x_D) / x_D.shape[0] + ROOT_EPSILON)


def _down(x_X, matrix_XY):
    """Every row of a matrix by the entry of `x` that belongs to it."""
    return lax.broadcast_in_dim(x_X, matrix_XY.shape, [0]) * matrix_XY


def _log_sigmoid(x):
    # log1p(y) for y = exp(-|x|), without what rounding 1 + y loses.
    y = jnp.exp(-jnp.abs(x))
    whole = 1.0 + y
    return jnp.minimum(x, 0.0) - jnp.where(whole == 1.0, y, jnp.log(whole) * y / jnp.maximum(whole - 1.0, 1e-30))
