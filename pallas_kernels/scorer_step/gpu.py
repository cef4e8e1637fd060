"""`scorer_step` for Hopper GPUs, in Pallas Mosaic GPU: two kernels where XLA makes a dozen launches.

The first multiplies. Its thread blocks are (slice, KV head, rows): each has an eighth of the columns of the head's
query, key and value map in registers, for up to four rows of the batch, so that one row is spread over the card and a
batch reads the maps few times. The gates read the layer's whole input, which is cut into tiles of 64 among the same
blocks; each leaves its share of all gates.

The second, a thread block for each row and head, adds up those shares and has the memory in registers once: it forgets,
writes, reads and scores. Memory, normaliser and stabiliser are `Ref`s, which JAX lowers to aliased outputs.
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
from pallas_kernels.scorer_step.weights import ROOT_EPSILON

_SLICES = 8  # of the columns of each map: at least 8 of 64 are left, which is a sector of memory
_ROWS = 4  # of a thread block of the first kernel
_TILE = 64  # inputs of the gates that are read at once: the rows of a WGMMA tile
_LARGEST = 8192  # entries of a memory: 64 registers of each thread, and as many for what is added to it
_WGMMA = plgpu.Layout.WGMMA
_COLUMN, _ROW = _WGMMA.reduce(1), _WGMMA.reduce(0)  # one value for each row, each column


def refuses(weights, state, hidden_BE, k_BKD, v_BKD, leaving_k_BKD, leaving_v_BKD, soft_cap) -> str | None:
    """See `backend.Backend`."""
    if missing := mosaic_gpu_is_missing():
        return missing
    if any(x.dtype != jnp.float32 for x in jax.tree.leaves((weights, state))):
        return "takes float32 weights and states only"
    if any(x.dtype not in (jnp.float32, jnp.bfloat16) for x in (hidden_BE, k_BKD, v_BKD, leaving_k_BKD, leaving_v_BKD)):
        return "takes float32 and bfloat16 tokens only"
    D, (X, Y), E = k_BKD.shape[2], state.c_BKXY.shape[2:], hidden_BE.shape[1]
    if X % 64 or D % 128 or Y % 128 or E % _TILE:
        return f"takes key and hidden sizes in 64s, head and value sizes in 128s, not {X}, {E}, {D} and {Y}"
    if X * Y > _LARGEST:
        return f"holds memories of up to {_LARGEST:,} entries in registers, not {X} x {Y}"
    return None


def pays(weights, state, hidden_BE, k_BKD, v_BKD, leaving_k_BKD, leaving_v_BKD, soft_cap) -> bool:
    """Whether "auto" is to prefer it: for few rows, where launches are most of the time. At 32 no gain was seen."""
    return hidden_BE.shape[0] <= _ROWS


@partial(jax.jit, static_argnums=7)  # lowering takes seconds: once for all layers of a model, not once for each
def scorer_step(weights, state, hidden_BE, k_BKD, v_BKD, leaving_k_BKD, leaving_v_BKD, soft_cap):
    """See `api.scorer_step`."""
    K = state.c_BKXY.shape[1]
    # Columns of a tile come in eights.
    pad = -2 * K % 8
    gates_EG = jnp.pad(weights.gates_E2K.reshape(-1, 2 * K), ((0, 0), (0, pad)))
    bias_G = jnp.pad(weights.gate_bias_2K.reshape(-1), (0, pad))
    c_ref, n_ref, m_ref = (jax.new_ref(x) for x in (state.c_BKXY, state.n_BKX, state.m_BK))
    with jax.enable_x64(False):  # else the kernels' indices are of 64 bits, which Mosaic GPU does not take
        q_BKX, write_BKX, v_BKY, shares_BPG = _multiply(
            hidden_BE, k_BKD, v_BKD, leaving_k_BKD, leaving_v_BKD, weights.q_KIX, weights.k_KIX, weights.v_KIY, gates_EG
        )
        score_BK = _remember(c_ref, n_ref, m_ref, q_BKX, write_BKX, v_BKY, shares_BPG, bias_G, weights.out_KY, soft_cap)
    return MLSTMState(c_ref[...], n_ref[...], m_ref[...]), score_BK


def _multiply(hidden_BE, k_BKD, v_BKD, leaving_k_BKD, leaving_v_BKD, q_KIX, k_KIX, v_KIY, gates_EG):
    """The memory's query, key and value of every row and head, and shares of the gates [B, P, G] to be added up."""
    B, K, _ = k_BKD.shape
    X, Y, G = q_KIX.shape[2], v_KIY.shape[2], gates_EG.shape[1]
    f32 = jnp.float32
    return plgpu.kernel(
        _multiply_kernel,
        out_type=tuple(
            jax.ShapeDtypeStruct(shape, f32) for shape in ((B, K, X), (B, K, X), (B, K, Y), (B, K * _SLICES, G))
        ),
        scratch_types=[plgpu.SMEM((n,), f32) for n in (X // _SLICES, X // _SLICES, Y // _SLICES, G)],
        grid=(_SLICES, K, pl.cdiv(B, _ROWS)),
        grid_names=("slice", "head", "rows"),
        kernel_name="scorer_step_multiply",
    )(hidden_BE, k_BKD, v_BKD, leaving_k_BKD, leaving_v_BKD, q_KIX, k_KIX, v_KIY, gates_EG)


def _multiply_kernel(
    hidden_ref, k_ref, v_ref, leaving_k_ref, leaving_v_ref, q_map_ref, k_map_ref, v_map_ref, gates_ref,
    q_out_ref, k_out_ref, v_out_ref, shares_ref, q_smem, k_smem, v_smem, gates_smem,
):  # fmt: skip
    part, head, first = lax.axis_index("slice"), lax.axis_index("head"), lax.axis_index("rows") * _ROWS
    block = head * _SLICES + part
    B, heads, D = k_ref.shape
    E, G = gates_ref.shape

    def columns(width):
        return pl.ds(pl.multiple_of(part * width, 8), width)

    def half(map_ref, which):
        here = map_ref.at[head, pl.ds(which * D, D), columns(map_ref.shape[2] // _SLICES)]
        return plgpu.load(here, layout=_WGMMA, optimized=False)

    q_map, k_map, v_map = ([half(ref, 0), half(ref, 1)] for ref in (q_map_ref, k_map_ref, v_map_ref))

    @pl.loop(0, jnp.minimum(_ROWS, B - first))
    def _row(i):
        row = first + i
        token = [_unit_rms(ref.at[row, head]) for ref in (k_ref, v_ref)]
        leaving = [_unit_rms(ref.at[row, head]) for ref in (leaving_k_ref, leaving_v_ref)]
        for x, of_map, smem in ((leaving, q_map, q_smem), (token, k_map, k_smem), (token, v_map, v_smem)):
            smem[...] = (_down(x[0], of_map[0]) + _down(x[1], of_map[1])).sum(axis=0)

        def tile(t, share_G):
            here = pl.ds(pl.multiple_of((block + t * heads * _SLICES) * _TILE, _TILE), _TILE)
            hidden_T = plgpu.load(hidden_ref.at[row, here], layout=_COLUMN, optimized=False).astype(jnp.float32)
            return share_G + _down(hidden_T, plgpu.load(gates_ref.at[here], layout=_WGMMA, optimized=False)).sum(axis=0)

        none_G = plgpu.layout_cast(jnp.zeros((G,), jnp.float32), _ROW)
        tiles = pl.cdiv(jnp.maximum(E // _TILE - block, 0), heads * _SLICES)
        gates_smem[...] = lax.fori_loop(jnp.int32(0), tiles, tile, none_G)
        plgpu.commit_smem()
        for smem, ref in ((q_smem, q_out_ref), (k_smem, k_out_ref), (v_smem, v_out_ref)):
            plgpu.copy_smem_to_gmem(smem, ref.at[row, head, columns(smem.shape[0])])
        plgpu.copy_smem_to_gmem(gates_smem, shares_ref.at[row, block])
        plgpu.wait_smem_to_gmem(0)


def _remember(c_ref, n_ref, m_ref, q_BKX, k_BKX, v_BKY, shares_BPG, bias_G, out_KY, soft_cap):
    """Moves the memory on in place, and gives the score without its bias, [B, K]."""
    B, K, X = q_BKX.shape
    f32 = jnp.float32
    return plgpu.kernel(
        partial(_remember_kernel, soft_cap=soft_cap),
        out_type=jax.ShapeDtypeStruct((B, K), f32),
        scratch_types=[plgpu.SMEM((n,), f32) for n in (bias_G.shape[0], bias_G.shape[0], X, v_BKY.shape[2])],
        grid=(K, B),
        grid_names=("head", "row"),
        kernel_name="scorer_step_remember",
    )(c_ref, n_ref, m_ref, q_BKX, k_BKX, v_BKY, shares_BPG, bias_G, out_KY)


def _remember_kernel(
    c_ref, n_ref, m_ref, q_ref, k_ref, v_ref, shares_ref, bias_ref, out_ref, score_ref,
    input_smem, forget_smem, n_smem, h_smem, *, soft_cap,
):  # fmt: skip
    head, row = lax.axis_index("head"), lax.axis_index("row")
    (_, heads, X, Y), here = c_ref.shape, (row, head)
    scale = X**-0.5
    c_XY = plgpu.load(c_ref.at[here], layout=_WGMMA, optimized=False)
    n_X, q_X, k_X = (plgpu.load(ref.at[here], layout=_COLUMN, optimized=False) for ref in (n_ref, q_ref, k_ref))
    v_Y = plgpu.load(v_ref.at[here], layout=_ROW, optimized=False)

    # All in flight together.
    shares = [plgpu.load(shares_ref.at[row, p], layout=_ROW, optimized=False) for p in range(shares_ref.shape[1])]
    raw_G = sum(shares, plgpu.load(bias_ref, layout=_ROW, optimized=False))
    gate_G = soft_cap * jnp.tanh(raw_G / soft_cap)
    input_smem[...] = gate_G
    forget_smem[...] = _log_sigmoid(gate_G)
    plgpu.commit_smem()
    log_input, log_kept = input_smem[head], forget_smem[heads + head] + m_ref[here]
    m = jnp.maximum(jnp.maximum(log_kept, log_input), 0.0)
    forget, write_X = jnp.exp(log_kept - m), k_X * jnp.exp(log_input - m)

    n_X = n_X * forget + write_X
    c_XY = c_XY * forget + _down(write_X, lax.broadcast_in_dim(v_Y, (X, Y), [1]))
    c_ref[here] = c_XY
    n_smem[...] = n_X
    norm_Y = lax.broadcast_in_dim(q_X * n_X, (X, Y), [0]).sum(axis=0) * scale
    h_Y = _down(q_X, c_XY).sum(axis=0) * scale
    h_smem[...] = h_Y / (jnp.maximum(jnp.abs(norm_Y), jnp.exp(-m)) + EPSILON)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(n_smem, n_ref.at[here])
    h_Y = h_smem[...]
    m_ref[here] = m
    score_ref[here] = jnp.sum(h_Y * out_ref[head]) * lax.rsqrt(jnp.sum(h_Y * h_Y) / Y + ROOT_EPSILON)
    plgpu.wait_smem_to_gmem(0)


def _unit_rms(ref):
    """A row at unit root mean square, one value for each row of a tile."""
    x_D = ref[...].astype(jnp.float32)
    root = lax.rsqrt(jnp.sum(x_D * x_D) / x_D.shape[0] + ROOT_EPSILON)
    return plgpu.load(ref, layout=_COLUMN, optimized=False).astype(jnp.float32) * root


def _down(x_X, matrix_XY):
    """Every row of a matrix by the entry of `x` that belongs to it."""
    return lax.broadcast_in_dim(x_X, matrix_XY.shape, [0]) * matrix_XY


def _log_sigmoid(x):
    # log1p(y) for y = exp(-|x|), without what rounding 1 + y loses.
    y = jnp.exp(-jnp.abs(x))
    whole = 1.0 + y
    return jnp.minimum(x, 0.0) - jnp.where(whole == 1.0, y, jnp.log(whole) * y / jnp.maximum(whole - 1.0, 1e-30))
