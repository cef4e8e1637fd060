"""`take_slot` for Hopper GPUs, in Pallas Mosaic GPU: one kernel where XLA makes four launches or more.

All that counts is latency. A thread block for each KV head and row has the head's slots in registers, four tiles of
them loaded together, and compares elementwise: every register keeps the weakest slot of those that it has seen. Only
then do threads exchange anything: the lowest key, the youngest position that has it, its slot, and the slot of the
token that leaves. Positions, priorities and ring are `Ref`s, which JAX lowers to aliased outputs: a head writes at most
four numbers.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backend import mosaic_gpu_is_missing
from pallas_kernels.take_slot.slots import CLOSED, EMPTY, PROTECTED

_TILES = (1024, 512, 128)  # slots of a tile: 8, 4 or 1 for each thread
_AHEAD = 4  # tiles in flight: 64 registers of each thread
_MOST = 16_384  # slots of a head that one thread block reads sooner than XLA's launches are over; an estimate
_NOWHERE = CLOSED - 1  # a position that no slot has


def refuses(position_BKC, priority_BKC, ring_BKW, leaving_priority_BK, position_B, pinned_B, own_B) -> str | None:
    """See `backend.Backend`."""
    if missing := mosaic_gpu_is_missing():
        return missing
    if any(x.dtype != jnp.int32 for x in (position_BKC, ring_BKW, position_B, pinned_B)):
        return "takes int32 positions and rings only"
    if any(x.dtype != jnp.float32 for x in (priority_BKC, leaving_priority_BK)):
        return "takes float32 priorities only"
    slots = position_BKC.shape[2]
    if slots < _TILES[-1] or slots % 4:
        return f"takes at least {_TILES[-1]} slots, in fours, not {slots}"
    return None


def pays(position_BKC, priority_BKC, ring_BKW, leaving_priority_BK, position_B, pinned_B, own_B) -> bool:
    """Whether "auto" is to prefer it: not where one thread block has too much to read."""
    return position_BKC.shape[2] <= _MOST


@jax.jit  # lowering takes seconds: once for all layers of a model, not once for each
def take_slot(position_BKC, priority_BKC, ring_BKW, leaving_priority_BK, position_B, pinned_B, own_B):
    """See `api.take_slot`."""
    B, K, _ = position_BKC.shape
    arriving_B = jnp.where(own_B, position_B, _NOWHERE)  # the same in every layer: XLA computes it once
    refs = [jax.new_ref(x) for x in (position_BKC, priority_BKC, ring_BKW)]
    with jax.enable_x64(False):  # else the kernel's indices are of 64 bits, which Mosaic GPU does not take
        slot_BK = plgpu.kernel(
            _take_slot_kernel,
            out_type=jax.ShapeDtypeStruct((B, K), jnp.int32),
            grid=(K, B),
            grid_names=("head", "row"),
            kernel_name="take_slot",
        )(*refs, leaving_priority_BK, arriving_B, pinned_B)
    return *(ref[...] for ref in refs), slot_BK


def _take_slot_kernel(position_ref, priority_ref, ring_ref, leaving_priority_ref, arriving_ref, pinned_ref, slot_ref):
    here = lax.axis_index("row"), lax.axis_index("head")
    slots, window = position_ref.shape[2], ring_ref.shape[2]
    arriving, leaving_priority = arriving_ref[here[0]], leaving_priority_ref[here]
    leaving = jnp.where(arriving - window >= pinned_ref[here[0]], arriving - window, _NOWHERE)
    size = next(size for size in _TILES if size <= slots)
    tiles = pl.cdiv(slots, size)
    ahead = min(_AHEAD, tiles)
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=min(4, size // 128))
    load = partial(plgpu.load, layout=layout, optimized=False)
    slot_L = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)

    def look(step, weakest):
        # Tiles past the end lie over the last one: a slot that is seen twice changes nothing.
        starts = [pl.multiple_of(jnp.minimum((step * ahead + i) * size, slots - size), 4) for i in range(ahead)]
        places = [(*here, pl.ds(start, size)) for start in starts]
        position_tL, priority_tL = ([load(ref.at[at]) for at in places] for ref in (position_ref, priority_ref))
        for start, position_L, priority_L in zip(starts, position_tL, priority_tL, strict=True):
            leaves_L = position_L == leaving
            key_L = jnp.where(leaves_L, leaving_priority, priority_L)
            key_L = jnp.where(position_L < 0, jnp.inf, key_L)
            key_L = jnp.where(position_L == EMPTY, -jnp.inf, key_L)
            weakest = _weaker(weakest, key_L, position_L, start + slot_L, leaves_L)
        return weakest

    def fill(value, dtype=jnp.int32):
        return plgpu.layout_cast(jnp.full((size,), value, dtype), layout)

    none = fill(jnp.inf, jnp.float32), fill(_NOWHERE), fill(0), fill(-1)
    steps = pl.cdiv(tiles, ahead)
    weakest = lax.fori_loop(jnp.int32(0), jnp.int32(steps), look, none) if steps > 1 else look(0, none)
    key_L, position_L, index_L, left_L = weakest
    youngest = jnp.max(jnp.where(key_L == jnp.min(key_L), position_L, _NOWHERE))
    # No other token has that position, and all slots without one that have it are alike.
    slot = jnp.min(jnp.where(position_L == youngest, index_L, slots))
    left = jnp.max(left_L)

    @pl.when(left >= 0)
    def _leave():
        priority_ref[*here, left] = leaving_priority

    @pl.when(arriving >= 0)
    def _arrive():  # last, for the slot may be that of the token that leaves
        position_ref[*here, slot] = arriving
        priority_ref[*here, slot] = jnp.float32(PROTECTED)
        ring_ref[*here, lax.rem(arriving, jnp.int32(window))] = slot

    slot_ref[here] = jnp.where(arriving >= 0, slot, slots)


def _weaker(weakest, key_L, position_L, index_L, leaves_L):
    """The weaker slot of each pair, the first where they are equal; and the leaving token's slot."""
    best_key_L, best_position_L, best_index_L, left_L = weakest
    weaker_L = (key_L < best_key_L) | ((key_L == best_key_L) & (position_L > best_position_L))
    return (
        jnp.where(weaker_L, key_L, best_key_L),
        jnp.where(weaker_L, position_L, best_position_L),
        jnp.where(weaker_L, index_L, best_index_L),
        jnp.where(leaves_L, index_L, left_L),
    )
