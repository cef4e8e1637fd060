"""The reference of `scorer_step`: the common suite, and exactness in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scorer_step_suite import (
    BOUNDS,
    CASES,
    ScorerStepSuite,
    assert_all_close,
    by_the_equations,
    random_inputs,
    to_float64,
)

from pallas_kernels.backend import BackendError
from pallas_kernels.scorer_step import scorer_step


class TestReference(ScorerStepSuite):
    backend = "reference"

    def test_float64_equals_the_equations(self, float64):
        inputs = to_float64(random_inputs(CASES["one_row_of_one_head"]), jnp.asarray)
        actual = jax.jit(partial(scorer_step, **BOUNDS, backend="reference"))(*inputs)
        assert_all_close(actual, by_the_equations(*jax.tree.map(np.asarray, inputs)), 1e-12)


def test_an_unknown_backend_is_refused():
    with pytest.raises(BackendError, match="nonesuch"):
        scorer_step(*random_inputs(CASES["one_row_of_one_head"]), **BOUNDS, backend="nonesuch")
