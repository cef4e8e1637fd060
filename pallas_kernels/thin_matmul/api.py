"""`thin_matmul`: the large products of a layer with what surrounds them, for the few rows of a decode step.

The contracts, and the choice of a back end.

A step of few rows reads every weight once and does nothing else worth its time, if nothing else is launched: so norms,
gates and residuals belong to the products beside them. Of any number of tokens, [*T, ...]; for many of them, and in
training, the reference is the plain products that XLA knows best.
"""

from jaxtyping import Array, Float

from pallas_kernels.backend import Backend, select_backend
from pallas_kernels.thin_matmul import gpu, reference

_NORM_MATMUL = {
    "gpu": Backend(gpu.norm_matmul, "gpu", gpu.refuses_norm_matmul, gpu.pays),
    "reference": Backend(reference.norm_matmul),
}
_NORM_SWIGLU = {
    "gpu": Backend(gpu.norm_swiglu, "gpu", gpu.refuses_norm_swiglu, gpu.pays),
    "reference": Backend(reference.norm_swiglu),
}
_MATMUL_ADD = {
    "gpu": Backend(gpu.matmul_add, "gpu", gpu.refuses_matmul_add, gpu.pays),
    "reference": Backend(reference.matmul_add),
}


def norm_matmul(
    x: Float[Array, "*T E"],
    norm_E: Float[Array, "E"],
    w_EO: Float[Array, "E O"],
    *,
    eps: float,
    backend: str = "auto",
) -> tuple[Float[Array, "*T E"], Float[Array, "*T O"]]:
    """The RMS norm of `x`, and its product with a matrix.

    Args:
        x: of any number of tokens; the norm is computed in at least float32.
        norm_E: weights of the norm.
        w_EO: (in, out).
        eps: added to the mean square.
        backend: "auto" or the name of a back end.

    Returns:
        Both in the dtype of `x`. Differentiable, like all of this operation.

    Raises:
        BackendError: the back end is unknown or refuses the arguments.
    """
    arguments = x, norm_E, w_EO, eps
    return _NORM_MATMUL[select_backend("norm_matmul", backend, _NORM_MATMUL, arguments)].run(*arguments)


def norm_swiglu(
    x: Float[Array, "*T E"],
    norm_E: Float[Array, "E"],
    w_E2F: Float[Array, "E 2 F"],
    *,
    eps: float,
    backend: str = "auto",
) -> Float[Array, "*T F"]:
    """silu(n gate) * (n up) for the RMS norm n of `x`: the hidden layer of a SwiGLU; as `norm_matmul` otherwise."""
    arguments = x, norm_E, w_E2F, eps
    return _NORM_SWIGLU[select_backend("norm_swiglu", backend, _NORM_SWIGLU, arguments)].run(*arguments)


def matmul_add(
    x: Float[Array, "*T F"], w_FE: Float[Array, "F E"], residual: Float[Array, "*T E"], *, backend: str = "auto"
) -> Float[Array, "*T E"]:
    """residual + x w; as `norm_matmul` otherwise."""
    arguments = x, w_FE, residual
    return _MATMUL_ADD[select_backend("matmul_add", backend, _MATMUL_ADD, arguments)].run(*arguments)
