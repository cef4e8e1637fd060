"""The slots of one layer. Slots are unordered: a new row lands in a victim's slot and nothing ever shifts."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvpop_jax.cache.budget import CachePlan
from pallas_kernels.leaving import Leaving
from pallas_kernels.rows import Rows, to_rows
from pallas_kernels.take_slot import CLOSED, EMPTY, weakest_slot


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["k_BKCD", "v_BKCD", "position_BKC", "priority_BKC", "ring_BKW", "state"],
    meta_fields=[],
)
@dataclass(frozen=True)
class LayerCache:
    """Keys, values and what a policy knows of them. Every leaf has the row as its first axis, so rows can be forked.

    Attributes:
        k_BKCD, v_BKCD: [B, K, C, D], plain or quantised; cached after rotary embedding at their true positions.
        position_BKC: position of the token in each slot; negative without one: `EMPTY`, or `CLOSED` where none may be.
        priority_BKC: float32; the lowest goes first. `PROTECTED` while a token may not be evicted, unless the policy
            reads that off its position.
        ring_BKW: slot of position `p` at `p mod w`, for the `w` tokens of the window; kept up by `take_slot`, for the
            policies that ask which token leaves the window.
        state: whatever the policy keeps beside.
    """

    k_BKCD: Rows
    v_BKCD: Rows
    position_BKC: Int[Array, "B K C"]
    priority_BKC: Float[Array, "B K C"]
    ring_BKW: Int[Array, "B K W"]
    state: Any


def leaving_token(cache: LayerCache, position_B: Int[Array, "B"]) -> Leaving:
    """The token that the arrival of `position` pushes out of the window: position - w."""
    return Leaving(position_B, cache.k_BKCD, cache.v_BKCD, cache.position_BKC, cache.ring_BKW)


def weakest(priority_BKC: Float[Array, "B K C"], position_BKC: Int[Array, "B K C"]) -> Int[Array, "B K"]:
    """The occupied slot that is the lexicographic minimum of (priority, -position).

    Of equal priorities the younger token goes, as in `ranks`, where the older one ranks first.
    """
    return weakest_slot(jnp.where(position_BKC < 0, jnp.inf, priority_BKC), position_BKC)


def empty_slot(cache: LayerCache) -> Int[Array, "B K"]:
    """The first slot that is empty; 0 in a head without one."""
    return jnp.argmax(cache.position_BKC == EMPTY, axis=-1)


def place(
    cache: LayerCache,
    slot_BK: Int[Array, "B K"],
    position_B: Int[Array, "B"],
    priority_B: Float[Array, "B"],
    own_B: Bool[Array, "B"],
) -> tuple[LayerCache, Int[Array, "B K"]]:
    """Records that the token at `position` now lives in `slot`, in the rows marked by `own`; not in the ring.

    Returns:
        The cache, and where `decode_attention` is to write k and v: in the other rows past the last slot, which is
        nowhere.
    """
    slots = cache.position_BKC.shape[-1]
    slot_BK = jnp.where(own_B[:, None], slot_BK, slots)
    chosen_BKC = jnp.arange(slots) == slot_BK[..., None]
    position_BKC, priority_BKC = (
        jnp.where(chosen_BKC, new_B[:, None, None].astype(old_BKC.dtype), old_BKC)
        for new_B, old_BKC in ((position_B, cache.position_BKC), (priority_B, cache.priority_BKC))
    )
    return replace(cache, position_BKC=position_BKC, priority_BKC=priority_BKC), slot_BK


def cache_from_prompt(
    k_BSKD: Float[Array, "B S K D"],
    v_BSKD: Float[Array, "B S K D"],
    alive_BKS: Bool[Array, "B K S"],
    priority_BKS: Float[Array, "B K S"],
    length_B: Int[Array, "B"],
    plan: CachePlan,
    state: Any,
) -> LayerCache:
    """Compacts the survivors of a prompt into slots.

    Args:
        k_BSKD, v_BSKD: of the whole right-padded prompt.
        alive_BKS: the tokens to keep, at most `plan.slots` per head; a slot past the last one stands for none.
        priority_BKS: theirs, `PROTECTED` in the window and where pinned.
        length_B: tokens of each prompt.
        plan: sizes of the cache, and what its rows are quantised to.
        state: the policy's state after the prompt.
    """
    B, K, S = alive_BKS.shape
    slots, window = plan.allocated, plan.window
    slot_BKS = jnp.where(alive_BKS, jnp.cumsum(alive_BKS, axis=-1) - 1, slots)
    scatter = jax.vmap(jax.vmap(lambda slot_S: jnp.full(slots, S).at[slot_S].set(jnp.arange(S), mode="drop")))
    token_BKC = scatter(slot_BKS)
    k_BKCD, v_BKCD = (to_rows(_gather(jnp.swapaxes(x, 1, 2), token_BKC), plan.rows) for x in (k_BSKD, v_BSKD))
    priority_BKC = _gather(priority_BKS.astype(jnp.float32), token_BKC)
    # The youngest token at or before the last one whose position is w modulo the window.
    last_B1 = length_B[:, None] - 1
    token_BW = jnp.maximum(last_B1 - (last_B1 - jnp.arange(window)) % max(window, 1), 0)
    ring_BKW = jnp.take_along_axis(slot_BKS, jnp.broadcast_to(token_BW[:, None], (B, K, window)), axis=-1)
    vacant_C = jnp.where(jnp.arange(slots) < plan.slots, EMPTY, CLOSED)
    position_BKC = jnp.where(token_BKC < S, token_BKC, vacant_C).astype(jnp.int32)
    return LayerCache(k_BKCD, v_BKCD, position_BKC, priority_BKC, ring_BKW.astype(jnp.int32), state)


def live_entries(cache: LayerCache) -> Int[Array, "B K"]:
    """Occupied slots of every KV head."""
    return jnp.sum(cache.position_BKC >= 0, axis=-1)


def survived(cache: LayerCache, length_B: Int[Array, "B"]) -> Float[Array, "B"]:
    """Share of the first `length` tokens that are still cached, averaged over the KV heads."""
    kept_BKC = (cache.position_BKC >= 0) & (cache.position_BKC < length_B[:, None, None])
    return kept_BKC.sum(-1).mean(-1) / length_B


def _gather(x_BKS: Array, token_BKC: Array) -> Array:
    """The rows of the tokens, 0 for a token past the end."""
    take = jax.vmap(jax.vmap(lambda x_S, token_C: jnp.take(x_S, token_C, axis=0, mode="fill", fill_value=0)))
    return take(x_BKS, token_BKC)
