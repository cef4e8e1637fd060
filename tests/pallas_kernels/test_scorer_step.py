"""The reference of `scorer_step`: the common suite, and exactness in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scorer_step_suite import CASES, SOFT_CAP, ScorerStepSuite, assert_all_close, by_the_equations, random_inputs

from pallas_kernels.backend import BackendError
from pallas_kernels.scorer_step import scorer_step


class TestReference(ScorerStepSuite):
    backend = "reference"

    def test_float64_equals_the_equations(self, float64):
        inputs = jax.tree.map(lambda x: x.astype(jnp.float64), random_inputs(CASES["one_row_of_one_head"]))
        actual = jax.jit(partial(scorer_step, soft_cap=SOFT_CAP, backend="reference"))(*inputs)
        assert_all_close(actual, by_the_equations(*jax.tree.map(np.asarray, inputs)), 1e-12)


def test_an_unknown_backend_is_refused():
    with pytest.raises(BackendError, match="nonesuch"):
        scorer_step(*random_inputs(CASES["one_row_of_one_head"]), soft_cap=SOFT_CAP, backend="nonesuch")
