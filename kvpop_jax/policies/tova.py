"""TOVA (Oren et al. 2024, arXiv 2401.06104): drop the token that the current query attends to least.

Attention is averaged over all query heads, so all KV heads of a layer keep the same tokens. Nothing is protected: the
newest token competes too, as in the authors' code (kvpress keeps it). The prompt is cut once, after its attention, by
the weights of its last query.
"""

import jax.numpy as jnp

from kvpop_jax.cache import plan_cache
from kvpop_jax.policies.machinery.attend_then_evict import attend_then_evict
from kvpop_jax.policies.machinery.base import Policy
from kvpop_jax.policies.machinery.prompt_attention import mean_over_queries, window_attention
from kvpop_jax.policies.machinery.settings import PolicySettings


def make(settings: PolicySettings) -> Policy:
    """Keeps `budget` tokens; neither sinks nor window."""

    def score_prompt(prompt, kept):
        return _same_for_heads(window_attention(prompt, 1, mean_over_queries), prompt.k_BSKD.shape[2])

    def rescore(cache, attention_BHC):
        return _same_for_heads(attention_BHC, cache.k_BKCD.shape[1])

    def plan(budget, config, entry_bytes):
        return plan_cache("tova", budget, sinks=0, window=0, state_bytes=0, entry_bytes=entry_bytes, scratch=1)

    return attend_then_evict("tova", plan, score_prompt, rescore)


def _same_for_heads(attention_BHS, num_kv_heads):
    return jnp.repeat(jnp.mean(attention_BHS, axis=1, keepdims=True), num_kv_heads, axis=1)
