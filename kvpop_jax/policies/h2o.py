"""H2O (Zhang et al. 2023, arXiv 2306.14048): the tokens that have received most attention, and recent ones.

A token's score is the attention it has received from all queries since it came, those of the prompt included, not
normalised by its age. Half the budget is recent, as in the authors' code, which scores every query head and so keeps a
copy of K and V per query head: here the mean over a group ranks the tokens of its KV head. kvpress' "ObservedAttention"
divides by the number of queries and has no recent window.
"""

from collections.abc import Callable

from kvpop_jax.cache import CachePlan, plan_cache
from kvpop_jax.models import ModelConfig
from kvpop_jax.policies.machinery.attend_then_evict import attend_then_evict
from kvpop_jax.policies.machinery.base import Policy
from kvpop_jax.policies.machinery.prompt_attention import accumulated_attention, group_mean
from kvpop_jax.policies.machinery.settings import PolicySettings


def make(settings: PolicySettings) -> Policy:
    """Keeps the most recent `recent_share` of the budget, and heavy hitters in the rest."""

    def score_prompt(prompt, kept):
        return accumulated_attention(prompt)

    def rescore(cache, attention_BHC):
        return cache.priority_BKC + group_mean(attention_BHC, cache.k_BKCD.shape[1])

    return attend_then_evict("h2o", recent_plan("h2o", settings.methods.recent_share), score_prompt, rescore)


def recent_plan(
    name: str, share: float, *, sinks: int = 0, state_bytes: int = 0
) -> Callable[[int, ModelConfig, int], CachePlan]:
    """Plans in which a share of the budget, rounded down, is recent tokens: one at least, one slot of scratch."""

    def plan(budget: int, config: ModelConfig, entry_bytes: int) -> CachePlan:
        return plan_cache(
            name,
            budget,
            sinks=sinks,
            window=max(1, int(budget * share)),
            state_bytes=state_bytes,
            entry_bytes=entry_bytes,
            scratch=1,
        )

    return plan
