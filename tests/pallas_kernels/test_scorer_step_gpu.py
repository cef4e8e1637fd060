"""The GPU kernels of `scorer_step`: the common suite on an interpreted GPU, and lowering for a real one."""

from dataclasses import replace
from functools import partial

import jax
import pytest
from scorer_step_suite import BOUNDS, CASES, Case, ScorerStepSuite, random_inputs

from pallas_kernels.backend import BackendError
from pallas_kernels.rows import ROW_DTYPES, to_rows
from pallas_kernels.scorer_step import scorer_step

_OLD_JAX = jax.__version_info__ < (0, 11, 2)
needs_mosaic_gpu = pytest.mark.skipif(_OLD_JAX, reason="Pallas Mosaic GPU kernels need JAX 0.11.2 or newer")
run = partial(scorer_step, **BOUNDS, backend="gpu")


@pytest.mark.gpu_interpret
@needs_mosaic_gpu
@pytest.mark.usefixtures("gpu_interpreter")
class TestOnAnInterpretedGPU(ScorerStepSuite):
    backend = "gpu"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
class TestOnAGPU(ScorerStepSuite):
    backend = "gpu"


@pytest.mark.gpu_interpret
@needs_mosaic_gpu
@pytest.mark.parametrize("batch", [4, 32])
def test_it_lowers_for_a_gpu_with_the_state_aliased(batch):
    shapes = jax.eval_shape(lambda: random_inputs(Case(batch, heads=8, hidden=4096, dtype="bfloat16")))
    text = jax.jit(run, donate_argnums=1).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("output_operand_alias<") == 3
    assert text.count("tf.aliasing_output") == 3


@needs_mosaic_gpu
def test_what_it_was_not_made_for_is_refused():
    case = CASES["one_row_of_one_head"]
    for other, reason in (
        (replace(case, key_dim=32), "not 32, 64, 128 and 128"),
        (replace(case, key_dim=128), "up to 8,192 entries in registers, not 128 x 128"),
        (replace(case, dtype="float16"), "float32 and bfloat16 tokens only"),
    ):
        with pytest.raises(BackendError, match=reason):
            run(*random_inputs(other))
    weights, *rest = random_inputs(case)
    *others, leaving = rest
    with pytest.raises(BackendError, match="float32 and bfloat16 tokens only"):
        run(weights, *others, replace(leaving, k_BKCD=to_rows(leaving.k_BKCD, ROW_DTYPES["int8"])))
    with pytest.raises(BackendError, match="float32 weights and states only"):
        run(jax.tree.map(lambda x: x.astype("bfloat16"), weights), *rest)


@pytest.mark.skipif(not _OLD_JAX, reason="of JAX before 0.11.2")
def test_an_older_jax_is_told_what_is_missing():
    with pytest.raises(BackendError, match=r"needs JAX 0\.11\.2 or newer"):
        run(*random_inputs(CASES["one_row_of_one_head"]))
