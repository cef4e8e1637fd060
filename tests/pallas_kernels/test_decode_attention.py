"""The reference of `decode_attention` against a masked softmax, and on rows in 8 bits."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_attention_suite import Case, DecodeAttentionSuite, expected, random_inputs
from oracles import assert_close

from pallas_kernels import decode_attention
from pallas_kernels.backend import BackendError
from pallas_kernels.decode_attention import reference
from pallas_kernels.rows import ROW_DTYPES, read_rows, to_rows


class TestReference(DecodeAttentionSuite):
    backend = "reference"


# More than one block of slots on a CPU, and not a whole number of them.
LONG = Case(batch=1, kv_heads=2, group=2, slots=4097)


@pytest.mark.core
@pytest.mark.parametrize("name", ROW_DTYPES)
def test_quantised_rows_are_attended_to_as_they_are_read_within_the_bound_of_their_format(name):
    """Keys off by e move a score by at most |q| |e|, and a probability by e^(2 |q| |e|); values add theirs."""
    x = random_inputs(LONG, "float32")
    x = replace(x, q_BHD=x.q_BHD / 8)
    names = "k_BKCD", "v_BKCD", "k_new_BKD", "v_new_BKD"
    rounded = {each: np.asarray(read_rows(to_rows(getattr(x, each), ROW_DTYPES[name]))) for each in names}
    o_BHD, lse_BH, k_rows, v_rows, p_BHC = jax.tree.map(np.asarray, _quantised(x, name))

    as_read = expected(replace(x, **rounded))
    assert_close(o_BHD, as_read.o_BHD, 1e-5)
    assert_close(lse_BH, as_read.lse_BH, 1e-5)
    assert_close(p_BHC, as_read.p_BHC, 1e-5)
    np.testing.assert_array_equal(read_rows(k_rows), as_read.k_BKCD)
    np.testing.assert_array_equal(read_rows(v_rows), as_read.v_BKCD)

    exact = expected(x)
    q_norm = np.max(np.linalg.norm(x.q_BHD, axis=-1)) / np.sqrt(LONG.head_dim)
    moved = q_norm * np.max(np.linalg.norm(exact.k_BKCD - as_read.k_BKCD, axis=-1))
    largest, off = np.max(np.abs(exact.v_BKCD)), np.max(np.abs(exact.v_BKCD - as_read.v_BKCD))
    assert moved < 0.1 and off < largest * (1 / 254 if name == "int8" else 1 / 16) * (1 + 1e-5)
    assert np.max(np.abs(o_BHD - exact.o_BHD)) <= off + np.expm1(2 * moved) * largest


def test_quantised_rows_are_not_widened_as_a_whole_and_written_in_place():
    x = random_inputs(Case(batch=1, kv_heads=4, group=2, slots=16384), "float32")
    arguments = _arguments(x, "int8")
    memory = jax.jit(_reference, donate_argnums=(1, 2)).lower(*arguments).compile().memory_analysis()
    rows = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments[1:3]))
    assert memory.alias_size_in_bytes >= rows
    assert memory.temp_size_in_bytes < rows, "a widened copy would be four times as large"


def test_kernels_refuse_quantised_rows_and_auto_takes_the_reference():
    x = random_inputs(Case(batch=1, kv_heads=1, group=8, slots=64), "bfloat16")
    for backend in ("gpu", "tpu"):
        with pytest.raises(BackendError, match=f"backend='{backend}'"):
            decode_attention(*_arguments(x, "int8"), backend=backend)
    o_BHD, *_ = decode_attention(*_arguments(x, "int8"))
    assert o_BHD.dtype == jnp.bfloat16
    assert np.max(np.abs(np.asarray(o_BHD, np.float64) - expected(x).o_BHD)) <= 2**-4 * np.max(np.abs(x.v_BKCD))


def _arguments(x, name):
    k_rows, v_rows = (to_rows(jnp.asarray(y), ROW_DTYPES[name]) for y in (x.k_BKCD, x.v_BKCD))
    return (x.q_BHD, k_rows, v_rows, *x.arguments[3:])


def _reference(*arguments):
    return reference.decode_attention(*arguments, return_probabilities=True)


def _quantised(x, name):
    return jax.jit(_reference)(*_arguments(x, name))
