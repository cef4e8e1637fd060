"""Rows in 8 bits: how far they are from what was written, and that a row depends on no other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rows import ROW_DTYPES, read_rows, row_bytes, to_rows, write_rows

B, K, C, D = 2, 3, 5, 64


def random_rows(dtype) -> np.ndarray:
    """Rows of very different sizes, one of nothing but zeros."""
    rng = np.random.default_rng(0)
    x_BKCD = rng.normal(size=(B, K, C, D)) * 10.0 ** rng.integers(-3, 4, (B, K, C, 1))
    x_BKCD[0, 0, 0] = 0
    return x_BKCD.astype(dtype)


def largest_error(x: np.ndarray, name: str) -> np.ndarray:
    """What the format can miss an entry by: half a step, of the row in int8 and of the entry's own binade in fp8."""
    largest = np.max(np.abs(x), axis=-1, keepdims=True).astype(np.float64)
    if name == "int8":
        return np.broadcast_to(largest / 254, x.shape)
    return np.maximum(np.abs(x).astype(np.float64) / 16, largest / 448 * 2.0**-10)


@pytest.mark.core
@pytest.mark.parametrize("name", ROW_DTYPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_read_is_within_half_a_step_of_what_was_written(name, dtype):
    x_BKCD = random_rows(jnp.dtype(dtype))
    rows = to_rows(jnp.asarray(x_BKCD), ROW_DTYPES[name].name)  # as a plan has it
    error = np.abs(np.asarray(read_rows(rows), np.float64) - x_BKCD.astype(np.float64))
    assert np.all(error <= largest_error(x_BKCD, name) * (1 + 1e-5))
    assert (rows.dtype, rows.shape, rows.scale_BKC.dtype) == (ROW_DTYPES[name], x_BKCD.shape, jnp.float32)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(rows)) == B * K * C * row_bytes(D, rows.dtype)
    assert row_bytes(D, dtype) == D * jnp.dtype(dtype).itemsize
    # Read back and written again, nothing moves: rounding does not add up.
    again = read_rows(to_rows(read_rows(rows), rows.dtype))
    np.testing.assert_allclose(again, read_rows(rows), rtol=1e-6)


@pytest.mark.core
@pytest.mark.parametrize("name", [None, *ROW_DTYPES])
def test_a_row_is_written_into_its_slot_and_nowhere_else(name):
    x_BKCD = jnp.asarray(random_rows(np.float32))
    new_BKD = jnp.asarray(np.random.default_rng(1).normal(size=(B, K, D)), jnp.float32)
    slot_BK = np.array([[0, 4, C], [2, 2**31 - 1, 1]])
    dtype = None if name is None else ROW_DTYPES[name]
    rows = to_rows(x_BKCD, dtype)
    wanted = np.array(read_rows(rows))
    after = np.asarray(read_rows(jax.jit(write_rows)(rows, slot_BK.astype(np.int32), new_BKD)))
    for b, kv in np.ndindex(B, K):
        if slot_BK[b, kv] < C:
            wanted[b, kv, slot_BK[b, kv]] = read_rows(to_rows(new_BKD[b, kv], dtype))
    np.testing.assert_array_equal(after, wanted)
