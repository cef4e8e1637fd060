"""Random eviction, the control every learned policy must beat.

Priority t / k + Exp(1), drawn once per token and KV head: with it the pool has the law of redrawing its victim evenly
at every step, although the priorities are static.
"""

from functools import partial

import jax
import jax.numpy as jnp

from kvpop_jax.policies.machinery.base import Policy
from kvpop_jax.policies.machinery.expiry_form import expiry_policy
from kvpop_jax.policies.machinery.settings import PolicySettings


def make(settings: PolicySettings) -> Policy:
    """Draws from each row's seed, the layer and the position: not from the batch, nor from the chunking."""

    def parallel(_, prompt):
        layout = prompt.layout
        draw = partial(_exponential, layer=prompt.layer, heads=prompt.k_BSKD.shape[2])
        noise_BSK = jax.vmap(jax.vmap(draw, (None, 0)))(prompt.seed_B, layout.position_BS)
        drift_BS = layout.position_BS / jnp.maximum(layout.pool_BS, 1)
        return drift_BS[:, None] + jnp.swapaxes(noise_BSK, 1, 2), ()

    def recurrent(_, state, new, leaving, plan):
        draw = partial(_exponential, layer=new.layer, heads=new.k_BKD.shape[1])
        noise_BK = jax.vmap(draw)(new.seed_B, leaving.position_B)
        drift_B = leaving.position_B / jnp.maximum(plan.pool_beside(new.pinned_B), 1)
        return state, drift_B[:, None] + noise_BK

    return expiry_policy("random", settings, parallel, recurrent, signals=frozenset({"seed"}))


def _exponential(seed, position, *, layer, heads):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), layer), position)
    return jax.random.exponential(key, (heads,))
