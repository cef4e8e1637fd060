"""Attention in which every key carries the first query position that no longer sees it."""

from pallas_kernels.masked_attention.api import NEVER, masked_attention

__all__ = ["NEVER", "masked_attention"]
