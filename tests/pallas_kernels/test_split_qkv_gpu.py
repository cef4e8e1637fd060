"""The GPU kernel of `split_qkv`: the common suite on an interpreted GPU, and lowering for a real one."""

from dataclasses import replace
from functools import partial

import jax
import pytest
from split_qkv_suite import CASES, EPS, Case, SplitQkvSuite, random_inputs

from pallas_kernels import split_qkv
from pallas_kernels.backend import BackendError
from pallas_kernels.split_qkv import gpu

_OLD_JAX = jax.__version_info__ < (0, 11, 2)
needs_mosaic_gpu = pytest.mark.skipif(_OLD_JAX, reason="Pallas Mosaic GPU kernels need JAX 0.11.2 or newer")
run = partial(split_qkv, eps=EPS, backend="gpu")


@pytest.mark.gpu_interpret
@needs_mosaic_gpu
@pytest.mark.usefixtures("gpu_interpreter")
class TestOnAnInterpretedGPU(SplitQkvSuite):
    backend = "gpu"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
class TestOnAGPU(SplitQkvSuite):
    backend = "gpu"


@pytest.mark.gpu_interpret
@needs_mosaic_gpu
def test_it_lowers_for_a_gpu_in_one_kernel():
    shapes = jax.eval_shape(lambda: random_inputs(Case(tokens=(8, 1), kv_heads=8, group=4, norms=True)))
    text = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


def test_it_is_preferred_for_few_rows_only():
    for rows, preferred in ((1, True), (8, True), (32, False)):
        shapes = jax.eval_shape(lambda rows=rows: random_inputs(Case((rows, 1), kv_heads=8, group=4, norms=True)))
        assert gpu.pays(*shapes, EPS) == preferred


@needs_mosaic_gpu
def test_what_it_was_not_made_for_is_refused():
    case = CASES["qwen3"]
    for inputs, reason in (
        (random_inputs(replace(case, group=8)), "up to 7 queries for each KV head, not 128 and 8"),
        (random_inputs(case, head_dim=64), "takes heads of 128"),
        (random_inputs(case, "float32"), "takes bfloat16"),
        ((*random_inputs(case)[:3], None), "norms of both"),
    ):
        with pytest.raises(BackendError, match=reason):
            run(*inputs)
