"""The bounded cache of one layer: unordered slots, one victim per step, exact accounting of its budget.

- `budget`: how a budget is spent (`CachePlan`).
- `layer`: the slots and what happens to them (`LayerCache`).
"""

from kvpop_jax.cache.budget import CachePlan, cache_dtype_of, entry_bytes, plan_cache
from kvpop_jax.cache.layer import (
    LayerCache,
    cache_from_prompt,
    empty_slot,
    leaving_token,
    live_entries,
    place,
    survived,
    weakest,
)
from pallas_kernels.leaving import Leaving
from pallas_kernels.take_slot import CLOSED, EMPTY, PROTECTED

__all__ = [
    "CLOSED",
    "EMPTY",
    "PROTECTED",
    "CachePlan",
    "LayerCache",
    "Leaving",
    "cache_dtype_of",
    "cache_from_prompt",
    "empty_slot",
    "entry_bytes",
    "leaving_token",
    "live_entries",
    "place",
    "plan_cache",
    "survived",
    "weakest",
]
