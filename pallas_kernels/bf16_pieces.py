"""Float32 products on the tensor cores of a GPU: numbers split into pieces of bfloat16.

The tensor cores multiply bfloat16 exactly and add up in float32. A float32 number is three pieces of 8 bits; of the
nine products of two such numbers the six largest are all that a float32 product would keep.
"""

import jax
import jax.numpy as jnp
from jax import lax

PIECES = 3


def split(x: jax.Array) -> list[jax.Array]:
    """Pieces that add up to x, the largest first: one of a bfloat16 array, three of a float32 one."""
    if x.dtype == jnp.bfloat16:
        return [x]
    pieces = []
    for _ in range(PIECES - 1):
        # By its bits: compilers that may keep excess precision take a conversion and back for nothing.
        rounded = lax.bitcast_convert_type(x, jnp.int32) + 0x8000 & -0x10000
        piece = lax.bitcast_convert_type(rounded, jnp.float32)
        pieces.append(piece.astype(jnp.bfloat16))
        x = x - piece
    return [*pieces, x.astype(jnp.bfloat16)]


def pairs(of_a: int = PIECES, of_b: int = PIECES) -> list[tuple[int, int]]:
    """Which pieces of two factors are to be multiplied, the smallest products first."""
    return sorted(((a, b) for a in range(of_a) for b in range(of_b) if a + b < PIECES), key=sum, reverse=True)
