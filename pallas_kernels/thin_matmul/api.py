"""`thin_matmul`: the large products of a layer with what surrounds them, for the few rows of a decode step.

The contracts, and the choice of a back end.

A step of few rows reads every weight once and does nothing else worth its time, if nothing else is launched: so norms,
gates and residuals belong to the products beside them. Of any number of tokens, [*T, ...]; for many of them, and in
training, the reference is the plain products that XLA knows best.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.backend import Backend, select_backend
from pallas_kernels.thin_matmul import gpu, reference
from pallas_kernels.thin_matmul.reference import rms_norm

__all__ = ["matmul_add", "norm_matmul", "norm_swiglu", "rms_norm"]


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
        Both in the dtype of `x`. Differentiable by the reference only, like all of this operation.

    Raises:
        BackendError: the back end is unknown or refuses the arguments.
    """
    backends = _backends(gpu.norm_matmul, gpu.refuses_norm_matmul, reference.norm_matmul)
    return _run("norm_matmul", backend, backends, (x, norm_E, w_EO, eps))


def norm_swiglu(
    x: Float[Array, "*T E"],
    norm_E: Float[Array, "E"],
    w_E2F: Float[Array, "E 2 F"],
    *,
    eps: float,
    backend: str = "auto",
) -> Float[Array, "*T F"]:
    """silu(n gate) * (n up) for the RMS norm n of `x`: the hidden layer of a SwiGLU; as `norm_matmul` otherwise."""
    backends = _backends(gpu.norm_swiglu, gpu.refuses_norm_swiglu, reference.norm_swiglu)
    return _run("norm_swiglu", backend, backends, (x, norm_E, w_E2F, eps))


def matmul_add(
    x: Float[Array, "*T F"], w_FE: Float[Array, "F E"], residual: Float[Array, "*T E"], *, backend: str = "auto"
) -> Float[Array, "*T E"]:
    """residual + x w; as `norm_matmul` otherwise."""
    backends = _backends(gpu.matmul_add, gpu.refuses_matmul_add, reference.matmul_add)
    return _run("matmul_add", backend, backends, (x, w_FE, residual))


def _backends(kernel: Callable[..., Any], refuses: Callable[..., str | None], plain: Callable[..., Any]):
    return {"gpu": Backend(kernel, "gpu", refuses, gpu.pays), "reference": Backend(plain)}


def _run(op, backend, backends, arguments):
    return backends[select_backend(op, backend, backends, arguments)].run(*arguments)
