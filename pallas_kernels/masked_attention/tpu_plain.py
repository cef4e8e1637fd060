"""The plain form: one call of each kernel for the whole row; blocks that have expired for all queries are skipped."""

import jax.numpy as jnp

from pallas_kernels.masked_attention.tpu_backward import attend_dkv, attend_dq
from pallas_kernels.masked_attention.tpu_blocks import blocks_for
from pallas_kernels.masked_attention.tpu_forward import attend


def forward(q_BTHD, k_BSKD, v_BSKD, end_BKS):
    """Output and log-sum-exp; a query `q >= t` sees key `t` iff `q < end[t]`."""
    T = q_BTHD.shape[1]
    blocks, q_BKGTD, k_BKSD, v_BKSD, life_BKS = _prepared(q_BTHD, k_BSKD, v_BSKD, end_BKS)
    o_BKGTD, lse_BKGT = attend(q_BKGTD, k_BKSD, v_BKSD, life_BKS, blocks)
    return heads_last(o_BKGTD)[:, :T], join_heads(lse_BKGT)[..., :T]


def backward(q_BTHD, k_BSKD, v_BSKD, end_BKS, lse_BHT, do_BTHD, shift_BHT):
    """Gradients of q, k and v."""
    T, K = q_BTHD.shape[1], k_BSKD.shape[2]
    blocks, q_BKGTD, k_BKSD, v_BKSD, life_BKS = _prepared(q_BTHD, k_BSKD, v_BSKD, end_BKS)
    pad = blocks.rows - T
    # Padded queries see nothing, and say so.
    lse_BKGT = split_heads(jnp.pad(lse_BHT, ((0, 0), (0, 0), (0, pad)), constant_values=-jnp.inf), K)
    shift_BKGT = split_heads(padded(shift_BHT, 2, pad), K)
    arguments = q_BKGTD, k_BKSD, v_BKSD, life_BKS, lse_BKGT, heads_first(padded(do_BTHD, 1, pad), K), shift_BKGT, blocks
    dq_BKGTD = attend_dq(*arguments)
    dk_BKSD, dv_BKSD = attend_dkv(*arguments, k_BSKD.dtype)
    return heads_last(dq_BKGTD)[:, :T], *(jnp.swapaxes(x, 1, 2)[:, :T] for x in (dk_BKSD, dv_BKSD))


def _prepared(q_BTHD, k_BSKD, v_BSKD, end_BKS):
    """Heads first, padded to blocks with keys that nothing sees."""
    B, T, H, _ = q_BTHD.shape
    K = k_BSKD.shape[2]
    blocks = blocks_for(T, 0, H // K, B * K)
    pad = blocks.rows - T
    q_BTHD, k_BSKD, v_BSKD = (padded(x, 1, pad) for x in (q_BTHD, k_BSKD, v_BSKD))
    k_BKSD, v_BKSD = jnp.swapaxes(k_BSKD, 1, 2), jnp.swapaxes(v_BSKD, 1, 2)
    return blocks, heads_first(q_BTHD, K), k_BKSD, v_BKSD, padded(end_BKS, 2, pad)


def padded(x, axis: int, more: int):
    """`more` zeros at the end of an axis."""
    return jnp.pad(x, [(0, more if a == axis else 0) for a in range(x.ndim)]) if more else x


def heads_first(x_BTHD, K: int):
    """[B, T, H, D] to [B, K, G, T, D]."""
    B, T, H, D = x_BTHD.shape
    return jnp.moveaxis(x_BTHD.reshape(B, T, K, H // K, D), 1, 3)


def heads_last(x_BKGTD):
    """[B, K, G, T, D] to [B, T, H, D]."""
    B, K, G, T, D = x_BKGTD.shape
    return jnp.moveaxis(x_BKGTD, 3, 1).reshape(B, T, K * G, D)


def split_heads(x_BHT, K: int):
    """[B, H, T] to [B, K, G, T]."""
    B, H, T = x_BHT.shape
    return x_BHT.reshape(B, K, H // K, T)


def join_heads(x_BKGT):
    """[B, K, G, T] to [B, H, T]."""
    B, K, G, T = x_BKGT.shape
    return x_BKGT.reshape(B, K * G, T)
