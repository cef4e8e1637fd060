"""The compacted form: chunk by chunk over the keys that are still alive, gathered, and the chunk's own.

A scan carries the survivors: position and end of every key that some query from here on may still see, oldest first.
The survivors of the next chunk are among this one's and this chunk's own keys, so that a step costs capacity + chunk,
and the row is linear. Gathering K and V, and scattering their gradients, is XLA's; the kernels run once per chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from pallas_kernels.masked_attention.tpu_backward import attend_dkv, attend_dq
from pallas_kernels.masked_attention.tpu_blocks import Blocks, blocks_for
from pallas_kernels.masked_attention.tpu_forward import attend
from pallas_kernels.masked_attention.tpu_plain import heads_first, heads_last, join_heads, padded, split_heads


class _Survivors(NamedTuple):
    """Keys before a chunk that may still be seen.

    Empty places come last: their positions lie past the row, all different, so that positions are sorted and unique,
    which is what XLA scatters quickly; they end at 0.
    """

    position_BKC: Int[Array, "B K C"]
    end_BKC: Int[Array, "B K C"]
    fits_BK: Bool[Array, "B K"]
    """Whether there was ever room for all of them."""


def forward(q_BTHD, k_BSKD, v_BSKD, end_BKS, chunk: int, capacity: int):
    """Output and log-sum-exp, NaN from the first chunk on at whose start more than `capacity` keys are alive."""
    T, K = q_BTHD.shape[1], k_BSKD.shape[2]
    blocks, q_BTHD, k_BKSD, v_BKSD, end_BKS = _prepared(q_BTHD, k_BSKD, v_BSKD, end_BKS, chunk, capacity)

    def step(survivors, first):
        own_end_BKL = _part(end_BKS, first, chunk, 2)
        keys = (_slots(x, survivors, first, chunk) for x in (k_BKSD, v_BKSD))
        life_BKC = jnp.concatenate([survivors.end_BKC, own_end_BKL], axis=-1) - first
        q_BKGTD = heads_first(_part(q_BTHD, first, chunk, 1), K)
        o_BKGTD, lse_BKGT = attend(q_BKGTD, *keys, life_BKC, blocks)
        fits_BK11 = survivors.fits_BK[:, :, None, None]
        o_BKGTD = jnp.where(fits_BK11[..., None], o_BKGTD, jnp.nan)
        lse_BKGT = jnp.where(fits_BK11, lse_BKGT, jnp.nan)
        return _next(survivors, own_end_BKL, first, end_BKS.shape[2]), (heads_last(o_BKGTD), join_heads(lse_BKGT))

    _, (o_nBTHD, lse_nBHT) = lax.scan(step, _nobody(blocks, end_BKS), jnp.arange(0, end_BKS.shape[2], chunk))
    return _joined(o_nBTHD, 1)[:, :T], _joined(lse_nBHT, 2)[..., :T]


def backward(q_BTHD, k_BSKD, v_BSKD, end_BKS, lse_BHT, do_BTHD, shift_BHT, chunk: int, capacity: int):
    """Gradients of q, k and v; those of k and v are summed in float32."""
    T, K = q_BTHD.shape[1], k_BSKD.shape[2]
    blocks, q_BTHD, k_BKSD, v_BKSD, end_BKS = _prepared(q_BTHD, k_BSKD, v_BSKD, end_BKS, chunk, capacity)
    pad = end_BKS.shape[2] - T
    do_BTHD, shift_BHT = padded(do_BTHD, 1, pad), padded(shift_BHT, 2, pad)
    lse_BHT = jnp.pad(lse_BHT, ((0, 0), (0, 0), (0, pad)), constant_values=-jnp.inf)

    def step(carry, first):
        survivors, totals = carry
        own_end_BKL = _part(end_BKS, first, chunk, 2)
        keys = (_slots(x, survivors, first, chunk) for x in (k_BKSD, v_BKSD))
        life_BKC = jnp.concatenate([survivors.end_BKC, own_end_BKL], axis=-1) - first
        q_BKGTD, do_BKGTD = (heads_first(_part(x, first, chunk, 1), K) for x in (q_BTHD, do_BTHD))
        lse_BKGT, shift_BKGT = (split_heads(_part(x, first, chunk, 2), K) for x in (lse_BHT, shift_BHT))
        arguments = q_BKGTD, *keys, life_BKC, lse_BKGT, do_BKGTD, shift_BKGT, blocks
        dq_BKGTD = attend_dq(*arguments)
        gradients = attend_dkv(*arguments, jnp.float32)
        totals = [_added(total, x, survivors, first) for total, x in zip(totals, gradients, strict=True)]
        return (_next(survivors, own_end_BKL, first, end_BKS.shape[2]), totals), heads_last(dq_BKGTD)

    totals = [jnp.zeros(k_BKSD.shape, jnp.float32)] * 2
    firsts = jnp.arange(0, end_BKS.shape[2], chunk)
    (_, totals), dq_nBTHD = lax.scan(step, (_nobody(blocks, end_BKS), totals), firsts)
    dk_BSKD, dv_BSKD = (jnp.swapaxes(x, 1, 2)[:, :T].astype(k_BSKD.dtype) for x in totals)
    return _joined(dq_nBTHD, 1)[:, :T], dk_BSKD, dv_BSKD


def _prepared(q_BTHD, k_BSKD, v_BSKD, end_BKS, chunk, capacity):
    """The row padded to whole chunks with keys that nothing sees; KV heads before positions."""
    B, T, H, _ = q_BTHD.shape
    K = k_BSKD.shape[2]
    blocks = blocks_for(chunk, capacity, H // K, B * K)
    pad = -T % chunk
    k_BKSD, v_BKSD = (jnp.swapaxes(padded(x, 1, pad), 1, 2) for x in (k_BSKD, v_BSKD))
    return blocks, padded(q_BTHD, 1, pad), k_BKSD, v_BKSD, padded(end_BKS, 2, pad)


def _nobody(blocks: Blocks, end_BKS) -> _Survivors:
    """Before the first chunk."""
    B, K, S = end_BKS.shape
    shape = (B, K, blocks.old)
    position_BKC = S + lax.broadcasted_iota(jnp.int32, shape, 2)
    return _Survivors(position_BKC, jnp.zeros(shape, jnp.int32), jnp.ones((B, K), bool))


def _next(survivors: _Survivors, own_end_BKL, first, S: int) -> _Survivors:
    """Those who outlive the chunk, by a sort: TPUs scatter single numbers slowly."""
    C, L = survivors.end_BKC.shape[2], own_end_BKL.shape[2]
    own_BKL = first + lax.broadcasted_iota(jnp.int32, own_end_BKL.shape, 2)
    end_BKC = jnp.concatenate([survivors.end_BKC, own_end_BKL], axis=-1)
    position_BKC = jnp.concatenate([survivors.position_BKC, own_BKL], axis=-1)
    alive_BKC = end_BKC > first + L
    position_BKC = jnp.where(alive_BKC, position_BKC, S + lax.broadcasted_iota(jnp.int32, end_BKC.shape, 2))
    position_BKC, end_BKC = lax.sort((position_BKC, jnp.where(alive_BKC, end_BKC, 0)), num_keys=1, is_stable=False)
    fits_BK = survivors.fits_BK & (alive_BKC.sum(-1) <= C)
    return _Survivors(position_BKC[..., :C], end_BKC[..., :C], fits_BK)


def _slots(x_BKSD, survivors: _Survivors, first, chunk: int):
    """Rows of the survivors, then the chunk's own. Empty places repeat the last row: nothing sees them."""
    gather = jax.vmap(jax.vmap(lambda x_SD, at_C: x_SD.at[at_C].get(mode="clip", indices_are_sorted=True)))
    return jnp.concatenate([gather(x_BKSD, survivors.position_BKC), _part(x_BKSD, first, chunk, 2)], axis=2)


def _added(total_BKSD, x_BKCD, survivors: _Survivors, first):
    """Gradients of a chunk's slots, where they belong. Nothing before the chunk has seen the chunk's own keys."""

    def scatter(total_SD, at_C, x_CD):
        return total_SD.at[at_C].add(x_CD, mode="drop", indices_are_sorted=True, unique_indices=True)

    C = survivors.end_BKC.shape[2]
    total_BKSD = jax.vmap(jax.vmap(scatter))(total_BKSD, survivors.position_BKC, x_BKCD[:, :, :C])
    return lax.dynamic_update_slice_in_dim(total_BKSD, x_BKCD[:, :, C:], first, axis=2)


def _part(x, first, chunk: int, axis: int):
    return lax.dynamic_slice_in_dim(x, first, chunk, axis)


def _joined(x_nBT, axis: int):
    """Chunks, stacked first, side by side along `axis` of what each holds."""
    x_BnT = jnp.moveaxis(x_nBT, 0, axis)
    shape = x_BnT.shape
    return x_BnT.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
