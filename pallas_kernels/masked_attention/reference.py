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

from pallas_kernels.residuals import saved

QUERY_BLOCK = 128


@partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def masked_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    v_BSKD: Float[Array, "B S K D"],
    expiry_BKS: Int[Array, "B K S"],
    segment_BS: Int[Array, "B S"],
    bias_BKS: Float[Array, "B K S"] | None,
    bias_delay: int,
    capacity: int | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B H T"]]:
    """See `api.masked_attention`. All keys are visited, so that a capacity is of no use."""
    return _forward(q_BTHD, k_BSKD, v_BSKD, expiry_BKS, segment_BS, bias_BKS, bias_delay, capacity)[0]


def _forward(q_BTHD, k_BSKD, v_BSKD, expiry_BKS, segment_BS, bias_BKS, bias_delay, capacity):
    del capacity
    T, K = q_BTHD.shape[1], k_BSKD.shape[2]
    k_BKSD, v_BKSD = jnp.swapaxes(k_BSKD, 1, 2), jnp.swapaxes(v_BSKD, 1, 2)
    scores = partial(_block_scores, k_BKSD, expiry_BKS, segment_BS, bias_BKS, bias_delay)

    def block(first_and_q):
        first, q_BKGLD = first_and_q
        s_BKGLS, visible_BKLS = scores(first, q_BKGLD)
        lse_BKGL = jax.nn.logsumexp(s_BKGLS, axis=-1)
        p_BKGLS = _probabilities(s_BKGLS, lse_BKGL, visible_BKLS)
        o_BKGLD = _einsum("BKGLS,BKSD->BKGLD", p_BKGLS.astype(v_BSKD.dtype), v_BKSD)
        return o_BKGLD.astype(q_BTHD.dtype), lse_BKGL

    q_nBKGLD = _split(q_BTHD, K)
    o_nBKGLD, lse_nBKGL = lax.map(block, (_block_starts(q_nBKGLD), q_nBKGLD))
    o_BTHD, lse_BHT = saved(_join(o_nBKGLD, T)), saved(jnp.swapaxes(_join(lse_nBKGL, T), 1, 2))
    residuals = (q_BTHD, k_BSKD, v_BSKD, expiry_BKS, segment_BS, bias_BKS, o_BTHD, lse_BHT)
    return (o_BTHD, lse_BHT), residuals


def _backward(bias_delay, capacity, residuals, cotangents):
    del capacity
    q_BTHD, k_BSKD, v_BSKD, expiry_BKS, segment_BS, bias_BKS, o_BTHD, lse_BHT = residuals
    do_BTHD, dlse_BHT = cotangents
    T, D = q_BTHD.shape[1], q_BTHD.shape[3]
    acc = lse_BHT.dtype
    k_BKSD, v_BKSD = jnp.swapaxes(k_BSKD, 1, 2), jnp.swapaxes(v_BSKD, 1, 2)
    scores = partial(_block_scores, k_BKSD, expiry_BKS, segment_BS, bias_BKS, bias_delay)

    delta_BTH = jnp.sum(do_BTHD.astype(acc) * o_BTHD.astype(acc), axis=-1)
    shift_BTH = jnp.swapaxes(dlse_BHT, 1, 2) - delta_BTH  # what dP is moved by: dlse - delta
    blocks = [_split(x, k_BSKD.shape[2]) for x in (q_BTHD, do_BTHD, shift_BTH, jnp.swapaxes(lse_BHT, 1, 2))]

    def block(totals, inputs):
        dk_BKSD, dv_BKSD, dbias_BKS = totals
        first, q_BKGLD, do_BKGLD, shift_BKGL, lse_BKGL = inputs
        s_BKGLS, visible_BKLS = scores(first, q_BKGLD)
        p_BKGLS = _probabilities(s_BKGLS, lse_BKGL, visible_BKLS)
        dp_BKGLS = _einsum("BKGLD,BKSD->BKGLS", do_BKGLD, v_BKSD)
        ds_BKGLS = p_BKGLS * (dp_BKGLS + shift_BKGL[..., None])
        dscaled = (ds_BKGLS * D**-0.5).astype(q_BTHD.dtype)
        dq_BKGLD = _einsum("BKGLS,BKSD->BKGLD", dscaled, k_BKSD)
        dk_BKSD += _einsum("BKGLS,BKGLD->BKSD", dscaled, q_BKGLD)
        dv_BKSD += _einsum("BKGLS,BKGLD->BKSD", p_BKGLS.astype(v_BSKD.dtype), do_BKGLD)
        if dbias_BKS is not None:
            biased_LS = _biased(first, q_BKGLD.shape[3], k_BKSD.shape[2], bias_delay)
            dbias_BKS += jnp.sum(jnp.where(biased_LS, ds_BKGLS, 0), axis=(2, 3))
        return (dk_BKSD, dv_BKSD, dbias_BKS), dq_BKGLD.astype(q_BTHD.dtype)

    zeros = partial(jnp.zeros, dtype=acc)
    totals = (zeros(k_BKSD.shape), zeros(v_BKSD.shape), None if bias_BKS is None else zeros(bias_BKS.shape))
    (dk_BKSD, dv_BKSD, dbias_BKS), dq_nBKGLD = lax.scan(block, totals, (_block_starts(blocks[0]), *blocks))
    return (
        _join(dq_nBKGLD, T),
        jnp.swapaxes(dk_BKSD, 1, 2).astype(k_BSKD.dtype),
        jnp.swapaxes(dv_BKSD, 1, 2).astype(v_BSKD.dtype),
        None,
        None,
        None if dbias_BKS is None else dbias_BKS.astype(bias_BKS.dtype),
    )


masked_attention.defvjp(_forward, _backward)


def _block_scores(k_BKSD, expiry_BKS, segment_BS, bias_BKS, bias_delay, first, q_BKGLD):
    """Scaled scores of one block of queries, -inf where a key is not visible, and the visibility itself."""
    L, S = q_BKGLD.shape[3], k_BKSD.shape[2]
    q_L, k_S = first + jnp.arange(L), jnp.arange(S)
    # Blocks past the end of the row hold queries of no segment.
    q_segment_BL = jnp.take(segment_BS, q_L, axis=1, mode="fill", fill_value=0)
    same_BLS = (q_segment_BL[:, :, None] == segment_BS[:, None]) & (segment_BS[:, None] > 0)
    visible_BKLS = (k_S <= q_L[:, None]) & (q_L[:, None] < expiry_BKS[:, :, None]) & same_BLS[:, None]
    s_BKGLS = _einsum("BKGLD,BKSD->BKGLS", q_BKGLD, k_BKSD) * k_BKSD.shape[-1] ** -0.5
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


def _split(x_BTH, num_kv_heads):
    """[B, T, H, ...] to [n, B, K, G, L, ...]: blocks of at most QUERY_BLOCK queries, the last one padded with zeros.

    Batch axes come first and queries beside the contracted axis: the order in which XLA multiplies fast on CPUs.
    """
    B, T, H, *rest = x_BTH.shape
    L = min(QUERY_BLOCK, T)
    x_BTH = jnp.pad(x_BTH, [(0, 0), (0, -T % L)] + [(0, 0)] * (1 + len(rest)))
    x_BnLKG = x_BTH.reshape(B, -1, L, num_kv_heads, H // num_kv_heads, *rest)
    return jnp.moveaxis(x_BnLKG, (1, 2), (0, 4))


def _join(x_nBKGL, T):
    """The inverse of `_split`, without the padding."""
    n, B, K, G, L, *rest = x_nBKGL.shape
    return jnp.moveaxis(x_nBKGL, (0, 4), (1, 2)).reshape(B, n * L, K * G, *rest)[:, :T]


def _block_starts(x_nBKGL):
    return jnp.arange(x_nBKGL.shape[0]) * x_nBKGL.shape[4]
