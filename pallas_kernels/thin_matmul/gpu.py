"""`thin_matmul` for Hopper GPUs, in Pallas Mosaic GPU: each matrix is streamed once, at the memory's speed.

How the work is walked. A thread block of 128 threads has 64 columns of the result and all inputs of them, so nothing is
left to add up: it streams tiles of L inputs by 64 columns, with the inputs' own values and norm weights beside them,
through shared memory, as many loads of the TMA engine ahead as fit. Tiles are long where a matrix has fewer blocks of
columns than the card has multiprocessors: what a step costs beside its products is then paid rarely. Where two blocks
share a multiprocessor they are short, and more of them fit.

What the tensor cores see. With at most 8 rows it is the *columns* that fill the 64 rows of a wgmma and the rows its 8
columns (W): out_NW = w_LN^T x_WL^T. Columns of W without a row repeat the last one and are dropped.

The norm. A row's scale is a factor of the whole product, so it is applied to the result: tiles multiply x times the
norm's weights, rounded as the normed input itself would be, and add up the squares beside.
"""

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backend import derivative_of, mosaic_gpu_is_missing
from pallas_kernels.thin_matmul import reference

_N = 64  # columns of a thread block: the rows of a wgmma
_LONG, _SHORT = 256, 64  # inputs of a tile
_TURNS = 3  # of rows that the products of as many steps read
_W = 8  # the smallest number of columns of a wgmma, and the most rows
_FEW = 4  # rows; from there on XLA's products of so many are as fast, and more of its launches are worth their time
_TILE_BYTES = 208 * 1024  # of a multiprocessor's shared memory, for tiles and what belongs to them
_MULTIPROCESSORS = 132
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_COLUMN, _ROW = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)  # one value for each row, each column


def refuses_norm_matmul(x, norm_E, w_EO, eps) -> str | None:
    """See `backend.Backend`."""
    E, O = w_EO.shape
    if O < E:
        return f"writes the normed input beside a result that is at least as wide, not {O} beside {E}"
    return _refuses(x, O, norm_E, w_EO)


def refuses_norm_swiglu(x, norm_E, w_E2F, eps) -> str | None:
    """See `backend.Backend`."""
    return _refuses(x, w_E2F.shape[2], norm_E, w_E2F)


def refuses_matmul_add(x, w_FE, residual) -> str | None:
    """See `backend.Backend`."""
    return _refuses(x, w_FE.shape[1], w_FE, residual)


def _refuses(x, O, *others) -> str | None:
    B, I = math.prod(x.shape[:-1]), x.shape[-1]
    if missing := mosaic_gpu_is_missing():
        return missing
    if any(array.dtype != jnp.bfloat16 for array in (x, *others)):
        return "takes bfloat16 only"
    if not 0 < B <= _W:
        return f"takes 1 to {_W} rows, not {B}"
    if I % _LONG or O % _N:
        return f"takes inputs in {_LONG}s and columns in {_N}s, not {I} and {O}"
    if jax.sharding.get_abstract_mesh().size > 1:
        return "is for one device"
    return None


def pays(x, *_) -> bool:
    """Whether "auto" is to prefer them."""
    return math.prod(x.shape[:-1]) <= _FEW


@derivative_of(reference.norm_matmul, static=(3,))
@partial(jax.jit, static_argnums=3)
def norm_matmul(x, norm_E, w_EO, eps):
    """See `api.norm_matmul`."""
    x_BE = x.reshape(-1, x.shape[-1])
    (B, E), O = x_BE.shape, w_EO.shape[1]
    bf16 = jnp.bfloat16
    scratch = _scratch(B, O // _N, matrices=1, vectors=2) | dict(
        o_smem=plgpu.SMEM((B, _N), bf16),
        normed_smem=plgpu.SMEM((B, _N), bf16),
        scale_smem=plgpu.SMEM((_W,), jnp.float32),
    )
    normed_BE, out_BO = _call(
        partial(_norm_matmul_kernel, eps=eps),
        "norm_matmul",
        (jax.ShapeDtypeStruct((B, E), bf16), jax.ShapeDtypeStruct((B, O), bf16)),
        scratch,
        O // _N,
        (x_BE, norm_E, w_EO),
    )
    return normed_BE.reshape(x.shape), out_BO.reshape(*x.shape[:-1], O)


def _norm_matmul_kernel(
    x_ref, norm_ref, w_ref, normed_ref, out_ref, *, o_smem, normed_smem, scale_smem, eps, **streams
):
    block, (B, E) = lax.axis_index("block"), x_ref.shape
    # Its share of the normed input: on its way while the matrix streams.
    own = block * _N < E
    tile = pl.ds(pl.multiple_of(jnp.minimum(block, E // _N - 1) * _N, _N), _N)
    norm_N = plgpu.load(norm_ref.at[tile], layout=_COLUMN, optimized=False)
    x = [plgpu.load(x_ref.at[row, tile], layout=_COLUMN, optimized=False) for row in range(B)]

    (out_NW,), square_W = _stream(x_ref, norm_ref, w_ref, [block * _N], **streams)
    scale_W = lax.rsqrt(square_W / E + eps)
    scale_smem[...] = scale_W
    _store(out_NW * lax.broadcast_in_dim(scale_W, out_NW.shape, [1]), o_smem, out_ref, block)
    for row, x_N in enumerate(x):
        normed_N = x_N.astype(jnp.float32) * scale_smem[row] * norm_N.astype(jnp.float32)
        normed_smem[row] = normed_N.astype(jnp.bfloat16)
    plgpu.commit_smem()

    @pl.when(own)
    def _write():
        plgpu.copy_smem_to_gmem(normed_smem, normed_ref.at[:, tile])

    plgpu.wait_smem_to_gmem(0)


@derivative_of(reference.norm_swiglu, static=(3,))
@partial(jax.jit, static_argnums=3)
def norm_swiglu(x, norm_E, w_E2F, eps):
    """See `api.norm_swiglu`."""
    x_BE = x.reshape(-1, x.shape[-1])
    (B, E), F = x_BE.shape, w_E2F.shape[2]
    scratch = _scratch(B, F // _N, matrices=2, vectors=2) | dict(o_smem=plgpu.SMEM((B, _N), jnp.bfloat16))
    out_BF = _call(
        partial(_norm_swiglu_kernel, eps=eps),
        "norm_swiglu",
        jax.ShapeDtypeStruct((B, F), jnp.bfloat16),
        scratch,
        F // _N,
        (x_BE, norm_E, w_E2F.reshape(E, 2 * F)),
    )
    return out_BF.reshape(*x.shape[:-1], F)


def _norm_swiglu_kernel(x_ref, norm_ref, w_ref, out_ref, *, o_smem, eps, **streams):
    block, F = lax.axis_index("block"), out_ref.shape[1]
    (gate_NW, up_NW), square_W = _stream(x_ref, norm_ref, w_ref, [block * _N, F + block * _N], **streams)
    scale_W = lax.rsqrt(square_W / x_ref.shape[1] + eps)
    scale_NW = lax.broadcast_in_dim(scale_W, gate_NW.shape, [1])
    gate_NW *= scale_NW
    _store(gate_NW / (1 + jnp.exp(-gate_NW)) * up_NW * scale_NW, o_smem, out_ref, block)
    plgpu.wait_smem_to_gmem(0)


@derivative_of(reference.matmul_add)
@jax.jit
def matmul_add(x, w_FE, residual):
    """See `api.matmul_add`."""
    x_BF, residual_BE = x.reshape(-1, x.shape[-1]), residual.reshape(-1, residual.shape[-1])
    B, E = residual_BE.shape
    scratch = _scratch(B, E // _N, matrices=1, vectors=1) | dict(o_smem=plgpu.SMEM((B, _N), jnp.bfloat16))
    out_BE = _call(
        _matmul_add_kernel, "matmul_add", jax.ShapeDtypeStruct((B, E), jnp.bfloat16), scratch, E // _N,
        (x_BF, w_FE, residual_BE),
    )  # fmt: skip
    return out_BE.reshape(residual.shape)


def _matmul_add_kernel(x_ref, w_ref, residual_ref, out_ref, *, o_smem, **streams):
    block = lax.axis_index("block")
    here = pl.ds(pl.multiple_of(block * _N, _N), _N)
    # On their way while the matrix streams.
    residual = [
        plgpu.load(residual_ref.at[row, here], layout=_COLUMN, optimized=False) for row in range(x_ref.shape[0])
    ]
    (out_NW,), _ = _stream(x_ref, None, w_ref, [block * _N], **streams)
    _store(out_NW, o_smem, out_ref, block, residual)
    plgpu.wait_smem_to_gmem(0)


def _scratch(B: int, blocks: int, matrices: int, vectors: int) -> dict:
    """What `_stream` works with, for so many matrices, and vectors beside them: x, and the weights of its norm."""
    resident, L = (1, _LONG // matrices) if blocks <= _MULTIPROCESSORS else (2, _SHORT)
    stages = _TILE_BYTES // resident // (2 * L * (matrices * _N + B + 1))
    assert stages > 2, "a tile is overwritten two steps after its own"
    bf16 = jnp.bfloat16
    return dict(
        w_smem=plgpu.SMEM((stages, matrices, L, _N), bf16, transforms=_TILED),
        x_smem=plgpu.SMEM((stages, B, L), bf16),
        norm_smem=plgpu.SMEM((stages, L), bf16),
        p_smem=plgpu.SMEM((_TURNS, _W, L), bf16, transforms=_TILED),
        loaded=plgpu.Barrier(num_arrivals=matrices + vectors, num_barriers=stages),
    )


def _call(kernel, name, out_type, scratch, blocks, arguments):
    with jax.enable_x64(False):  # else the kernels' indices are of 64 bits, which Mosaic GPU does not take
        return plgpu.kernel(
            kernel,
            out_type=out_type,
            scratch_types=scratch,
            grid=(blocks,),
            grid_names=("block",),
            kernel_name=name,
            # One barrier a step is enough, see `_stream`; those that Pallas would put in take as long as the products.
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        )(*arguments)


def _stream(
    x_ref, norm_ref, w_ref, columns: Sequence[jax.Array], *, w_smem, x_smem, norm_smem, p_smem, loaded
):  # fmt: skip
    """x times its norm's weights times 64 columns of the matrix from each of `columns` on, [64, W], and the sum of the
    squares of x, [W]."""
    (B, I), (stages, _, L, _) = x_ref.shape, w_smem.shape
    steps = I // L

    def load(step, stage):
        here = pl.ds(pl.multiple_of(jnp.int32(step) * L, L), L)
        for n, column in enumerate(columns):
            part = w_ref.at[here, pl.ds(pl.multiple_of(column, _N), _N)]
            plgpu.copy_gmem_to_smem(part, w_smem.at[stage, n], loaded.at[stage])
        plgpu.copy_gmem_to_smem(x_ref.at[:, here], x_smem.at[stage], loaded.at[stage])
        if norm_ref is not None:
            plgpu.copy_gmem_to_smem(norm_ref.at[here], norm_smem.at[stage], loaded.at[stage])

    for stage in range(min(stages, steps)):
        load(stage, stage)

    def x_of(stage):
        x_LW = _wide(x_smem.at[stage, B - 1])
        row_LW = plgpu.broadcasted_iota(jnp.int32, (L, _W), 1, layout=plgpu.Layout.WGMMA)
        for row in range(B - 1):
            x_LW = jnp.where(row_LW == row, _wide(x_smem.at[stage, row]), x_LW)
        return x_LW

    def run(*acc_refs):
        def step(i, square_LW):
            stage, turn = lax.rem(i, jnp.int32(stages)), lax.rem(i, jnp.int32(_TURNS))
            plgpu.barrier_wait(loaded.at[stage])
            x_LW = x_of(stage)
            p_LW = x_LW if norm_ref is None else x_LW * _wide(norm_smem.at[stage])
            p_smem.at[turn].transpose((1, 0))[...] = p_LW.astype(jnp.bfloat16)
            plgpu.commit_smem()
            # Every warp has passed this barrier, so all have waited for their products of step i - 2: what those read,
            # its tiles and its turn of `p_smem`, may be overwritten.
            done = i - 2

            @pl.when((done >= 0) & (done + stages < steps))
            def _next():
                load(done + stages, lax.rem(done, jnp.int32(stages)))

            for n, acc_ref in enumerate(acc_refs):
                plgpu.wgmma(acc_ref, w_smem.at[stage, n].transpose((1, 0)), p_smem.at[turn].transpose((1, 0)))
            plgpu.wgmma_wait(len(acc_refs))  # all but this step's
            return square_LW + x_LW * x_LW

        none_LW = plgpu.layout_cast(jnp.zeros((L, _W), jnp.float32), plgpu.Layout.WGMMA)
        square_LW = lax.fori_loop(jnp.int32(0), jnp.int32(steps), step, none_LW)
        return *(acc_ref[...] for acc_ref in acc_refs), square_LW.sum(axis=0)

    *out, square_W = pl.run_scoped(run, *(plgpu.ACC((_N, _W), jnp.float32) for _ in columns))
    return out, square_W


def _wide(x_ref):
    """A vector of inputs in float32, the same in every column of W."""
    x_L = plgpu.load(x_ref, layout=_COLUMN).astype(jnp.float32)
    return lax.broadcast_in_dim(x_L, (x_L.shape[0], _W), [0])


def _store(out_NW, o_smem, out_ref, block, residual=None):
    """Writes the columns of the rows that there are."""
    column_W = plgpu.broadcasted_iota(jnp.int32, (_W,), 0, layout=_ROW)
    for row in range(o_smem.shape[0]):
        only_W = (column_W == row).astype(jnp.float32)
        out_N = (out_NW * lax.broadcast_in_dim(only_W, out_NW.shape, [1])).sum(axis=1)
        if residual is not None:
            out_N += residual[row].astype(jnp.float32)
        o_smem[row] = out_N.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_smem, out_ref.at[:, pl.ds(pl.multiple_of(block * _N, _N), _N)])
