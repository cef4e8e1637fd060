"""The full cache: nothing is evicted, because the budget is the longest sequence that may come.

As the first of two ("dense+h2o") it keeps the whole prompt whatever the budget, until the other cuts it.
"""

from dataclasses import replace

import jax.numpy as jnp

from kvpop_jax.policies.machinery.base import Policy
from kvpop_jax.policies.machinery.expiry_form import expiry_policy
from kvpop_jax.policies.machinery.keeping import keep_all
from kvpop_jax.policies.machinery.prompt_attention import full_attention
from kvpop_jax.policies.machinery.settings import PolicySettings


def make(settings: PolicySettings) -> Policy:
    """Keeps everything; `Generator` gives it as many slots as a sequence can have tokens."""

    def parallel(_, prompt):
        B, S, K, _D = prompt.k_BSKD.shape
        return jnp.zeros((B, K, S), jnp.float32), ()

    def recurrent(_, state, new, leaving, plan):
        return state, jnp.zeros(new.k_BKD.shape[:2], jnp.float32)

    form = expiry_policy("dense", PolicySettings(sinks=0, window=1), parallel, recurrent)
    return replace(form, prefill=lambda _, prompt, plan: (full_attention(prompt), keep_all(prompt)))
