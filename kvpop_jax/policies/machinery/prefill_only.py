"""Methods that say only what to keep of a prompt.

On their own their cache would grow with the answer. Here StreamingLLM's rule keeps it at the budget: beside the sinks
the oldest token goes, tokens kept of the prompt included. `compose` puts any other policy in its place.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxtyping import Array, Float

from kvpop_jax.cache import CachePlan, plan_cache
from kvpop_jax.models import ModelConfig
from kvpop_jax.policies import streaming_llm
from kvpop_jax.policies.machinery.attend_then_evict import cut
from kvpop_jax.policies.machinery.base import Kept, Policy, Prompt, uniform_budgets
from kvpop_jax.policies.machinery.keeping import keep_all
from kvpop_jax.policies.machinery.prompt_attention import full_attention
from kvpop_jax.policies.machinery.settings import PolicySettings


def prefill_only(
    name: str,
    settings: PolicySettings,
    score: Callable[[Prompt], Float[Array, "B K S"]],
    *,
    sinks: int = 0,
    window: int = 0,
    layer_budgets: Callable[[int, int], tuple[int, ...]] = uniform_budgets,
) -> Policy:
    """A policy that keeps the best-scored tokens of a prompt, after its attention, and then the most recent ones.

    Args:
        name: in the registry.
        settings: its sinks are those of the steps.
        score: of every token of a prompt.
        sinks, window: first and last tokens of a prompt that are kept whatever their score.
        layer_budgets: as in `Policy`.
    """
    # By position alone a wider window would change nothing, but refuse small budgets.
    steps = streaming_llm.make(PolicySettings(sinks=settings.sinks, window=1))

    def plan(budget: int, config: ModelConfig, entry_bytes: int) -> CachePlan:
        own = plan_cache(name, budget, sinks=sinks, window=window, state_bytes=0, entry_bytes=entry_bytes)
        return replace(steps.plan(budget, config, entry_bytes), prompt=own)

    def prefill(_: Any, prompt: Prompt, plan: CachePlan) -> tuple[Float[Array, "B S H D"], Kept]:
        return full_attention(prompt), cut(keep_all(prompt), score(prompt), prompt, plan)

    return Policy(
        name=name,
        decode=steps.name,
        signals=frozenset({"attention"}),
        prefill_mode="one_shot",
        plan=plan,
        prefill=prefill,
        take_over=steps.take_over,
        step=steps.step,
        priorities=None,
        layer_budgets=layer_budgets,
    )
