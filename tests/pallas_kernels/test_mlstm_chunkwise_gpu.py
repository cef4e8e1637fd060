"""The GPU form of `mlstm_chunkwise`: that of the reference, its products lowered for tensor cores."""

import re

import jax
import jax.numpy as jnp
import pytest
from mlstm_chunkwise_suite import MLSTMChunkwiseSuite

from pallas_kernels.backend import BackendError
from pallas_kernels.mlstm_chunkwise import mlstm_chunkwise


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
class TestOnAGPU(MLSTMChunkwiseSuite):
    backend = "gpu"


def test_every_product_forward_and_backward_is_for_tensor_cores():
    shapes = ((1, 256, 2, 64),) * 2 + ((1, 256, 2, 128),) + ((1, 256, 2),) * 2
    inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def loss(inputs):
        return jnp.sum(mlstm_chunkwise(*inputs, None, jnp.ones((1, 256), jnp.int32), backend="gpu")[0] ** 2)

    text = jax.jit(jax.grad(loss)).trace(inputs).lower(lowering_platforms=("cuda",)).as_text()
    products = re.findall("stablehlo.dot_general.*", text)
    assert len(products) > 12
    assert all("num_primitive_operations = 6" in product for product in products)


def test_float64_is_refused(float64):
    x = jnp.zeros((1, 1, 1, 1), jnp.float64)
    with pytest.raises(BackendError, match="computes in float32"):
        mlstm_chunkwise(x, x, x, x[..., 0], x[..., 0], None, jnp.ones((1, 1), jnp.int32), backend="gpu")
