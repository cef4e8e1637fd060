"""The GPU kernel of `take_slot`: the common suite on an interpreted GPU, and lowering for a real one."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from take_slot_suite import TakeSlotSuite, assert_is_by_hand, random_inputs

from pallas_kernels.backend import BackendError
from pallas_kernels.take_slot import gpu, take_slot

_OLD_JAX = jax.__version_info__ < (0, 11, 2)
needs_mosaic_gpu = pytest.mark.skipif(_OLD_JAX, reason="Pallas Mosaic GPU kernels need JAX 0.11.2 or newer")
run = partial(take_slot, backend="gpu")


@pytest.mark.gpu_interpret
@needs_mosaic_gpu
@pytest.mark.usefixtures("gpu_interpreter")
class TestOnAnInterpretedGPU(TakeSlotSuite):
    backend = "gpu"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
class TestOnAGPU(TakeSlotSuite):
    backend = "gpu"

    def test_no_draw_of_ties_and_empty_slots_differs_from_the_loop(self):
        for seed in range(1, 40):
            assert_is_by_hand(self.backend, random_inputs(4032, seed))


def arguments(batch: int, slots: int):
    i32, f32 = jnp.int32, jnp.float32
    heads = batch, 8
    shapes = (*heads, slots), (*heads, slots), (*heads, 256), heads, (batch,), (batch,), (batch,)
    dtypes = i32, f32, i32, f32, i32, i32, jnp.bool_
    return [jax.ShapeDtypeStruct(*each) for each in zip(shapes, dtypes, strict=True)]


@pytest.mark.gpu_interpret
@needs_mosaic_gpu
def test_it_lowers_for_a_gpu_with_the_cache_aliased():
    program = jax.jit(run, donate_argnums=(0, 1, 2)).trace(*arguments(32, 4032))
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("output_operand_alias<") == 3
    assert text.count("tf.aliasing_output") == 3


def test_it_is_preferred_unless_a_head_is_more_than_one_thread_block_should_read():
    for batch, slots, preferred in ((1, 4096, True), (32, 4096, True), (1, 16_384, True), (1, 131_072, False)):
        assert gpu.pays(*arguments(batch, slots)) == preferred


@needs_mosaic_gpu
def test_what_it_was_not_made_for_is_refused():
    for slots, reason in ((64, "at least 128 slots, in fours, not 64"), (130, "in fours, not 130")):
        with pytest.raises(BackendError, match=reason):
            jax.eval_shape(run, *arguments(1, slots))
    positions, priorities, *rest = arguments(1, 128)
    with pytest.raises(BackendError, match="float32 priorities only"):
        jax.eval_shape(run, positions, priorities.update(dtype=jnp.bfloat16), *rest)
    with pytest.raises(BackendError, match="int32 positions and rings only"):
        jax.eval_shape(run, positions.update(dtype=jnp.int16), priorities, *rest)


@pytest.mark.skipif(not _OLD_JAX, reason="of JAX before 0.11.2")
def test_an_older_jax_is_told_what_is_missing():
    with pytest.raises(BackendError, match=r"needs JAX 0\.11\.2 or newer"):
        run(*random_inputs(128))
