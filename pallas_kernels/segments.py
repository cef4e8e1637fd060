"""What kernels know of documents: where each ends. An equality of ids becomes a bound on positions, one per key."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.scans import running_min

_NONE = 2**31 - 1


def segment_end(segment_BS: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """First position past the run of equal ids that each position is in; 0 for padding.

    A query `q >= t` is in the document of key `t` iff `q < segment_end[t]`, since documents are runs.
    """
    S = segment_BS.shape[1]
    last_BS = segment_BS != jnp.pad(segment_BS, ((0, 0), (0, 1)), constant_values=-1)[:, 1:]
    end_BS = running_min(jnp.where(last_BS, jnp.arange(1, S + 1, dtype=jnp.int32), _NONE), reverse=True)
    return jnp.where(segment_BS > 0, end_BS, 0)
