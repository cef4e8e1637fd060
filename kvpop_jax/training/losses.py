"""Losses over a vocabulary, computed a stretch of tokens at a time: all logits at once never exist.

At 16,384 tokens and a vocabulary of 151,936 they would take 10 GB, and as much again for their gradient.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvpop_jax.sharding import rows_per_shard

_LOGITS_AT_ONCE = 2**27
"""Logits held at a time: 0.5 GiB in float32."""

Unembed = Callable[[Float[Array, "L E"]], Float[Array, "L V"]]
"""Hidden states (after the final norm) to float32 logits."""


def predicts(segment_BS: Int[Array, "B S"], loss_BS: Bool[Array, "B S"]) -> Bool[Array, "B S"]:
    """Where the next token is of the same document and is to be predicted."""
    same_BS = (segment_BS[:, 1:] == segment_BS[:, :-1]) & (segment_BS[:, 1:] > 0)
    return jnp.pad(same_BS & loss_BS[:, 1:], ((0, 0), (0, 1)))


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

    The teacher is renormalised on its own `top_k`; the student's probabilities are of the whole vocabulary, so that
    mass it puts outside of them costs it. The mean is over the positions that `predicts` marks.

    Returns:
        The loss (gradients reach the student only), and the share of positions where both have the same likeliest
        token.
    """
    teacher_BSE = lax.stop_gradient(teacher_BSE)
    top_k = min(top_k, vocab_size)

    def chunk_sums(student_LE, teacher_LE, weight_L):
        top_LJ, index_LJ = lax.top_k(lax.stop_gradient(teacher_unembed(teacher_LE)), top_k)
        log_p_LJ = jax.nn.log_softmax(top_LJ, axis=-1)
        logits_LV = student_unembed(student_LE)
        log_q_LJ = jnp.take_along_axis(logits_LV, index_LJ, axis=-1)
        log_q_LJ -= jax.nn.logsumexp(logits_LV, axis=-1, keepdims=True)
        kl_L = jnp.sum(jnp.exp(log_p_LJ) * (log_p_LJ - log_q_LJ), axis=-1)
        return jnp.sum(weight_L * kl_L), jnp.sum(weight_L * (jnp.argmax(logits_LV, axis=-1) == index_LJ[..., 0]))

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

    def chunked(array):
        padded = jnp.pad(array, ((0, 0), (0, -S % length), *((0, 0) for _ in array.shape[2:])))
        return jnp.moveaxis(padded.reshape(B, -1, length, *array.shape[2:]), 1, 0)

    weight = weight_BS.astype(jnp.float32)
    parts = lax.map(lambda chunk: jax.checkpoint(chunk_sums)(*chunk), (*map(chunked, arrays), chunked(weight)))
    total = jnp.maximum(weight.sum(), 1)
    return parts[0].sum() / total, lax.stop_gradient(parts[1].sum() / total)
