"""Small things that TPU kernels of attention share: numbers of the masked softmax, and moves between lanes and rows."""

import math

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

LANES = 128
LOG2_E = math.log2(math.e)
MASKED = -2e38
"""Added to the scores of keys that are not visible. Float32 holds it beside any real score."""
FLOOR = -1e30
"""No running maximum is below it, so that 2 ** (MASKED - maximum) is 0 even where nothing was visible."""
_FLOAT32_VMEM = 56 * 2**20


def dot(x, y, contract):
    """Float32 operands are multiplied in float32, bfloat16 ones exactly; the sum is in float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, y, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def lanes(x_RN, width: int):
    """[rows, 128] with equal lanes to [rows, width]."""
    if width <= LANES:
        return x_RN[:, :width]
    return jnp.concatenate([x_RN] * (width // LANES), axis=1)


def to_rows(x_1R):
    """[1, rows] to [rows, 128] with equal lanes."""
    return jnp.broadcast_to(x_1R, (LANES, x_1R.shape[1])).T


def to_lanes(x_RN):
    """[rows, 128] with equal lanes to [1, rows]."""
    return x_RN.T[:1]


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def vmem_limit(dtype: DTypeLike) -> int | None:
    """VMEM to ask for, in bytes; None is what every chip gives unasked, 16 MiB.

    Blocks are sized for bfloat16. The same blocks in float32 take up to 44 MiB, at 16 heads of 256 to a KV head; the
    compilers for v5e, v5p and tpu7x grant what is asked for here.
    """
    return _FLOAT32_VMEM if jnp.dtype(dtype) == jnp.float32 else None
