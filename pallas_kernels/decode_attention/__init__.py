"""One query per row against the slots of a bounded cache, the new row written in place."""

from pallas_kernels.decode_attention.api import decode_attention

__all__ = ["decode_attention"]
