"""CAKE (Qin et al. 2025, arXiv 2503.12491), its token score: attention of the last queries, and how much it shifts.

Score: mean + gamma * variance over the last `observed` queries, averaged over `kernel` neighbours and over a group;
those last tokens stay. Layer budgets here are uniform, or whatever is given to `Generator`: the paper's (entropy to
the power 1 / tau_1 times variance to the power 1 / tau_2, taus tuned per model and budget) depend on the prompt, and
a compiled cache has one size; a calibrated plan can give them. The authors also evict at every step by the current
query: here the answer is kept bounded as by `prefill_only`.
"""

import jax.numpy as jnp

from kvpop_jax.policies.machinery.base import Policy
from kvpop_jax.policies.machinery.prefill_only import prefill_only
from kvpop_jax.policies.machinery.prompt_attention import mean_over_queries, pooled, window_attention
from kvpop_jax.policies.machinery.settings import PolicySettings


def make(settings: PolicySettings) -> Policy:
    """Keeps the last `observed` tokens of the prompt and the best of the rest."""
    methods = settings.methods

    def reduce(a_HWS, exists_W1):
        mean_HS = mean_over_queries(a_HWS, exists_W1)
        square_HWS = jnp.square(a_HWS - mean_HS[:, None]) * exists_W1
        return mean_HS + methods.cake_variance * jnp.sum(square_HWS, axis=1) / jnp.sum(exists_W1)

    def score(prompt):
        return pooled(window_attention(prompt, methods.observed, reduce), prompt, methods.observed, methods.kernel)

    return prefill_only("cake", settings, score, window=methods.observed)
