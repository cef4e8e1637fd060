"""The slots of one layer. Slots are unordered: a new row lands in a victim's slot and nothing ever shifts."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvpop_jax.cache.budget import CachePlan
from pallas_kernels.rows import Rows, read_rows, to_rows

PROTECTED = jnp.inf
"""Priority of a token that may not be evicted: in the window, a sink, or pinned."""

EMPTY, CLOSED = -1, -2
"""Positions of slots without a token: one that the next may take, and one that fills the buffer only."""


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
        ring_BKW: slot of position `p` at `p mod w`, for the `w` tokens of the window.
        state: whatever the policy keeps beside.
    """

    k_BKCD: Rows
    v_BKCD: Rows
    position_BKC: Int[Array, "B K C"]
    priority_BKC: Float[Array, "B K C"]
    ring_BKW: Int[Array, "B K W"]
    state: Any


@partial(jax.tree_util.register_dataclass, data_fields=["slot_BK", "position_B", "k_BKD", "v_BKD"], meta_fields=[])
@dataclass(frozen=True)
class Leaving:
    """The token that leaves the window as a new one arrives.

    Its position is negative while there is none. A head that no longer holds it (the prompt may have been cut by
    another policy) has a slot past the last one, and zeros.
    """

    slot_BK: Int[Array, "B K"]
    position_B: Int[Array, "B"]
    k_BKD: Float[Array, "B K D"]
    v_BKD: Float[Array, "B K D"]


def leaving_token(cache: LayerCache, position_B: Int[Array, "B"]) -> Leaving:
    """The token that the arrival of `position` pushes out of the window: position - w."""
    window, slots = cache.ring_BKW.shape[-1], cache.position_BKC.shape[-1]
    slot_BK = jnp.take_along_axis(cache.ring_BKW, (position_B % window)[:, None, None], axis=-1)[..., 0]
    leaving_B = position_B - window
    inside_BK = jnp.minimum(slot_BK, slots - 1)
    held_BK = _row(cache.position_BKC, inside_BK) == jnp.maximum(leaving_B, 0)[:, None]
    row = partial(_row, slot_BK=inside_BK)
    k_BKD, v_BKD = (
        jnp.where(held_BK[..., None], read_rows(jax.tree.map(row, x)), 0) for x in (cache.k_BKCD, cache.v_BKCD)
    )
    return Leaving(jnp.where(held_BK, slot_BK, slots), leaving_B, k_BKD, v_BKD)


def replace_priority(
    cache: LayerCache, slot_BK: Int[Array, "B K"], priority_BK: Float[Array, "B K"], where_B: Bool[Array, "B"]
) -> LayerCache:
    """Gives the token in `slot` its priority, in the rows marked by `where`."""
    slots = cache.position_BKC.shape[-1]
    chosen_BKC = (jnp.arange(slots) == slot_BK[..., None]) & where_B[:, None, None]
    priority_BKC = priority_BK[..., None].astype(cache.priority_BKC.dtype)
    return replace(cache, priority_BKC=jnp.where(chosen_BKC, priority_BKC, cache.priority_BKC))


def choose_victim(cache: LayerCache) -> Int[Array, "B K"]:
    """The slot that the next row takes: an empty one, else the weakest."""
    key_BKC = jnp.where(cache.position_BKC < 0, jnp.inf, cache.priority_BKC)
    key_BKC = jnp.where(cache.position_BKC == EMPTY, -jnp.inf, key_BKC)
    return _lowest(key_BKC, cache.position_BKC)


def weakest(priority_BKC: Float[Array, "B K C"], position_BKC: Int[Array, "B K C"]) -> Int[Array, "B K"]:
    """The occupied slot that is the lexicographic minimum of (priority, -position).

    Of equal priorities the younger token goes, as in `ranks`, where the older one ranks first.
    """
    return _lowest(jnp.where(position_BKC < 0, jnp.inf, priority_BKC), position_BKC)


def place(cache: LayerCache, slot_BK: Int[Array, "B K"], position_B: Int[Array, "B"]) -> LayerCache:
    """Records that the token at `position` now lives in `slot`, protected by the window. Its k and v are written by
    `decode_attention`."""
    chosen_BKC = jnp.arange(cache.position_BKC.shape[-1]) == slot_BK[..., None]
    window = cache.ring_BKW.shape[-1]
    at_BKW = jnp.arange(window) == (position_B % max(window, 1))[:, None, None]
    return replace(
        cache,
        position_BKC=jnp.where(chosen_BKC, position_B[:, None, None], cache.position_BKC),
        priority_BKC=jnp.where(chosen_BKC, PROTECTED, cache.priority_BKC),
        ring_BKW=jnp.where(at_BKW, slot_BK[..., None], cache.ring_BKW),
    )


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


def _lowest(key_BKC: Array, position_BKC: Array) -> Array:
    lowest_BKC = key_BKC == jnp.min(key_BKC, axis=-1, keepdims=True)
    return jnp.argmax(jnp.where(lowest_BKC, position_BKC, CLOSED - 1), axis=-1)


def _gather(x_BKS: Array, token_BKC: Array) -> Array:
    """The rows of the tokens, 0 for a token past the end."""
    take = jax.vmap(jax.vmap(lambda x_S, token_C: jnp.take(x_S, token_C, axis=0, mode="fill", fill_value=0)))
    return take(x_BKS, token_BKC)


def _row(x: Array, slot_BK: Array) -> Array:
    """What is in each head's slot of an array [B, K, C, ...]."""
    return jnp.take_along_axis(x, slot_BK.reshape(*slot_BK.shape, *(1,) * (x.ndim - 2)), axis=2)[:, :, 0]
