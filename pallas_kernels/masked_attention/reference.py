"""Plain JAX `masked_attention`: blocks of queries against all keys, with its own gradient.

The gradient is written out for two reasons: nothing of size T x S is saved, and it flows through the log-sum-exp too,
which the attention functions of JAX leave at zero. With p the probabilities, dP = do v^T and delta = sum(do * o):

    ds = p * (dP - delta + dlse),    dq = ds k,    dk = ds^T q,    dv = p^T do,    dbias = sum of ds over the queries
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

QUERY_BLOCK = 128


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def masked_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    v_BSKD: Float[Array, "B S K D"],
    expiry_BKS: Int[Array, "B K S"],
    segment_BS: Int[Array, "B S"],
    bias_BKS: Float[Array, "B K S"] | None,
    bias_delay: int,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B H T"]]:
    """See `api.masked_attention`."""
    return _forward(q_BTHD, k_BSKD, v_BSKD, expiry_BKS, segment_BS, bias_BKS, bias_delay)[0]


def _forward(q_BTHD, k_BSKD, v_BSKD, expiry_BKS, segment_BS, bias_BKS, bias_delay):
    B, T, H, D = q_BTHD.shape
    K = k_BSKD.shape[2]
    scores = partial(_block_scores, k_BSKD, expiry_BKS, segment_BS, bias_BKS, bias_delay)

    def block(first_and_q):
        first, q_BLKGD = first_and_q
        s_BKGLS, visible_BKLS = scores(first, q_BLKGD)
        lse_BKGL = jax.nn.logsumexp(s_BKGLS, axis=-1)
        p_BKGLS = _probabilities(s_BKGLS, lse_BKGL, visible_BKLS)
        o_BLKGD = _einsum("BKGLS,BSKD->BLKGD", p_BKGLS.astype(v_BSKD.dtype), v_BSKD)
        return o_BLKGD.astype(q_BTHD.dtype), lse_BKGL

    blocks = _split(q_BTHD.reshape(B, T, K, H // K, D))
    o_nBLKGD, lse_nBKGL = lax.map(block, (_block_starts(blocks), blocks))
    o_BTHD = _join(o_nBLKGD, T).reshape(B, T, H, D)
    lse_BHT = jnp.moveaxis(lse_nBKGL, 0, 3).reshape(B, H, -1)[..., :T]
    residuals = (q_BTHD, k_BSKD, v_BSKD, expiry_BKS, segment_BS, bias_BKS, o_BTHD, lse_BHT)
    return (o_BTHD, lse_BHT), residuals


def _backward(bias_delay, residuals, cotangents):
    q_BTHD, k_BSKD, v_BSKD, expiry_BKS, segment_BS, bias_BKS, o_BTHD, lse_BHT = residuals
    do_BTHD, dlse_BHT = cotangents
    B, T, H, D = q_BTHD.shape
    K, G = k_BSKD.shape[2], H // k_BSKD.shape[2]
    acc = lse_BHT.dtype
    scores = partial(_block_scores, k_BSKD, expiry_BKS, segment_BS, bias_BKS, bias_delay)

    delta_BTH = jnp.sum(do_BTHD.astype(acc) * o_BTHD.astype(acc), axis=-1)
    shift_BTH = jnp.swapaxes(dlse_BHT, 1, 2) - delta_BTH  # what dP is moved by: dlse - delta
    by_group = [x.reshape(B, T, K, G, *x.shape[3:]) for x in (q_BTHD, do_BTHD, shift_BTH, jnp.swapaxes(lse_BHT, 1, 2))]
    blocks = [_split(x) for x in by_group]

    def block(totals, inputs):
        dk_BSKD, dv_BSKD, dbias_BKS = totals
        first, q_BLKGD, do_BLKGD, shift_BLKG, lse_BLKG = inputs
        s_BKGLS, visible_BKLS = scores(first, q_BLKGD)
        p_BKGLS = _probabilities(s_BKGLS, jnp.moveaxis(lse_BLKG, 1, 3), visible_BKLS)
        dp_BKGLS = _einsum("BLKGD,BSKD->BKGLS", do_BLKGD, v_BSKD)
        ds_BKGLS = p_BKGLS * (dp_BKGLS + jnp.moveaxis(shift_BLKG, 1, 3)[..., None])
        dscaled = (ds_BKGLS * D**-0.5).astype(q_BTHD.dtype)
        dq_BLKGD = _einsum("BKGLS,BSKD->BLKGD", dscaled, k_BSKD)
        dk_BSKD += _einsum("BKGLS,BLKGD->BSKD", dscaled, q_BLKGD)
        dv_BSKD += _einsum("BKGLS,BLKGD->BSKD", p_BKGLS.astype(v_BSKD.dtype), do_BLKGD)
        if dbias_BKS is not None:
            biased_LS = _biased(first, q_BLKGD.shape[1], k_BSKD.shape[1], bias_delay)
            dbias_BKS += jnp.sum(jnp.where(biased_LS, ds_BKGLS, 0), axis=(2, 3))
        return (dk_BSKD, dv_BSKD, dbias_BKS), dq_BLKGD.astype(q_BTHD.dtype)

    zeros = partial(jnp.zeros, dtype=acc)
    totals = (zeros(k_BSKD.shape), zeros(v_BSKD.shape), None if bias_BKS is None else zeros(bias_BKS.shape))
    (dk_BSKD, dv_BSKD, dbias_BKS), dq_nBLKGD = lax.scan(block, totals, (_block_starts(blocks[0]), *blocks))
    return (
        _join(dq_nBLKGD, T).reshape(B, T, H, D),
        dk_BSKD.astype(k_BSKD.dtype),
        dv_BSKD.astype(v_BSKD.dtype),
        None,
        None,
        None if dbias_BKS is None else dbias_BKS.astype(bias_BKS.dtype),
    )


masked_attention.defvjp(_forward, _backward)


def _block_scores(k_BSKD, expiry_BKS, segment_BS, bias_BKS, bias_delay, first, q_BLKGD):
    """Scaled scores of one block of queries, -inf where a key is not visible, and the visibility itself."""
    L, S = q_BLKGD.shape[1], k_BSKD.shape[1]
    q_L, k_S = first + jnp.arange(L), jnp.arange(S)
    # Blocks past the end of the row hold queries of no segment.
    q_segment_BL = jnp.take(segment_BS, q_L, axis=1, mode="fill", fill_value=0)
    same_BLS = (q_segment_BL[:, :, None] == segment_BS[:, None]) & (segment_BS[:, None] > 0)
    visible_BKLS = (k_S <= q_L[:, None]) & (q_L[:, None] < expiry_BKS[:, :, None]) & same_BLS[:, None]
    s_BKGLS = _einsum("BLKGD,BSKD->BKGLS", q_BLKGD, k_BSKD) * k_BSKD.shape[-1] ** -0.5
    if bias_BKS is not None:
        s_BKGLS += jnp.where(_biased(first, L, S, bias_delay), bias_BKS[:, :, None, None].astype(s_BKGLS.dtype), 0)
    return jnp.where(visible_BKLS[:, :, None], s_BKGLS, -jnp.inf), visible_BKLS


def _biased(first, L, S, bias_delay):
    return first + jnp.arange(L)[:, None] >= jnp.arange(S) + bias_delay


def _probabilities(s_BKGLS, lse_BKGL, visible_BKLS):
    # The double `where` keeps -inf - -inf out of rows that see nothing.
    lse_BKGL = jnp.where(jnp.isfinite(lse_BKGL), lse_BKGL, 0)
    return jnp.where(visible_BKLS[:, :, None], jnp.exp(s_BKGLS - lse_BKGL[..., None]), 0)


def _einsum(spec, x, y):
    # Float32 operands are multiplied in float32 everywhere: the default of a GPU would be tf32.
    acc = jnp.promote_types(x.dtype, jnp.float32)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(spec, x, y, preferred_element_type=acc, precision=precision)


def _split(x_BT):
    """[B, T, ...] to [n, B, L, ...]: blocks of at most QUERY_BLOCK queries, the last one padded with zeros."""
    B, T, *rest = x_BT.shape
    L = min(QUERY_BLOCK, T)
    x_BT = jnp.pad(x_BT, [(0, 0), (0, -T % L)] + [(0, 0)] * len(rest))
    return jnp.moveaxis(x_BT.reshape(B, -1, L, *rest), 1, 0)


def _join(x_nBL, T):
    n, B, L, *rest = x_nBL.shape
    return jnp.moveaxis(x_nBL, 0, 1).reshape(B, n * L, *rest)[:, :T]


def _block_starts(blocks):
    return jnp.arange(blocks.shape[0]) * blocks.shape[2]
