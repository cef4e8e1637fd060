"""StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): attention sinks and the most recent tokens.

The priority of a token is its position, so the pool is simply more window. Keys keep their original positions, as in
kvpress; the paper's own code re-rotates keys to their index in the cache. Trained with the KL loss of KVpop and no
scorer it is the baseline StreamingLLM+.
"""

import jax.numpy as jnp

from kvpop_jax.policies.machinery.base import Policy
from kvpop_jax.policies.machinery.expiry_form import expiry_policy
from kvpop_jax.policies.machinery.settings import PolicySettings


def make(settings: PolicySettings) -> Policy:
    """Keeps `sinks` tokens and the `budget - sinks` last ones."""

    def parallel(_, prompt):
        return _like_heads(prompt.layout.position_BS[:, None].astype(jnp.float32), prompt.k_BSKD.shape[2]), ()

    def recurrent(_, state, new, leaving, plan):
        return state, _like_heads(leaving.position_B[:, None].astype(jnp.float32), new.k_BKD.shape[1])

    return expiry_policy("streaming_llm", settings, parallel, recurrent)


def _like_heads(x_B1, num_kv_heads):
    return jnp.repeat(x_B1, num_kv_heads, axis=1)
