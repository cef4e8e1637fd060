"""`decode_attention` for Hopper GPUs, in Pallas Mosaic GPU: flash decoding.

How the work is walked. The caches are taken flat: M = B K C entries, C for each of the R = B K rows. The grid is
(parts, rows): each row's entries are cut into parts, as many as fill the card, and one block of 128 threads takes one
part. It streams blocks of 64 keys, values and positions through shared memory, `_STAGES` loads of the TMA engine ahead,
and keeps an online softmax in float32. One part for each row, and what it has is the result; else a second, tiny kernel
weighs the parts.

What the tensor cores see. A decode step has G <= 8 queries for each row, so it is the *slots* that fill the 64 rows of
a wgmma and the queries its 8 columns (W): scores_LW = k_LD q_WD^T, output_DW = v_LD^T p_WL^T. Nothing is padded to 64.

The new row. The caches are `Ref`s, which JAX lowers to aliased outputs (`plgpu.kernel` has no argument for that), and
the first part of a row writes it there. Another part may be loading that slot at the same time, so no part attends to
what it reads there: the slot counts as empty, and the new row is where the first part's softmax starts from.
"""

import math
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backend import mosaic_gpu_is_missing

_L = 64  # slots of a block
_W = 8  # queries of a window; the smallest number of columns of a wgmma, and the rows of a shared memory tile
_STAGES = 3  # 96 KiB of keys and values at D = 128: two thread blocks share a multiprocessor
_RESIDENT = 2 * 132  # thread blocks that an H100 or H200 runs at once
_MAX_PARTS = 64  # the second kernel holds all parts of 64 features in registers: 2 KiB of 256 each
_EMPTY = -1e30  # a running maximum before any score; finite, so that the difference of two is no NaN
_TINY = float(jnp.finfo(jnp.float32).tiny)
_LOG2E = math.log2(math.e)
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_COLUMN, _ROW = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)  # one value for each row, each column


def refuses(q_BHD, k_BKCD, v_BKCD, position_BKC, k_new_BKD, v_new_BKD, slot_BK, return_probabilities) -> str | None:
    """See `backend.Backend`."""
    if missing := mosaic_gpu_is_missing():
        return missing
    if any(x.dtype != jnp.bfloat16 for x in (q_BHD, k_BKCD, v_BKCD, k_new_BKD, v_new_BKD)):
        return "takes bfloat16 only"
    (_, H, D), K = q_BHD.shape, k_BKCD.shape[1]
    if D not in (64, 128) or H // K > _W:
        return f"takes head dimensions 64 and 128 and up to {_W} queries for each KV head, not {D} and {H // K}"
    return None


def pays(q_BHD, k_BKCD, v_BKCD, position_BKC, k_new_BKD, v_new_BKD, slot_BK, return_probabilities) -> bool:
    """Whether "auto" is to prefer it: not where it copies the cache, nor where it reads the keys twice."""
    return _padding(math.prod(k_BKCD.shape[:3])) == 0 and not return_probabilities


@partial(jax.jit, static_argnums=7)  # lowering takes seconds: once for all layers of a model, not once for each
def decode_attention(q_BHD, k_BKCD, v_BKCD, position_BKC, k_new_BKD, v_new_BKD, slot_BK, return_probabilities):
    """See `api.decode_attention`."""
    (B, H, D), (K, C) = q_BHD.shape, k_BKCD.shape[1:3]
    R, G = B * K, H // K
    # Windows of 8 queries hold those of 8 / G rows; where that does not come out even, those of one row and padding.
    g = G if _W % G == 0 and R * G % _W == 0 else _W
    q_RgD = q_BHD.reshape(R, G, D)
    if g != G:
        q_RgD = jnp.pad(q_RgD, ((0, 0), (0, g - G), (0, 0)))
    k_MD, v_MD, position_M = (_flat(x, R * C) for x in (k_BKCD, v_BKCD, position_BKC))
    k_ref, v_ref = jax.new_ref(k_MD), jax.new_ref(v_MD)
    with jax.enable_x64(False):  # else the kernels' indices are of 64 bits, which Mosaic GPU does not take
        o_RgD, lse_RW = _attend(
            q_RgD, k_ref, v_ref, position_M, k_new_BKD.reshape(R, D), v_new_BKD.reshape(R, D), slot_BK.reshape(R), C
        )
    k_BKCD, v_BKCD = (ref[...][: R * C].reshape(B, K, C, D) for ref in (k_ref, v_ref))
    o_BHD = o_RgD[:, :G].reshape(B, H, D)
    # Row r's queries are the (r mod n)-th of its window's n groups: a diagonal.
    n = _W // g
    lse_BH = jnp.einsum("wiig->wig", lse_RW.reshape(R // n, n, n, g))[..., :G].reshape(B, H)
    probabilities = _probabilities(q_BHD, k_BKCD, position_BKC, lse_BH) if return_probabilities else None
    return o_BHD, lse_BH, k_BKCD, v_BKCD, probabilities


def _attend(q_RgD, k_ref, v_ref, position_M, k_new_RD, v_new_RD, slot_R, C):
    """Output [R, g, D] and log-sum-exp [R, W] of each row's window; writes the new rows."""
    (R, g, D), M = q_RgD.shape, k_ref.shape[0]
    parts, blocks = _split(R, C)
    f32, bf16 = jnp.float32, jnp.bfloat16
    if parts == 1:
        out_type = jax.ShapeDtypeStruct((R, g, D), bf16), jax.ShapeDtypeStruct((R, _W), f32)
    else:
        out_type = jax.ShapeDtypeStruct((R, parts, D, _W), f32), jax.ShapeDtypeStruct((R, parts, _W), f32)
    scratch = dict(
        q_smem=plgpu.SMEM((_W, D), bf16, transforms=_TILED),
        k_smem=plgpu.SMEM((_STAGES, _L, D), bf16, transforms=_TILED),
        v_smem=plgpu.SMEM((_STAGES, _L, D), bf16, transforms=_TILED),
        position_smem=plgpu.SMEM((_STAGES, _L), jnp.int32),
        p_smem=plgpu.SMEM((_W, _L), bf16, transforms=_TILED),
        k_new_smem=plgpu.SMEM((D,), bf16),
        v_new_smem=plgpu.SMEM((D,), bf16),
        o_smem=plgpu.SMEM((g, D), bf16),
        lse_smem=plgpu.SMEM((_W,), f32),
        loaded=plgpu.Barrier(num_arrivals=3, num_barriers=_STAGES),
        new_loaded=plgpu.Barrier(num_arrivals=3),
    )
    o, lse = plgpu.kernel(
        partial(_attend_kernel, C=C, M=M, g=g, blocks=blocks),
        out_type=out_type,
        scratch_types=scratch,
        grid=(parts, R),
        grid_names=("part", "row"),
        kernel_name="decode_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q_RgD.reshape(R * g, D), k_ref, v_ref, position_M, k_new_RD, v_new_RD, slot_R)
    return (o, lse) if parts == 1 else _combine(o, lse, g)


def _attend_kernel(
    q_ref, k_ref, v_ref, position_ref, k_new_ref, v_new_ref, slot_ref, o_ref, lse_ref, *,
    q_smem, k_smem, v_smem, position_smem, p_smem, k_new_smem, v_new_smem, o_smem, lse_smem, loaded, new_loaded,
    C, M, g, blocks,
):  # fmt: skip
    part, row = lax.axis_index("part"), lax.axis_index("row")
    D = q_smem.shape[1]
    first = row * C
    end = first + C
    # Keys and values lie in shared memory in tiles of 8 rows, and a load that starts inside a tile brings wrong rows.
    start = first // 8 * 8 + part * (blocks * _L)
    steps = jnp.clip(pl.cdiv(end - start, _L), 0, blocks)

    def source(step):
        return pl.multiple_of(jnp.minimum(start + step * _L, M - _L), 8)

    def load(step, stage):
        here = pl.ds(source(step), _L)
        plgpu.copy_gmem_to_smem(k_ref.at[here], k_smem.at[stage], loaded.at[stage])
        plgpu.copy_gmem_to_smem(position_ref.at[here], position_smem.at[stage], loaded.at[stage])
        plgpu.copy_gmem_to_smem(v_ref.at[here], v_smem.at[stage], loaded.at[stage])

    for stage in range(min(_STAGES, blocks)):
        pl.when(stage < steps)(partial(load, stage, stage))
    plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(row * g // _W * _W, _W)], q_smem, new_loaded)
    plgpu.copy_gmem_to_smem(k_new_ref.at[row], k_new_smem, new_loaded)
    plgpu.copy_gmem_to_smem(v_new_ref.at[row], v_new_smem, new_loaded)

    slot = slot_ref[row]
    written = slot < C
    new = first + jnp.where(written, slot, 0)
    plgpu.barrier_wait(new_loaded)

    @pl.when((part == 0) & written)
    def _write():
        plgpu.copy_smem_to_gmem(k_new_smem, k_ref.at[new])
        plgpu.copy_smem_to_gmem(v_new_smem, v_ref.at[new])

    # Scores carry log2(e), so that exponentials are exp2.
    scale = D**-0.5 * _LOG2E
    attended = ((part == 0) & written & (position_ref[new] >= 0)).astype(jnp.float32)
    k_new_D = plgpu.load(k_new_smem, layout=_COLUMN).astype(jnp.float32)
    v_new_D = plgpu.load(v_new_smem, layout=_COLUMN).astype(jnp.float32)
    q_DW = plgpu.load(q_smem.transpose((1, 0)), layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
    s_new_W = jnp.sum(q_DW * lax.broadcast_in_dim(k_new_D, (D, _W), [0]), axis=0) * scale
    m_new_W = s_new_W * attended + _EMPTY * (1 - attended)
    o_DW = lax.broadcast_in_dim(v_new_D * attended, (D, _W), [0])
    l_LW = plgpu.layout_cast(jnp.zeros((_L, _W), jnp.float32), plgpu.Layout.WGMMA)

    def attend(step, carry):
        o_DW, m_W, l_LW = carry
        stage = lax.rem(step, jnp.int32(_STAGES))
        plgpu.barrier_wait(loaded.at[stage])
        position_L = plgpu.load(position_smem.at[stage], layout=_COLUMN)
        entry_L = source(step) + plgpu.broadcasted_iota(jnp.int32, (_L,), 0, layout=_COLUMN)
        # A block may reach into other rows, and the last one of all is moved back over what the one before it had.
        own_L = (entry_L >= jnp.maximum(first, start + step * _L)) & (entry_L < end)
        old_L = (entry_L != new) | ~written
        bias_L = jnp.where((position_L >= 0) & own_L & old_L, 0.0, -jnp.inf).astype(jnp.float32)
        s_LW = _matmul(k_smem.at[stage], q_smem.transpose((1, 0))) * scale
        s_LW += lax.broadcast_in_dim(bias_L, s_LW.shape, [0])

        m_next_W = jnp.maximum(m_W, s_LW.max(axis=0))
        shrink_W = jnp.exp2(m_W - m_next_W)
        p_LW = jnp.exp2(s_LW - lax.broadcast_in_dim(m_next_W, s_LW.shape, [1]))
        # Summed over slots only at the end: that crosses warps.
        l_LW = l_LW * lax.broadcast_in_dim(shrink_W, l_LW.shape, [1]) + p_LW
        p_smem.transpose((1, 0))[...] = p_LW.astype(jnp.bfloat16)
        plgpu.commit_smem()
        o_DW = o_DW * lax.broadcast_in_dim(shrink_W, o_DW.shape, [1])
        o_DW += _matmul(v_smem.at[stage].transpose((1, 0)), p_smem.transpose((1, 0)))

        @pl.when(step + _STAGES < steps)
        def _next():
            load(step + _STAGES, stage)

        return o_DW, m_next_W, l_LW

    o_DW, m_W, l_LW = lax.fori_loop(jnp.int32(0), steps, attend, (o_DW, m_new_W, l_LW))
    l_W = l_LW.sum(axis=0) + jnp.exp2(m_new_W - m_W) * attended
    # log2(0) is -inf: a part whose slots are all empty.
    lse_smem[...] = (m_W + jnp.log2(l_W)) / _LOG2E
    o_DW /= lax.broadcast_in_dim(jnp.maximum(l_W, _TINY), o_DW.shape, [1])
    if len(lse_ref.shape) == 2:
        _store(o_DW, o_smem, o_ref, lse_smem, lse_ref, row, g)
    else:
        o_ref[row, part] = o_DW
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[row, part])
    plgpu.wait_smem_to_gmem(0)


def _combine(o_RPDW, lse_RPW, g):
    """The parts of every row, each weighed by the mass it has."""
    R, _, D, _ = o_RPDW.shape
    return plgpu.kernel(
        partial(_combine_kernel, g=g),
        out_type=(jax.ShapeDtypeStruct((R, g, D), jnp.bfloat16), jax.ShapeDtypeStruct((R, _W), jnp.float32)),
        scratch_types=dict(o_smem=plgpu.SMEM((g, _L), jnp.bfloat16), lse_smem=plgpu.SMEM((_W,), jnp.float32)),
        grid=(D // _L, R),
        grid_names=("features", "row"),
        kernel_name="decode_attention_combine",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(o_RPDW, lse_RPW)


def _combine_kernel(part_o_ref, part_lse_ref, o_ref, lse_ref, *, o_smem, lse_smem, g):
    """A block for each row and 64 features. All of its loads are unrolled, to be in flight together."""
    features, row = pl.ds(lax.axis_index("features") * _L, _L), lax.axis_index("row")
    every = range(part_o_ref.shape[1])
    o = [plgpu.load(part_o_ref.at[row, part, features], layout=plgpu.Layout.WGMMA, optimized=False) for part in every]
    lse = [plgpu.load(part_lse_ref.at[row, part], layout=_ROW, optimized=False) for part in every]
    m_W = reduce(jnp.maximum, lse, plgpu.layout_cast(jnp.full((_W,), _EMPTY, jnp.float32), _ROW))
    weights = [jnp.exp2((lse_W - m_W) * _LOG2E) for lse_W in lse]
    l_W = sum(weights[1:], weights[0])
    terms = [o_DW * lax.broadcast_in_dim(w_W, o_DW.shape, [1]) for o_DW, w_W in zip(o, weights, strict=True)]
    o_DW = sum(terms[1:], terms[0]) / lax.broadcast_in_dim(jnp.maximum(l_W, _TINY), (_L, _W), [1])
    lse_smem[...] = m_W + jnp.log2(l_W) / _LOG2E
    _store(o_DW, o_smem, o_ref.at[:, :, features], lse_smem, lse_ref, row, g)
    plgpu.wait_smem_to_gmem(0)


def _store(o_DW, o_smem, o_ref, lse_smem, lse_ref, row, g):
    """Writes a row's queries out of its window, and the log-sum-exp of the whole window."""
    column_W = plgpu.broadcasted_iota(jnp.int32, (_W,), 0, layout=_ROW) - row * g % _W
    for i in range(g):
        only_W = (column_W == i).astype(jnp.float32)
        o_smem[i] = (o_DW * lax.broadcast_in_dim(only_W, o_DW.shape, [1])).sum(axis=1).astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_smem, o_ref.at[row])
    plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[row])


def _matmul(a_smem, b_smem):
    def run(acc_ref):
        plgpu.wgmma(acc_ref, a_smem, b_smem)
        return acc_ref[...]

    return pl.run_scoped(run, plgpu.ACC((a_smem.shape[0], b_smem.shape[1]), jnp.float32))


def _split(rows: int, C: int) -> tuple[int, int]:
    """Parts of each row, and blocks of `_L` slots in a part: the cheapest in waves of thread blocks.

    What a thread block costs beside its blocks (launch, the first load, the last store) is taken as 1.5 blocks.
    """
    total = pl.cdiv(C if C % 8 == 0 else C + 7, _L)  # rows of other lengths start up to 7 entries into a block

    def cost(blocks):
        return pl.cdiv(rows * pl.cdiv(total, blocks), _RESIDENT) * (blocks + 1.5)

    blocks = min(range(pl.cdiv(total, _MAX_PARTS), total + 1), key=cost)
    return pl.cdiv(total, blocks), blocks


def _padding(entries: int) -> int:
    """Entries to add so that blocks of 64 fit and tiles of 8 come out even; none for any cache of real size."""
    return max(_L - entries, -entries % 8)


def _flat(x, entries):
    x = x.reshape(entries, *x.shape[3:])
    padding = _padding(entries)
    return jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1)) if padding else x


def _probabilities(q_BHD, k_BKCD, position_BKC, lse_BH):
    (B, H, D), (K, C) = q_BHD.shape, k_BKCD.shape[1:3]
    q_BKGD = q_BHD.reshape(B, K, H // K, D)
    s_BKGC = jnp.einsum("BKGD,BKCD->BKGC", q_BKGD, k_BKCD, preferred_element_type=jnp.float32) * D**-0.5
    p_BKGC = jnp.exp(s_BKGC - lse_BH.reshape(B, K, H // K, 1))
    return jnp.where(position_BKC[:, :, None] >= 0, p_BKGC, 0).reshape(B, H, C)
