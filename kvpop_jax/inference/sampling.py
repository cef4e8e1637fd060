"""Logits to tokens."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvpop_jax.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes:
        temperature: 0 is greedy.
        top_k: sample among this many of the likeliest tokens; 0 for all.
        top_p: sample among the likeliest tokens that together reach this probability; 1 for all.
        max_new_tokens: longest completion.
        stop_tokens: token ids that end a completion, beside the model's own.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 256
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.temperature >= 0:  # a NaN is refused too
            raise UserError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise UserError(f"top_k must be 0 or more and top_p in (0, 1], not {self.top_k} and {self.top_p}")
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        for token in self.stop_tokens:
            if not isinstance(token, int | np.integer):
                raise UserError(f"stop_tokens must be token ids, not {token!r}")


def sample(
    logits_BV: Float[Array, "B V"], seed_B: Int[Array, "B"], position_B: Int[Array, "B"], params: SamplingParams
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Draws one token per row and gives its log-probability under the model (before temperature and truncation).

    The draw depends on the row's seed and the position only, so a row's tokens do not depend on its batch.
    """
    log_probs_BV = jax.nn.log_softmax(logits_BV, axis=-1)
    if params.temperature == 0:
        token_B = jnp.argmax(logits_BV, axis=-1)
    else:
        kept_BV = _truncated(logits_BV / params.temperature, params)
        token_B = jax.vmap(_draw)(kept_BV, seed_B, position_B)
    return token_B.astype(jnp.int32), jnp.take_along_axis(log_probs_BV, token_B[:, None], axis=1)[:, 0]


def _draw(logits_V, seed, position):
    return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), position), logits_V)


def _truncated(logits_BV, params):
    """Logits with everything outside top-k and top-p at -inf; the likeliest token always stays."""
    if params.top_k == 0 and params.top_p == 1:
        return logits_BV
    sorted_BV = -jnp.sort(-logits_BV, axis=-1)
    if 0 < params.top_k < logits_BV.shape[-1]:
        least_B1 = sorted_BV[:, params.top_k - 1 : params.top_k]
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
        sorted_BV = jnp.where(sorted_BV < least_B1, -jnp.inf, sorted_BV)
    probabilities_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV
    inside = jnp.where(before_BV < params.top_p, sorted_BV, jnp.inf)
    return jnp.where(logits_BV < jnp.min(inside, axis=-1, keepdims=True), -jnp.inf, logits_BV)
