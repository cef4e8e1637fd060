"""Norm, product and gate of the few rows of a decode step: see `api`."""

from pallas_kernels.thin_matmul.api import matmul_add, norm_matmul, norm_swiglu

__all__ = ["matmul_add", "norm_matmul", "norm_swiglu"]
