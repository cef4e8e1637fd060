"""Bytes of a batch's caches, and what to do when they do not fit."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from kvpop_jax.cache import entry_bytes
from kvpop_jax.errors import UserError
from kvpop_jax.inference.decode import Setup


def cache_bytes(setup: Setup, rows: int, dtype: jax.numpy.dtype) -> int:
    """Bytes of the keys and values of that many rows, `dtype` being the model's."""
    config = setup.config
    slots = (plan.allocated * entry_bytes(config.head_dim, plan.rows or dtype) for plan in setup.plans)
    return rows * config.num_kv_heads * sum(slots)


@contextmanager
def memory_explained(setup: Setup, rows: int, dtype: jax.numpy.dtype) -> Iterator[None]:
    """Programs that do not fit on the device end in one line that says how large the caches are and what to lower.

    Raises:
        UserError: in place of the runtime's own error; any other passes as it is.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        size = f"{cache_bytes(setup, rows, dtype) / 2**30:.3g} GiB"
        kind = jax.devices()[0].device_kind
        raise UserError(
            f"out of memory on {kind}: keys and values of {rows} rows alone take {size}, beside weights and prompts; "
            "lower the rows (batch_size), the budget or, for dense, max_new_tokens, or set cache_dtype to int8"
        ) from error
