"""The full cache: nothing is evicted, because the budget is the longest sequence that may come."""

import jax.numpy as jnp

from kvpop_jax.policies.base import Policy, PolicySettings
from kvpop_jax.policies.expiry_form import expiry_policy


def make(settings: PolicySettings) -> Policy:
    """Keeps everything; `Generator` gives it as many slots as a sequence can have tokens."""

    def parallel(_, prompt):
        B, S, K, _D = prompt.k_BSKD.shape
        return jnp.zeros((B, K, S), jnp.float32), ()

    def recurrent(_, state, new, leaving, plan):
        return state, jnp.zeros(leaving.slot_BK.shape, jnp.float32)

    return expiry_policy("dense", PolicySettings(sinks=0, window=1), parallel, recurrent)
