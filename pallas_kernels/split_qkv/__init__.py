"""Queries, keys and values of every head from a fused projection: see `api`."""

from pallas_kernels.split_qkv.api import Rotation, apply_rope, split_qkv

__all__ = ["Rotation", "apply_rope", "split_qkv"]
