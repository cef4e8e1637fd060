"""`masked_attention` on TPU: one set of kernels, run over the plain row or over compacted chunks of it.

Documents are runs, so the end of a key's document is folded into its expiry, and no kernel reads a segment id. Which
form runs is the rule of `tpu_blocks.chosen_chunk`; the kernels are in `tpu_forward` and `tpu_backward`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.masked_attention import tpu_compacted, tpu_plain
from pallas_kernels.masked_attention.tpu_blocks import chosen_chunk
from pallas_kernels.residuals import saved
from pallas_kernels.segments import segment_end

HEAD_DIMS = (64, 128, 256)
MAX_GROUP = 16
"""Query heads per KV head: all of them share a block, whose scores have to fit in VMEM."""


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
    dtypes = {x.dtype for x in (q_BTHD, k_BSKD, v_BSKD)}
    group = q_BTHD.shape[2] // k_BSKD.shape[2]
    if bias_BKS is not None:
        return "adds no bias"
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype("bfloat16"), jnp.dtype("float32")}:
        return f"takes q, k and v all in bfloat16 or all in float32, not {', '.join(sorted(map(str, dtypes)))}"
    if q_BTHD.shape[3] not in HEAD_DIMS:
        return f"takes head dimensions {', '.join(map(str, HEAD_DIMS))}, not {q_BTHD.shape[3]}"
    if group > MAX_GROUP:
        return f"takes at most {MAX_GROUP} query heads per KV head, not {group}"
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
    B, T, H, D = q_BTHD.shape
    K = k_BSKD.shape[2]
    end_BKS = jnp.minimum(expiry_BKS.astype(jnp.int32), segment_end(segment_BS)[:, None])
    chunk = chosen_chunk(T, capacity, H // K, B * K, D, q_BTHD.dtype.itemsize)
    return _attention(q_BTHD, k_BSKD, v_BSKD, end_BKS, chunk, capacity)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(q_BTHD, k_BSKD, v_BSKD, end_BKS, chunk, capacity):
    return _forward(q_BTHD, k_BSKD, v_BSKD, end_BKS, chunk, capacity)[0]


def _forward(q_BTHD, k_BSKD, v_BSKD, end_BKS, chunk, capacity):
    if chunk is None:
        o_BTHD, lse_BHT = tpu_plain.forward(q_BTHD, k_BSKD, v_BSKD, end_BKS)
    else:
        o_BTHD, lse_BHT = tpu_compacted.forward(q_BTHD, k_BSKD, v_BSKD, end_BKS, chunk, capacity)
    o_BTHD, lse_BHT = saved(o_BTHD), saved(lse_BHT)
    return (o_BTHD, lse_BHT), (q_BTHD, k_BSKD, v_BSKD, end_BKS, o_BTHD, lse_BHT)


def _backward(chunk, capacity, residuals, cotangents):
    q_BTHD, k_BSKD, v_BSKD, end_BKS, o_BTHD, lse_BHT = residuals
    do_BTHD, dlse_BHT = cotangents
    delta_BTH = jnp.sum(do_BTHD.astype(jnp.float32) * o_BTHD.astype(jnp.float32), axis=-1)
    arguments = q_BTHD, k_BSKD, v_BSKD, end_BKS, lse_BHT, do_BTHD, dlse_BHT - jnp.swapaxes(delta_BTH, 1, 2)
    if chunk is None:
        return *tpu_plain.backward(*arguments), None
    return *tpu_compacted.backward(*arguments, chunk, capacity), None


_attention.defvjp(_forward, _backward)
