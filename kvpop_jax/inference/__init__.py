"""Generation on the bounded cache.

- `sampling`: logits to tokens, on the device, one random stream per row.
- `decode`: the state of a batch of sequences; prefill, and many steps per dispatch.
- `memory`: bytes of a batch, and what is said when they do not fit.
- `generator`: the Python API: `Generator.generate`, `.stream`, `.teacher_forced`; `results`: what they give back.
- `batching`: many prompts on a few rows, each row handed on as its sequence ends.
"""

from kvpop_jax.inference.batching import BatchStatistics, complete
from kvpop_jax.inference.decode import DecodeState, decode_step, decode_steps, prefill
from kvpop_jax.inference.generator import Generator
from kvpop_jax.inference.results import CacheReport, Completion
from kvpop_jax.inference.sampling import SamplingParams, sample

__all__ = [
    "BatchStatistics",
    "CacheReport",
    "Completion",
    "DecodeState",
    "Generator",
    "SamplingParams",
    "complete",
    "decode_step",
    "decode_steps",
    "prefill",
    "sample",
]
