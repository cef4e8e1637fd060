"""Attention in which every key carries the first query position that no longer sees it."""

from pallas_kernels.masked_attention.api import masked_attention
from pallas_kernels.masked_attention.dense import NEVER

__all__ = ["NEVER", "masked_attention"]
