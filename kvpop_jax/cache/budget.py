"""How a budget is spent. Policies are compared only at equal budgets, so every entry is accounted for."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from kvpop_jax.errors import UserError
from pallas_kernels.rows import ROW_DTYPES, row_bytes


@dataclass(frozen=True)
class CachePlan:
    """Entries per KV head of one layer's cache.

    Attributes:
        budget: what was asked for: sinks + window + pool + state_entries.
        sinks: first tokens that never leave.
        window: most recent tokens, the query included, that never leave.
        pool: slots that all other tokens compete for.
        state_entries: what the policy's own state (the scorer's memory, say) would hold as entries, rounded up.
        scratch: slots beyond the budget: needed within a step, between two compressions, or for heads that share a
            budget unevenly; reported, never hidden.
        closed: slots that no token may take; they only bring the buffer to a size that kernels like. Allocated, so
            reported.
        prompt: what the prompt is cut to, where another policy does that.
        rows: name of the type that keys and values are quantised to; None keeps the one they come in.
    """

    budget: int
    sinks: int
    window: int
    pool: int
    state_entries: int
    scratch: int
    closed: int = 0
    prompt: "CachePlan | None" = None
    rows: str | None = None

    @property
    def for_prompt(self) -> "CachePlan":
        """The plan of whichever policy cuts the prompt."""
        return self if self.prompt is None else self.prompt

    @property
    def capacity(self) -> int:
        """Entries that may be live between two steps: the slots without scratch."""
        return self.slots - self.scratch

    @property
    def slots(self) -> int:
        """Slots that tokens may take."""
        return self.sinks + self.window + self.pool + self.scratch

    @property
    def allocated(self) -> int:
        """Slots that are allocated."""
        return self.slots + self.closed

    def aligned(self, multiple: int) -> "CachePlan":
        """The same plan with as many closed slots as bring the buffer to that multiple."""
        return replace(self, closed=-self.slots % multiple)

    def pool_beside(self, pinned: Any) -> Any:
        """Slots of the pool beside `pinned` tokens that never leave (a number or an array of them)."""
        return self.pool - (pinned - self.sinks)

    def check_prompt(self, length: int) -> None:
        """Refuses to pin a prompt that would leave no pool.

        Raises:
            UserError: naming both lengths.
        """
        longest = self.sinks + self.pool - 1
        if length > longest:
            raise UserError(
                f"pin_prompt: a prompt of {length} tokens leaves no pool in a budget of {self.budget}; "
                f"it may have {longest} (window {self.window}, policy state {self.state_entries})"
            )


def entry_bytes(head_dim: int, dtype: DTypeLike) -> int:
    """Bytes of one entry: a key and a value of one head, each with its scale where the type has one."""
    return 2 * row_bytes(head_dim, dtype)


def cache_dtype_of(rows: str | None, dtype: DTypeLike) -> jnp.dtype:
    """The type of cached keys and values: that of the name, or else the model's.

    Raises:
        UserError: an unknown name.
    """
    if rows is not None and rows not in ROW_DTYPES:
        raise UserError(f"cache_dtype must be {' or '.join(ROW_DTYPES)}, or left out for the model's own, not {rows!r}")
    return jnp.dtype(dtype) if rows is None else ROW_DTYPES[rows]


def plan_cache(
    policy: str, budget: int, *, sinks: int, window: int, state_bytes: int, entry_bytes: int, scratch: int = 0
) -> CachePlan:
    """Splits a budget.

    Args:
        policy: its name, for the error.
        budget: entries per KV head.
        sinks, window: as in `CachePlan`.
        state_bytes: bytes per KV head of the policy's own state.
        entry_bytes: bytes of one key and one value.
        scratch: extra slots.

    Raises:
        UserError: nothing is left for the pool.
    """
    state_entries = -(-state_bytes // entry_bytes)
    pool = budget - sinks - window - state_entries
    if pool < 1:
        raise UserError(
            f"budget {budget} leaves no pool for policy {policy}: sinks {sinks} + window {window} + "
            f"policy state {state_entries} take {budget - pool}; ask for at least {budget - pool + 1}"
        )
    return CachePlan(budget, sinks, window, pool, state_entries, scratch)
