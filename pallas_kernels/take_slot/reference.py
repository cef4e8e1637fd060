"""Plain JAX `take_slot`."""

import jax.numpy as jnp

from pallas_kernels.take_slot.slots import EMPTY, PROTECTED, weakest_slot


def take_slot(position_BKC, priority_BKC, ring_BKW, leaving_priority_BK, position_B, pinned_B, own_B):
    """See `api.take_slot`."""
    slots, window = position_BKC.shape[-1], ring_BKW.shape[-1]
    leaving_B = position_B - window
    competes_B11 = (own_B & (leaving_B >= pinned_B))[:, None, None]
    leaving_BKC = (position_BKC == leaving_B[:, None, None]) & competes_B11
    leaving_priority_BK1 = leaving_priority_BK[..., None].astype(priority_BKC.dtype)
    priority_BKC = jnp.where(leaving_BKC, leaving_priority_BK1, priority_BKC)

    key_BKC = jnp.where(position_BKC < 0, jnp.inf, priority_BKC)
    key_BKC = jnp.where(position_BKC == EMPTY, -jnp.inf, key_BKC)
    slot_BK = jnp.where(own_B[:, None], weakest_slot(key_BKC, position_BKC), slots).astype(jnp.int32)

    taken_BKC = jnp.arange(slots) == slot_BK[..., None]
    newest_BKW = (jnp.arange(window) == (position_B % window)[:, None, None]) & own_B[:, None, None]
    return (
        jnp.where(taken_BKC, position_B[:, None, None].astype(position_BKC.dtype), position_BKC),
        jnp.where(taken_BKC, PROTECTED, priority_BKC),
        jnp.where(newest_BKW, slot_BK[..., None], ring_BKW),
        slot_BK,
    )
