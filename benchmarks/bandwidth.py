"""The ceilings that work is held against, measured in the same run."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def copy_bandwidth() -> float:
    """Bytes per second that additions to a large array move, reading and writing it several times in one program."""
    passes, size = 16, 1 << (32 if jax.default_backend() != "cpu" else 26)
    # In place, so that no fresh pages are touched.
    bump = jax.jit(lambda x: lax.fori_loop(0, passes, lambda _, y: y + 1, x), donate_argnums=0)
    array = bump(jnp.zeros(size // 4, jnp.float32))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        array = jax.block_until_ready(bump(array))
        seconds.append(time.perf_counter() - start)
    return 2 * size * passes / float(np.median(seconds))


def matmul_rate() -> float:
    """FLOP/s of a chain of large bfloat16 matrix products on random data."""
    products, size = (16, 8192) if jax.default_backend() != "cpu" else (2, 512)
    key_x, key_w = jax.random.split(jax.random.key(0))
    x = jax.random.normal(key_x, (size, size), jnp.bfloat16)
    w = jax.random.normal(key_w, (size, size), jnp.bfloat16) * size**-0.5  # keeps the scale
    chain = jax.jit(lambda x, w: lax.fori_loop(0, products, lambda _, y: y @ w, x))
    jax.block_until_ready(chain(x, w))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(chain(x, w))
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 * products / float(np.median(seconds))
