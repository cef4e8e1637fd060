"""The reference of `thin_matmul`: the common suite, and exactness in float64."""

import numpy as np
import pytest
from oracles import assert_close
from thin_matmul_suite import EPS, ThinMatmulSuite, normed, random_inputs

from pallas_kernels import norm_matmul
from pallas_kernels.backend import BackendError


@pytest.mark.parametrize("name", ["one_row", "three_rows"])
class TestReference(ThinMatmulSuite):
    backend = "reference"


def test_float64_equals_the_formula(float64):
    x, norm_E, w_EO, _, _ = random_inputs("three_rows", "float64")
    got = norm_matmul(x, norm_E, w_EO, eps=EPS, backend="reference")
    x, norm_E, w_EO = map(np.asarray, (x, norm_E, w_EO))
    for array, wanted in zip(got, (normed(x, norm_E), normed(x, norm_E) @ w_EO), strict=True):
        assert_close(np.asarray(array), wanted, 1e-12)


def test_an_unknown_backend_is_refused():
    x, norm_E, w_EO, _, _ = random_inputs("one_row")
    with pytest.raises(BackendError, match="nonesuch"):
        norm_matmul(x, norm_E, w_EO, eps=EPS, backend="nonesuch")
