"""The largest of many numbers, without sorting all of them."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_BLOCKS = 128, 16
"""Lengths of the blocks of each round. Of 151,936 numbers and 256 to find, what is sorted is then 1,187 maxima, 2,048,
and 4,096 numbers."""


def largest(x_V: Float[Array, "*L V"], count: int) -> Float[Array, "*L count"]:
    """The values of `lax.top_k(x_V, count)`, exactly, for any `count` up to V.

    TPUs and CPUs search for them; a GPU would sort all.
    """
    return lax.platform_dependent(
        x_V, cuda=lambda x_V: largest_by_blocks(x_V, count), default=lambda x_V: lax.top_k(x_V, count)[0]
    )


def largest_by_blocks(x_V: Float[Array, "*L V"], count: int) -> Float[Array, "*L count"]:
    """The same where a search is a sort, which is then of few numbers.

    They lie in the `count` blocks with the largest maxima: no other block has one that is larger than the least of
    those maxima, and `count` numbers are as large. So most numbers are only read once, for their block's maximum.
    """
    for length in _BLOCKS:
        blocks = math.ceil(x_V.shape[-1] / length)
        if blocks <= count:
            break
        missing = blocks * length - x_V.shape[-1]
        padded_V = jnp.pad(x_V, [(0, 0)] * (x_V.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)
        block_NB = padded_V.reshape(*x_V.shape[:-1], blocks, length)
        best_K = lax.top_k(block_NB.max(axis=-1), count)[1]
        found_KB = jnp.take_along_axis(block_NB, best_K[..., None], axis=-2, mode="promise_in_bounds")
        x_V = found_KB.reshape(*x_V.shape[:-1], -1)
    return lax.top_k(x_V, count)[0]
