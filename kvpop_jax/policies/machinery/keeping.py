"""Ranking tokens of a prompt, protecting some, and keeping the best."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvpop_jax.cache import PROTECTED
from kvpop_jax.policies.machinery.base import Kept, Prompt


def keep_best(
    alive_BKS: Bool[Array, "B K S"], priority_BKS: Float[Array, "B K S"], count: int | Int[Array, "B K"]
) -> Bool[Array, "B K S"]:
    """The `count` tokens of highest priority among those alive, per head; of equal ones the older."""
    order_BKS = jnp.lexsort((-priority_BKS, ~alive_BKS), axis=-1)
    return alive_BKS & (inverse_permutation(order_BKS) < jnp.asarray(count)[..., None])


def protect(priority_BKS: Float[Array, "B K S"], prompt: Prompt, window: int) -> Float[Array, "B K S"]:
    """`PROTECTED` for pinned tokens (sinks are) and for the last `window` ones."""
    return jnp.where(protected_tokens(prompt, window)[:, None], PROTECTED, priority_BKS)


def protected_tokens(prompt: Prompt, window: int) -> Bool[Array, "B S"]:
    """Pinned tokens, and the last `window` ones."""
    layout = prompt.layout
    return layout.pinned_BS | (layout.position_BS > prompt_length(prompt)[:, None] - 1 - window)


def prompt_length(prompt: Prompt) -> Int[Array, "B"]:
    """Tokens of each row that are not padding."""
    return jnp.sum(prompt.layout.segment_BS > 0, axis=1)


def keep_all(prompt: Prompt) -> Kept:
    """The whole prompt, without its padding."""
    B, S, K, _D = prompt.k_BSKD.shape
    alive_BKS = jnp.broadcast_to((prompt.layout.segment_BS > 0)[:, None], (B, K, S))
    return Kept(alive_BKS, prompt.k_BSKD, prompt.v_BSKD)


def inverse_permutation(order: Int[Array, "... S"]) -> Int[Array, "... S"]:
    """Where each index stands in `order`, along the last axis."""
    index = jnp.broadcast_to(jnp.arange(order.shape[-1]), order.shape)
    return jnp.put_along_axis(jnp.zeros_like(order), order, index, axis=-1, inplace=False)
