"""The reference of `split_qkv`: the common suite, and exactness in float64."""

import numpy as np
import pytest
from oracles import assert_close
from split_qkv_suite import CASES, EPS, SplitQkvSuite, by_definition, random_inputs

from pallas_kernels import split_qkv
from pallas_kernels.backend import BackendError


class TestReference(SplitQkvSuite):
    backend = "reference"


def test_float64_equals_the_definition(float64):
    inputs = random_inputs(CASES["qwen3"], "float64", head_dim=6)
    got = split_qkv(*inputs, eps=EPS, backend="reference")
    for array, wanted in zip(got, by_definition(*inputs), strict=True):
        assert_close(np.asarray(array), wanted, 1e-12)


def test_an_unknown_backend_is_refused():
    with pytest.raises(BackendError, match="nonesuch"):
        split_qkv(*random_inputs(CASES["qwen3"]), eps=EPS, backend="nonesuch")
