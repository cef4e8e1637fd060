"""The suite every back end of `thin_matmul` runs: subclass `ThinMatmulSuite` and name the back end.

The judge is the formula in NumPy and float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
from oracles import assert_close

from pallas_kernels import matmul_add, norm_matmul, norm_swiglu

EPS = 1e-3
SIZES = {
    "one_row": ((1, 1), 256, 256),
    "three_rows": ((3,), 512, 512),
    "as_many_as_pay": ((4, 1), 4096, 6144),
    "as_many_as_are_taken": ((8, 1), 4096, 6144),
}
"""Tokens, inputs and columns."""


def random_inputs(name: str, dtype: str = "bfloat16"):
    """x, the norm's weights, a matrix, a pair of matrices, and a residual; rows differ in size."""
    tokens, E, O = SIZES[name]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(*tokens, E)) * 3.0 ** np.arange(tokens[0]).reshape(-1, *(1,) * len(tokens))
    matrices = (rng.normal(size=size) * E**-0.5 for size in ((E, O), (E, 2, O)))
    arrays = x, rng.normal(size=E), *matrices, rng.normal(size=(*tokens, O))
    return tuple(jnp.asarray(array, dtype) for array in arrays)


def normed(x, norm_E):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS) * norm_E


def wide(arrays):
    return [np.asarray(array, np.float64) for array in arrays]


class ThinMatmulSuite:
    """What any back end must satisfy; subclasses say at which sizes, `name`."""

    backend: str
    tolerance = 2**-7

    def test_the_norm_and_its_product_are_those_of_the_formula(self, name):
        x, norm_E, w_EO, _, _ = random_inputs(name)
        results = jax.jit(lambda *a: norm_matmul(*a, eps=EPS, backend=self.backend))(x, norm_E, w_EO)
        x, norm_E, w_EO = wide((x, norm_E, w_EO))
        for got, wanted in zip(results, (normed(x, norm_E), normed(x, norm_E) @ w_EO), strict=True):
            assert got.dtype == jnp.bfloat16
            assert_close(np.asarray(got, np.float64), wanted, self.tolerance)

    def test_the_hidden_layer_is_gated_after_the_norm(self, name):
        x, norm_E, _, w_E2F, _ = random_inputs(name)
        got = jax.jit(lambda *a: norm_swiglu(*a, eps=EPS, backend=self.backend))(x, norm_E, w_E2F)
        x, norm_E, w_E2F = wide((x, norm_E, w_E2F))
        gate, up = (normed(x, norm_E) @ w_E2F[:, n] for n in range(2))
        # Norm, product, gate and result are rounded to 8 bits in turn.
        assert_close(np.asarray(got, np.float64), gate / (1 + np.exp(-gate)) * up, 2 * self.tolerance)

    def test_the_product_is_added_to_the_residual(self, name):
        x, _, w_FE, _, residual = random_inputs(name)
        got = jax.jit(lambda *a: matmul_add(*a, backend=self.backend))(x, w_FE, residual)
        x, w_FE, residual = wide((x, w_FE, residual))
        assert_close(np.asarray(got, np.float64), residual + x @ w_FE, self.tolerance)
