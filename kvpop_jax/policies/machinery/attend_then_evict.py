"""Policies that attend over the budget and one scratch slot, then free the slot of the weakest token.

The score of a token is its slot's priority, and protection is read off positions at every step: so a policy that needs
one number per token has no state to charge.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvpop_jax.cache import EMPTY, PROTECTED, CachePlan, LayerCache, cache_from_prompt, empty_slot, place, weakest
from kvpop_jax.models import ModelConfig
from kvpop_jax.policies.machinery.base import Kept, NewToken, Policy, Prompt
from kvpop_jax.policies.machinery.keeping import keep_all, keep_best, prompt_length, protect
from kvpop_jax.policies.machinery.prompt_attention import full_attention
from pallas_kernels import decode_attention

ScorePrompt = Callable[[Prompt, Kept], Float[Array, "B K S"]]
"""(prompt, which of it is there) -> the score of every token at the prompt's end."""

Rescore = Callable[[LayerCache, Float[Array, "B H C"]], Float[Array, "B K C"]]
"""(cache with the new token, at priority 0, and its attention) -> the score of every slot."""


def attend_then_evict(
    name: str, plan: Callable[[int, ModelConfig, int], CachePlan], score_prompt: ScorePrompt, rescore: Rescore
) -> Policy:
    """A policy that cuts the prompt once, after its attention, and then drops the lowest score after every step.

    Args:
        name: in the registry.
        plan: as in `Policy`, with one scratch slot. Its window and sinks are protected.
        score_prompt, rescore: the score after the prompt and after a step.
    """

    def prefill(_: Any, prompt: Prompt, plan: CachePlan) -> tuple[Float[Array, "B S H D"], Kept]:
        kept = keep_all(prompt)
        return full_attention(prompt), cut(kept, score_prompt(prompt, kept), prompt, plan)

    def take_over(_: Any, prompt: Prompt, kept: Kept, plan: CachePlan) -> LayerCache:
        score_BKS = score_prompt(prompt, kept)
        return cache_of(cut(kept, score_BKS, prompt, plan), score_BKS, prompt, plan, ())

    def step(_: Any, cache: LayerCache, new: NewToken, plan: CachePlan) -> tuple[Float[Array, "B H D"], LayerCache]:
        o_BHD, cache, attention_BHC = attend(cache, new)
        cache = replace(cache, priority_BKC=rescore(cache, attention_BHC))
        return o_BHD, free(cache, overflow(cache, new, plan))

    return Policy(
        name=name,
        decode=name,
        signals=frozenset({"attention"}),
        prefill_mode="one_shot",
        plan=plan,
        prefill=prefill,
        take_over=take_over,
        step=step,
        priorities=None,
    )


def cut(kept: Kept, score_BKS: Float[Array, "B K S"], prompt: Prompt, plan: CachePlan) -> Kept:
    """The best of what was kept, as many as the plan holds; pinned tokens and the window first."""
    priority_BKS = protect(score_BKS, prompt, plan.window)
    return replace(kept, alive_BKS=keep_best(kept.alive_BKS, priority_BKS, plan.capacity))


def cache_of(kept: Kept, score_BKS: Float[Array, "B K S"], prompt: Prompt, plan: CachePlan, state: Any) -> LayerCache:
    """The cache of what was kept, with its scores as priorities."""
    return cache_from_prompt(kept.k_BSKD, kept.v_BSKD, kept.alive_BKS, score_BKS, prompt_length(prompt), plan, state)


def attend(cache: LayerCache, new: NewToken) -> tuple[Float[Array, "B H D"], LayerCache, Float[Array, "B H C"]]:
    """Places the new token in a free slot with priority 0 and attends; gives the attention to every slot as well."""
    cache, slot_BK = place(cache, empty_slot(cache), new.position_B, jnp.zeros(new.own_B.shape), new.own_B)
    o_BHD, _lse, k_BKCD, v_BKCD, attention_BHC = decode_attention(
        new.q_BHD, cache.k_BKCD, cache.v_BKCD, cache.position_BKC, new.k_BKD, new.v_BKD, slot_BK,
        return_probabilities=True,
    )  # fmt: skip
    assert attention_BHC is not None
    return o_BHD, replace(cache, k_BKCD=k_BKCD, v_BKCD=v_BKCD), attention_BHC


def overflow(cache: LayerCache, new: NewToken, plan: CachePlan) -> Bool[Array, "B K C"]:
    """The slot of the weakest unprotected token in every head that holds more than the plan does."""
    position_BKC = cache.position_BKC
    last_B11, pinned_B11 = new.position_B[:, None, None], new.pinned_B[:, None, None]
    protected_BKC = (position_BKC > last_B11 - plan.window) | (position_BKC < pinned_B11)
    weakest_BK = weakest(jnp.where(protected_BKC, PROTECTED, cache.priority_BKC), position_BKC)
    over_BK1 = jnp.sum(position_BKC >= 0, axis=-1, keepdims=True) > plan.capacity
    return over_BK1 & new.own_B[:, None, None] & (jnp.arange(position_BKC.shape[-1]) == weakest_BK[..., None])


def free(cache: LayerCache, slot_BKC: Bool[Array, "B K C"]) -> LayerCache:
    """Empties the marked slots that hold a token."""
    taken_BKC = slot_BKC & (cache.position_BKC >= 0)
    return replace(cache, position_BKC=jnp.where(taken_BKC, EMPTY, cache.position_BKC))
