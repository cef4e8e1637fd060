"""Eviction as data: one integer per token and KV head, the query position that no longer sees it.

- `layout`: what an eviction rule must know of a packed row (`TokenLayout`).
- `expiry`: priorities to expiry: when k better tokens have left the window.
- `compaction`: the same attention from survivors only, in linear time.
- `target`: how much attention each token will receive (what a scorer learns).
- `boundary`: the ranking loss at the edge of the pool.
- `metrics`: what a kept set is worth.
"""

from kvpop_jax.eviction.boundary import BoundaryMetrics, BoundarySettings, boundary_loss
from kvpop_jax.eviction.compaction import compacted_attention
from kvpop_jax.eviction.expiry import expiry_from_priority
from kvpop_jax.eviction.layout import TokenLayout, eligible_range, token_layout
from kvpop_jax.eviction.metrics import kept_mass, target_recall
from kvpop_jax.eviction.target import future_attention_target

__all__ = [
    "BoundaryMetrics",
    "BoundarySettings",
    "TokenLayout",
    "boundary_loss",
    "compacted_attention",
    "eligible_range",
    "expiry_from_priority",
    "future_attention_target",
    "kept_mass",
    "target_recall",
    "token_layout",
]
