"""The harness of the TPU tests catches what it is there for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from tpu_compilation import TOPOLOGIES, compile_for

from pallas_kernels.backend import platform

SHAPE = jax.ShapeDtypeStruct((256, 512), jnp.float32)


def _accumulated(x):
    """x + x, through a scratch buffer as large as a block."""

    def kernel(x_ref, o_ref, sum_ref):
        sum_ref[...] = x_ref[...]
        o_ref[...] = sum_ref[...] + x_ref[...]

    block = pl.BlockSpec((128, 512), lambda i: (i, 0))
    scratch = [pltpu.VMEM((128, 512), jnp.float32)]
    params = pltpu.CompilerParams(dimension_semantics=("arbitrary",))
    return pl.pallas_call(
        kernel, out_shape=jax.typeof(x), grid=(x.shape[0] // 128,), in_specs=[block], out_specs=block,
        scratch_shapes=scratch, compiler_params=params, name="accumulated",
    )(x)  # fmt: skip


def _read_before_write(x):
    def kernel(x_ref, o_ref, sum_ref):
        o_ref[...] = sum_ref[...] + x_ref[...]

    return pl.pallas_call(
        kernel, out_shape=SHAPE, scratch_shapes=[pltpu.VMEM(SHAPE.shape, SHAPE.dtype)],
        compiler_params=pltpu.CompilerParams(),
    )(x)  # fmt: skip


@pytest.mark.tpu
@pytest.mark.parametrize("interpreter", ["tpu_interpreter", "plain_interpreter"])
def test_kernels_run_under_both_interpreters(interpreter, request):
    request.getfixturevalue(interpreter)
    x = np.arange(256 * 512, dtype=np.float32).reshape(SHAPE.shape)
    assert np.array_equal(_accumulated(x), x + x)


@pytest.mark.tpu
def test_a_read_of_memory_that_nobody_wrote_is_nan(tpu_interpreter):
    assert np.isnan(_read_before_write(np.zeros(SHAPE.shape, np.float32))).all()


@pytest.mark.tpu_compile
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_the_compiler_says_what_a_kernel_takes_in_vmem(chip, libtpu):
    def function(x):
        assert platform() == "tpu"
        return _accumulated(x)

    rows, block = 2**16, 128 * 512 * 4  # too many rows for the compiler to hold them all in VMEM
    compiled = compile_for(chip, function, jax.ShapeDtypeStruct((rows, 512), jnp.float32))
    # Two buffers each for the pipelined input and output, one for the scratch.
    assert 3 * block <= compiled.vmem["accumulated"] <= 6 * block
    assert compiled.largest_array == rows * 512
