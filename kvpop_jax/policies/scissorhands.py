"""Scissorhands (Liu et al. 2023, arXiv 2305.17118): what was attended to will be attended to again.

The paper counts, over a history of queries, how often a token's attention was below average, and drops the worst in
batches. This is the form of KVCache-Factory instead: attention is summed, optionally decayed, the lowest sum goes at
every step, and sinks and recent tokens are protected. Without decay it is H2O with another split of the budget.
"""

from kvpop_jax.cache import plan_cache
from kvpop_jax.policies.machinery.attend_then_evict import attend_then_evict
from kvpop_jax.policies.machinery.base import Policy
from kvpop_jax.policies.machinery.prompt_attention import accumulated_attention, group_mean
from kvpop_jax.policies.machinery.settings import PolicySettings


def make(settings: PolicySettings) -> Policy:
    """Keeps `sinks`, the `window` most recent tokens, and those with the largest sums."""
    decay = settings.methods.decay

    def score_prompt(prompt, kept):
        return accumulated_attention(prompt, decay)

    def rescore(cache, attention_BHC):
        return decay * cache.priority_BKC + group_mean(attention_BHC, cache.k_BKCD.shape[1])

    def plan(budget, config, entry_bytes):
        return plan_cache(
            "scissorhands",
            budget,
            sinks=settings.sinks,
            window=settings.window,
            state_bytes=0,
            entry_bytes=entry_bytes,
            scratch=1,
        )

    return attend_then_evict("scissorhands", plan, score_prompt, rescore)
