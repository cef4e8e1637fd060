"""The rule of StreamingLLM for policies that are more than it: beside pinned tokens, the oldest goes."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvpop_jax.cache import PROTECTED, LayerCache, empty_slot, live_entries, place, weakest
from kvpop_jax.policies.machinery.base import NewToken, Prompt


def age_priority(prompt: Prompt) -> Float[Array, "B K S"]:
    """Every token's position."""
    B, S, K, _D = prompt.k_BSKD.shape
    return jnp.broadcast_to(prompt.layout.position_BS[:, None], (B, K, S)).astype(jnp.float32)


def oldest(cache: LayerCache, new: NewToken) -> Int[Array, "B K"]:
    """The slot of the oldest token that is not pinned."""
    pinned_BKC = cache.position_BKC < new.pinned_B[:, None, None]
    age_BKC = jnp.where(pinned_BKC, PROTECTED, cache.position_BKC.astype(jnp.float32))
    return weakest(age_BKC, cache.position_BKC)


def place_oldest(
    cache: LayerCache, new: NewToken, capacity: int | Int[Array, "B K"]
) -> tuple[LayerCache, Int[Array, "B K"]]:
    """Puts the new token where the oldest is, or where nothing is while a head holds less than its capacity."""
    full_BK = live_entries(cache) >= capacity
    slot_BK = jnp.where(full_BK, oldest(cache, new), empty_slot(cache))
    # A token's priority is its age here too.
    return place(cache, slot_BK, new.position_B, new.position_B.astype(jnp.float32), new.own_B)
