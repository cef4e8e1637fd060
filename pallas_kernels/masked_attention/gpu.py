"""`masked_attention` for Hopper GPUs, in Pallas Mosaic GPU: one set of kernels, over chunks of a row and survivors.

Documents are runs, so the end of a key's document is folded into its expiry, and no kernel reads a segment id. With a
capacity, the row is cut into chunks (`gpu_chunks`), so that the work is linear in its length; without one, it is a
single chunk, of which tiles are skipped that lie past the diagonal or before all that is still alive.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import mosaic_gpu_is_missing
from pallas_kernels.masked_attention import gpu_chunks
from pallas_kernels.masked_attention.gpu_backward import attend_dkv, attend_dq
from pallas_kernels.masked_attention.gpu_forward import attend
from pallas_kernels.masked_attention.gpu_tiles import LOG2_E
from pallas_kernels.residuals import saved
from pallas_kernels.segments import segment_end

HEAD_DIMS = (64, 128)
_MAX_PAIRS = 65535
"""Pairs of query blocks in a chunk: the first axis of a Pallas grid is z of CUDA, which ends here; x does not."""


def refuses(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    v_BSKD: Float[Array, "B S K D"],
    expiry_BKS: Int[Array, "B K S"],
    segment_BS: Int[Array, "B S"],
    bias_BKS: Float[Array, "B K S"] | None = None,
    bias_delay: int = 0,
    capacity: int | None = None,
) -> str | None:
    """Why the kernels cannot take these arguments, or None."""
    if missing := mosaic_gpu_is_missing():
        return missing
    if bias_BKS is not None:
        return "adds no bias"
    if any(x.dtype != jnp.bfloat16 for x in (q_BTHD, k_BSKD, v_BSKD)):
        return "takes bfloat16 only"
    if q_BTHD.shape[3] not in HEAD_DIMS:
        return f"takes head dimensions {', '.join(map(str, HEAD_DIMS))}, not {q_BTHD.shape[3]}"
    T, group = q_BTHD.shape[1], q_BTHD.shape[2] // k_BSKD.shape[2]
    chunk = chosen_chunk(T, capacity) or gpu_chunks.round_up(T, gpu_chunks.KEYS)
    if chunk // gpu_chunks.ROWS * group // 2 > _MAX_PAIRS:
        return (
            f"launches up to {_MAX_PAIRS:,} thread blocks along a row, too few for {T:,} tokens and groups of {group}"
        )
    return None


def masked_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    v_BSKD: Float[Array, "B S K D"],
    expiry_BKS: Int[Array, "B K S"],
    segment_BS: Int[Array, "B S"],
    bias_BKS: Float[Array, "B K S"] | None = None,
    bias_delay: int = 0,
    capacity: int | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B H T"]]:
    """See `api.masked_attention`."""
    del bias_BKS, bias_delay
    T = q_BTHD.shape[1]
    end_BKS = jnp.clip(expiry_BKS.astype(jnp.int32), 0, segment_end(segment_BS)[:, None])
    chunk = chosen_chunk(T, capacity)
    if chunk is None:
        chunk, capacity = gpu_chunks.round_up(T, gpu_chunks.KEYS), 1
    pad = -T % chunk
    # Keys of the padding end at 0.
    q_BTHD, k_BSKD, v_BSKD = (_padded(x, 1, pad) for x in (q_BTHD, k_BSKD, v_BSKD))
    end_BKS = _padded(end_BKS, 2, pad)
    o_BTHD, lse_BHT = _attention(q_BTHD, k_BSKD, v_BSKD, end_BKS, chunk, capacity)
    return o_BTHD[:, :T], lse_BHT[..., :T]


def chosen_chunk(length: int, capacity: int | None) -> int | None:
    """Queries of a chunk, or None where a single one is cheaper.

    A key that a chunk sees costs its queries 4 G D FLOPs each, at some 500 TFLOP/s; a survivor is first gathered, 1 KiB
    for K and V at some 2 TB/s. Of its own keys a chunk visits half, whether or not they are still alive. The sum is
    least at about L^2 = 400 C, and never below 256: short chunks leave the loops too few tiles.
    """
    if capacity is None:
        return None
    chunk = min(max(1 << int((800 * capacity) ** 0.5).bit_length() - 1, 256), 2048)
    return chunk if capacity + chunk // 2 < length // 2 else None


def _padded(x, axis: int, more: int):
    return jnp.pad(x, [(0, more if a == axis else 0) for a in range(x.ndim)]) if more else x


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(q_BTHD, k_BSKD, v_BSKD, end_BKS, chunk, capacity):
    return _forward(q_BTHD, k_BSKD, v_BSKD, end_BKS, chunk, capacity)[0]


def _forward(q_BTHD, k_BSKD, v_BSKD, end_BKS, chunk, capacity):
    with jax.enable_x64(False):  # else the kernels' indices are of 64 bits, which Mosaic GPU does not take
        # Where a loop stacks what it saves, XLA has a copy of the kernel write into the stack, and runs the kernel once
        # more for whatever else reads its results; not past a barrier.
        made = lax.optimization_barrier(_attend(q_BTHD, k_BSKD, v_BSKD, end_BKS, chunk, capacity))
        o_BTHD, lse_BHT = map(saved, made)
    return (o_BTHD, lse_BHT), (q_BTHD, k_BSKD, v_BSKD, end_BKS, o_BTHD, lse_BHT)


def _backward(chunk, capacity, residuals, cotangents):
    with jax.enable_x64(False):
        return *_gradients(chunk, capacity, *residuals, *cotangents), None


@partial(jax.jit, static_argnums=(4, 5))  # lowering takes seconds: once for all layers of a model
def _attend(q_BTHD, k_BSKD, v_BSKD, end_BKS, chunk, capacity):
    old = gpu_chunks.survivors(end_BKS, chunk, capacity)
    span_BKnI6 = gpu_chunks.query_spans(end_BKS, old, chunk, q_BTHD.shape[2] // k_BSKD.shape[2])
    return attend(q_BTHD, k_BSKD, v_BSKD, *_old_keys(k_BSKD, v_BSKD, old), end_BKS, _old_end(old), span_BKnI6)


@partial(jax.jit, static_argnums=(0, 1))
def _gradients(chunk, capacity, q_BTHD, k_BSKD, v_BSKD, end_BKS, o_BTHD, lse_BHT, do_BTHD, dlse_BHT):
    delta_BTH = jnp.sum(do_BTHD.astype(jnp.float32) * o_BTHD.astype(jnp.float32), axis=-1)
    shift_BHT = dlse_BHT - jnp.swapaxes(delta_BTH, 1, 2)
    # To base 2; queries that see nothing have scores of -inf, of which any number can be taken.
    log2_BHT = jnp.where(lse_BHT == -jnp.inf, 0, lse_BHT * LOG2_E)
    old = gpu_chunks.survivors(end_BKS, chunk, capacity)
    keys = k_BSKD, v_BSKD, *_old_keys(k_BSKD, v_BSKD, old), end_BKS, _old_end(old)
    query_span_BKnI6 = gpu_chunks.query_spans(end_BKS, old, chunk, q_BTHD.shape[2] // k_BSKD.shape[2])
    key_span_BKnJ4 = gpu_chunks.key_spans(end_BKS, old, chunk)
    dq_BTHD = attend_dq(q_BTHD, *keys, query_span_BKnI6, log2_BHT, do_BTHD, shift_BHT)
    own, of_old = attend_dkv(q_BTHD, *keys, key_span_BKnJ4, log2_BHT, do_BTHD, shift_BHT)
    dk_BSKD, dv_BSKD = (x_BSKD.astype(k_BSKD.dtype) for x_BSKD in gpu_chunks.scattered(own, of_old, old))
    return dq_BTHD, dk_BSKD, dv_BSKD


def _old_keys(k_BSKD, v_BSKD, old):
    return (gpu_chunks.gathered(x_BSKD, old) for x_BSKD in (k_BSKD, v_BSKD))


def _old_end(old):
    return old.end_BKnC.reshape(*old.end_BKnC.shape[:2], -1)


_attention.defvjp(_forward, _backward)
