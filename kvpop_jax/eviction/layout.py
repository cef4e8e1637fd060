"""What an eviction rule must know of the tokens of a packed row."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.scans import running_max, running_min


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["segment_BS", "position_BS", "pinned_BS", "pool_BS"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TokenLayout:
    """Documents of a row, and what each of them may keep.

    Attributes:
        segment_BS: document of each token, numbered from 1 in contiguous runs; 0 is padding.
        position_BS: position within the document.
        pinned_BS: tokens that never leave and do not compete: the sinks, or the whole prompt. A prefix of the document.
        pool_BS: slots of the pool, the same for every token of a document.
    """

    segment_BS: Int[Array, "B S"]
    position_BS: Int[Array, "B S"]
    pinned_BS: Bool[Array, "B S"]
    pool_BS: Int[Array, "B S"]


def token_layout(
    segment_BS: Int[Array, "B S"],
    *,
    sinks: int,
    pool: int | Int[Array, "B"],
    prompt_BS: Bool[Array, "B S"] | None = None,
) -> TokenLayout:
    """Layout of a row whose documents keep `sinks` tokens, or their whole prompt, and compete for `pool` slots.

    Args:
        segment_BS: document of each token, in contiguous runs; 0 is padding.
        sinks: leading tokens of each document that never leave.
        pool: slots beyond sinks and window; one number, or one per row.
        prompt_BS: pins the marked prefix of every document as well. Each pinned token beyond the sinks takes a slot
            from its document's pool, which the caller must have found large enough.
    """
    index_S = jnp.arange(segment_BS.shape[1])
    starts_BS = segment_BS != jnp.pad(segment_BS, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    first_BS = running_max(jnp.where(starts_BS, index_S, 0))
    position_BS = index_S - first_BS
    pinned_BS = position_BS < sinks
    pool_BS = jnp.broadcast_to(jnp.asarray(pool, jnp.int32).reshape(-1, 1), segment_BS.shape)
    if prompt_BS is not None:
        extra_BS = prompt_BS & ~pinned_BS
        pinned_BS |= prompt_BS
        extra_total_BS = _total_per_segment(extra_BS, first_BS)
        pool_BS = jnp.maximum(pool_BS - extra_total_BS, 0)
    return TokenLayout(segment_BS, position_BS, pinned_BS, pool_BS)


def eligible_range(layout: TokenLayout, window: int) -> tuple[Int[Array, "B S"], Int[Array, "B S"]]:
    """The tokens that compete at each query `q`, as a range of row indices: those neither pinned nor in `(q - w, q]`.

    Returns:
        First index and the index past the last one; equal where nothing competes yet.
    """
    index_S = jnp.arange(layout.segment_BS.shape[1])
    first_BS = index_S - layout.position_BS
    start_BS = first_BS + _total_per_segment(layout.pinned_BS, first_BS)
    return start_BS, jnp.maximum(index_S - window + 1, start_BS)


def segment_stop(segment_BS: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Row index just past the document of each token."""
    S = segment_BS.shape[1]
    ends_BS = segment_BS != jnp.pad(segment_BS, ((0, 0), (0, 1)), constant_values=-1)[:, 1:]
    return running_min(jnp.where(ends_BS, jnp.arange(1, S + 1), S), reverse=True)


def _total_per_segment(mark_BS, first_BS):
    """How many marked tokens the segment of each token holds, of a row whose segments start at `first_BS`."""
    S = mark_BS.shape[1]
    add_at = jax.vmap(lambda first_S, mark_S: jnp.zeros(S, jnp.int32).at[first_S].add(mark_S.astype(jnp.int32)))
    return jnp.take_along_axis(add_at(first_BS, mark_BS), first_BS, axis=1)
