"""Running extremes along the last axis, in a form that compilers take at once.

By blocks of blocks, each compared with itself: the TPU compiler takes 15 s for `lax.cummin` over 131,072 positions, and
0.4 s for this.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

_BLOCK = 128
_LEAST, _LARGEST = -(2**31), 2**31 - 1


def running_max(x: Int[Array, "... S"]) -> Int[Array, "... S"]:
    """The maximum of each entry and all before it, int32."""
    return _running(x.astype(jnp.int32), jnp.max, _LEAST)


def running_min(x: Int[Array, "... S"], *, reverse: bool = False) -> Int[Array, "... S"]:
    """The minimum of each entry and all before it, or all after it, int32."""
    if reverse:
        return jnp.flip(running_min(jnp.flip(x, -1)), -1)
    return _running(x.astype(jnp.int32), jnp.min, _LARGEST)


def _running(x: jax.Array, reduce: Callable[..., jax.Array], nothing: int) -> jax.Array:
    S = x.shape[-1]
    if S <= _BLOCK:
        return _of_block(x, reduce, nothing)
    unpadded = [(0, 0)] * (x.ndim - 1)
    blocks = jnp.pad(x, [*unpadded, (0, -S % _BLOCK)], constant_values=nothing).reshape(*x.shape[:-1], -1, _BLOCK)
    before = jnp.pad(_running(reduce(blocks, -1), reduce, nothing), [*unpadded, (1, 0)], constant_values=nothing)
    both = jnp.stack([_of_block(blocks, reduce, nothing), jnp.broadcast_to(before[..., :-1, None], blocks.shape)])
    return reduce(both, 0).reshape(*x.shape[:-1], -1)[..., :S]


def _of_block(x: jax.Array, reduce: Callable[..., jax.Array], nothing: int) -> jax.Array:
    at = jnp.arange(x.shape[-1])
    return reduce(jnp.where(at[:, None] <= at, x[..., :, None], nothing), -2)
