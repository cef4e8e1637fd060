"""Generation on the bounded cache.

- `sampling`: logits to tokens, on the device, one random stream per row.
- `decode`: the state of a batch of sequences; prefill, and many steps per dispatch.
- `generator`: the Python API: `Generator.generate`, `.stream`, `.teacher_forced`.
"""

from kvpop_jax.inference.decode import DecodeState, decode_step, decode_steps, prefill
from kvpop_jax.inference.generator import CacheReport, Completion, Generator
from kvpop_jax.inference.sampling import SamplingParams, sample

__all__ = [
    "CacheReport",
    "Completion",
    "DecodeState",
    "Generator",
    "SamplingParams",
    "decode_step",
    "decode_steps",
    "prefill",
    "sample",
]
