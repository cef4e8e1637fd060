"""`split_qkv` for Hopper GPUs, in Pallas Mosaic GPU: one launch where XLA makes three.

A thread block for each row and KV head. A head is two vectors of D / 2 features, each over the rows of a wgmma's tile;
the sums of squares of all heads are the columns of one such tile, so that they are added up at once.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backend import derivative_of, mosaic_gpu_is_missing
from pallas_kernels.split_qkv import reference

_FEW = 8  # rows
_F = 64  # features of half a head
_W = 8  # columns of a tile, one for each head that has a norm
_COLUMN = plgpu.Layout.WGMMA.reduce(1)


def refuses(qkv, rotation, q_norm_D, k_norm_D, eps) -> str | None:
    """See `backend.Backend`."""
    J, D = qkv.shape[-2:]
    if missing := mosaic_gpu_is_missing():
        return missing
    if (q_norm_D is None) != (k_norm_D is None):
        return "takes norms of both queries and keys, or none"
    norms = () if q_norm_D is None else (q_norm_D, k_norm_D)
    if any(x.dtype != jnp.bfloat16 for x in (qkv, *norms)) or rotation[0].dtype != jnp.float32:
        return "takes bfloat16, and rotations in float32, only"
    if D != 2 * _F or J - 1 > _W:
        return f"takes heads of {2 * _F} and up to {_W - 1} queries for each KV head, not {D} and {J - 2}"
    if jax.sharding.get_abstract_mesh().size > 1:
        return "is for one device"
    return None


def pays(qkv, rotation, q_norm_D, k_norm_D, eps) -> bool:
    """Whether "auto" is to prefer it: for few rows, where launches are most of the time."""
    return math.prod(qkv.shape[:-3]) <= _FEW


@derivative_of(reference.split_qkv, static=(4,))
@partial(jax.jit, static_argnums=4)
def split_qkv(qkv, rotation, q_norm_D, k_norm_D, eps):
    """See `api.split_qkv`."""
    *tokens, K, J, D = qkv.shape
    B = math.prod(tokens)
    halves = [x.reshape(2, _F) for x in (q_norm_D, k_norm_D) if x is not None]
    shapes = (B, K, J - 2, 2, _F), (B, K, 2, _F), (B, K, 2, _F)
    with jax.enable_x64(False):  # else the kernel's indices are of 64 bits, which Mosaic GPU does not take
        q, k, v = plgpu.kernel(
            partial(_kernel, eps=eps),
            out_type=tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes),
            scratch_types=dict(
                out_smem=plgpu.SMEM((J, 2, _F), jnp.bfloat16), scale_smem=plgpu.SMEM((_W,), jnp.float32)
            ),
            grid=(K, B),
            grid_names=("head", "row"),
            kernel_name="split_qkv",
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )(qkv.reshape(B, K, J, 2, _F), *(x.reshape(B, _F) for x in rotation), *halves)
    return q.reshape(*tokens, -1, D), k.reshape(*tokens, K, D), v.reshape(*tokens, K, D)


def _kernel(qkv_ref, cos_ref, sin_ref, *refs, out_smem, scale_smem, eps):
    *norm_refs, q_ref, k_ref, v_ref = refs
    head, row = lax.axis_index("head"), lax.axis_index("row")
    J = qkv_ref.shape[2]

    def halves(ref):
        return [plgpu.load(ref.at[n], layout=_COLUMN, optimized=False).astype(jnp.float32) for n in range(2)]

    # All in flight together.
    x = [halves(qkv_ref.at[row, head, j]) for j in range(J)]
    cos_F, sin_F = (plgpu.load(ref.at[row], layout=_COLUMN, optimized=False) for ref in (cos_ref, sin_ref))
    norms = [halves(ref) for ref in norm_refs]

    if norms:
        scale_smem[...] = lax.rsqrt(
            _sums([first * first + second * second for first, second in x[:-1]]) / (2 * _F) + eps
        )
        plgpu.commit_smem()
    for j, (first_F, second_F) in enumerate(x[:-1]):
        if norms:
            of_first_F, of_second_F = norms[j == J - 2]
            first_F, second_F = first_F * scale_smem[j] * of_first_F, second_F * scale_smem[j] * of_second_F
        out_smem[j, 0] = (first_F * cos_F - second_F * sin_F).astype(jnp.bfloat16)
        out_smem[j, 1] = (second_F * cos_F + first_F * sin_F).astype(jnp.bfloat16)
    for n in range(2):
        out_smem[J - 1, n] = x[-1][n].astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem.at[: J - 2], q_ref.at[row, head])
    plgpu.copy_smem_to_gmem(out_smem.at[J - 2], k_ref.at[row, head])
    plgpu.copy_smem_to_gmem(out_smem.at[J - 1], v_ref.at[row, head])
    plgpu.wait_smem_to_gmem(0)


def _sums(vectors):
    """The sum of each of up to W vectors, one for each column."""
    column_FW = plgpu.broadcasted_iota(jnp.int32, (_F, _W), 1, layout=plgpu.Layout.WGMMA)
    tile_FW = plgpu.layout_cast(jnp.zeros((_F, _W), jnp.float32), plgpu.Layout.WGMMA)
    for j, x_F in enumerate(vectors):
        tile_FW = jnp.where(column_FW == j, lax.broadcast_in_dim(x_F, (_F, _W), [0]), tile_FW)
    return tile_FW.sum(axis=0)
