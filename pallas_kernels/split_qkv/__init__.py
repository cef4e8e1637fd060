"""Queries, keys and values of every head from a fused projection: see `api`."""

from pallas_kernels.split_qkv.api import split_qkv

__all__ = ["split_qkv"]
