"""Losses over a vocabulary, computed a stretch of tokens at a time: all logits at once never exist.

At 16,384 tokens and a vocabulary of 151,936 they would take 10 GB, and as much again for their gradient.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvpop_jax.sharding import constrain, rows_per_shard
from kvpop_jax.training.largest import largest
from pallas_kernels.residuals import SAVE_RESIDUALS, saved

_LOGITS_AT_ONCE = 2**27
"""Logits held at a time: 0.5 GiB in float32."""

_TIE = 1e-3
"""Nats between two likelihoods that count as equal."""

_TILE = 128
"""What stretches are rounded down to: rows of a matrix unit."""

Unembed = Callable[[Float[Array, "L E"]], Float[Array, "L V"]]
"""Hidden states (after the final norm) to float32 logits."""


def predicts(segment_BS: Int[Array, "B S"], loss_BS: Bool[Array, "B S"]) -> Bool[Array, "B S"]:
    """Where the next token is of the same document and is to be predicted."""
    same_BS = (segment_BS[:, 1:] == segment_BS[:, :-1]) & (segment_BS[:, 1:] > 0)
    return jnp.pad(same_BS & loss_BS[:, 1:], ((0, 0), (0, 1)))


def terms(predicts_BS: Bool[Array, "B S"]) -> Float[Array, ""]:
    """How many positions a mean over those that are marked is of."""
    return jnp.sum(predicts_BS, dtype=jnp.float32)


def cross_entropy(
    hidden_BSE: Float[Array, "B S E"],
    unembed: Unembed,
    token_BS: Int[Array, "B S"],
    predicts_BS: Bool[Array, "B S"],
    vocab_size: int,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean cross entropy of the next token, in nats, over the positions that `predicts` marks.

    Returns:
        The loss, and the share of those tokens that are the likeliest one.
    """
    next_BS = jnp.pad(token_BS[:, 1:], ((0, 0), (0, 1)))

    def chunk_sums(hidden_LE, next_L, weight_L):
        logits_LV = unembed(hidden_LE)
        picked_L = jnp.take_along_axis(logits_LV, next_L[..., None], axis=-1)[..., 0]
        nll_L = jax.nn.logsumexp(logits_LV, axis=-1) - picked_L
        return jnp.sum(weight_L * nll_L), jnp.sum(weight_L * (jnp.argmax(logits_LV, axis=-1) == next_L))

    return _mean_over_chunks(chunk_sums, predicts_BS, vocab_size, hidden_BSE, next_BS)


def kl_to_teacher(
    student_BSE: Float[Array, "B S E"],
    student_unembed: Unembed,
    teacher_BSE: Float[Array, "B S E"],
    teacher_unembed: Unembed,
    predicts_BS: Bool[Array, "B S"],
    vocab_size: int,
    *,
    top_k: int,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean KL divergence of the student from the teacher's `top_k` likeliest tokens, in nats (KVpop section 1.6).

    The teacher is renormalised on its own `top_k`, and on what is as likely as the last of them to a thousandth; the
    student's probabilities are of the whole vocabulary, so that mass it puts outside of them costs it. The mean is over
    the positions that `predicts` marks.

    Returns:
        The loss (gradients reach the student only), and the share of positions where a likeliest token of both is the
        same.
    """
    teacher_BSE = lax.stop_gradient(teacher_BSE)
    top_k = min(top_k, vocab_size)

    def chunk_sums(student_LE, teacher_LE, weight_L):
        # Likelihoods are compared with the least of the top_k, not gathered: the gradient of a gather is a scatter,
        # over which the TPU compiler takes minutes. It is kept, and so is every other number that a token has but one
        # of: the backward pass then reads each logit once, and searches and sums nothing again. The logits that it
        # makes again may be rounded otherwise, and must not lose the last of the top_k by that.
        teacher_LV = lax.stop_gradient(teacher_unembed(teacher_LE))
        top_LK = largest(teacher_LV, top_k)
        peak_L1, least_L1 = saved(top_LK[..., :1]), saved(top_LK[..., -1:] - _TIE)
        logits_LV = student_unembed(student_LE)
        student_peak_L1 = saved(lax.stop_gradient(jnp.max(logits_LV, axis=-1, keepdims=True)))
        above_LV, student_above_LV = teacher_LV - peak_L1, logits_LV - student_peak_L1
        # Of what is left out, the share is 0. A `where` would read that 0 from an array of the logits' size, which JAX
        # takes to be a constant of the loop and makes outside of it.
        share_LV = jnp.exp(above_LV) * (teacher_LV >= least_L1)
        total_L, student_total_L = saved(share_LV.sum(axis=-1)), saved(jnp.exp(student_above_LV).sum(axis=-1))
        # Times 0, both may be -inf.
        gap_L = jnp.sum(jnp.where(share_LV > 0, share_LV * (above_LV - student_above_LV), share_LV), axis=-1)
        kl_L = gap_L / total_L + jnp.log(student_total_L) - jnp.log(total_L)
        agree_L = jnp.any((above_LV == 0) & (student_above_LV == 0), axis=-1)
        return jnp.sum(weight_L * kl_L), jnp.sum(weight_L * agree_L)

    return _mean_over_chunks(chunk_sums, predicts_BS, vocab_size, student_BSE, teacher_BSE)


def _mean_over_chunks(
    chunk_sums: Callable[..., tuple[Float[Array, ""], Float[Array, ""]]],
    weight_BS: Bool[Array, "B S"],
    vocab_size: int,
    *arrays: Any,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Weighted means of what `chunk_sums(*arrays, weight)` sums up, over stretches of tokens that are recomputed in the
    backward pass."""
    B, S = weight_BS.shape
    # A stretch goes along the rows, so that rows may lie on different devices.
    length = max(1, min(S, _LOGITS_AT_ONCE // (vocab_size * rows_per_shard(B))))
    length -= length % _TILE if length > _TILE else 0

    def chunked(array):
        padded = jnp.pad(array, ((0, 0), (0, -S % length), *((0, 0) for _ in array.shape[2:])))
        return jnp.moveaxis(padded.reshape(B, -1, length, *array.shape[2:]), 1, 0)

    weight = weight_BS.astype(jnp.float32)
    part_sums = jax.checkpoint(chunk_sums, policy=SAVE_RESIDUALS)

    def placed_sums(chunk):
        # Said inside the loop, so that gradients of hidden states keep their rows as well. Cut along E instead, as the
        # head is, they would take the gradients of the logits of all devices to each.
        return part_sums(*(constrain(x, "B") for x in chunk))

    parts = lax.map(placed_sums, (*map(chunked, arrays), chunked(weight)))
    total = jnp.maximum(weight.sum(), 1)
    return parts[0].sum() / total, lax.stop_gradient(parts[1].sum() / total)
