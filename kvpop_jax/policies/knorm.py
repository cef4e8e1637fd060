"""Key norm (Devoto et al. 2024, arXiv 2406.11430): tokens with small keys are kept.

Score -|k|, which rotary embedding does not change. Public code protects nothing and skips layers 0 and 1; here sinks
and a window are protected as in every policy of this form: a new token with a large key would be evicted at once.
"""

import jax.numpy as jnp

from kvpop_jax.policies.machinery.base import Policy
from kvpop_jax.policies.machinery.expiry_form import expiry_policy
from kvpop_jax.policies.machinery.settings import PolicySettings


def make(settings: PolicySettings) -> Policy:
    """Ranks by the negative norm of the cached key."""

    def parallel(_, prompt):
        return jnp.swapaxes(_score(prompt.k_BSKD), 1, 2), ()

    def recurrent(_, state, new, leaving, plan):
        return state, _score(leaving.k_BKD)

    return expiry_policy("knorm", settings, parallel, recurrent)


def _score(k):
    return -jnp.linalg.norm(k.astype(jnp.float32), axis=-1)
