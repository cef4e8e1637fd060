"""Policies whose priorities never change once given: prefill, decode and training from two scoring functions.

A priority is read once, when the token leaves the window. Then training's parallel mask, prefill and the online cache
are one rule (KVpop sections 1.4 and 1.8), and here is that rule's online half.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from jaxtyping import Array, Float

from kvpop_jax.cache import (
    CachePlan,
    LayerCache,
    Leaving,
    cache_from_prompt,
    leaving_token,
    plan_cache,
)
from kvpop_jax.eviction import expiry_from_priority
from kvpop_jax.models import ModelConfig
from kvpop_jax.policies.machinery.base import Kept, NewToken, Policy, Prompt
from kvpop_jax.policies.machinery.keeping import keep_best, prompt_length, protect
from kvpop_jax.policies.machinery.settings import PolicySettings
from pallas_kernels import decode_attention, masked_attention, take_slot

Parallel = Callable[[Any, Prompt], tuple[Float[Array, "B K S"], Any]]
"""(parameters, prompt) -> the priority of every token once it leaves the window, and the policy's state at the end."""

Recurrent = Callable[[Any, Any, NewToken, Leaving, CachePlan], tuple[Any, Float[Array, "B K"]]]
"""(parameters, state, new token, leaving token, plan) -> the next state, and the leaving token's priority."""


def expiry_policy(
    name: str,
    settings: PolicySettings,
    parallel: Parallel,
    recurrent: Recurrent,
    *,
    signals: frozenset[str] = frozenset(),
    state_bytes: Callable[[ModelConfig], int] = lambda config: 0,
) -> Policy:
    """A policy with sinks, a window and a pool ruled by static priorities.

    Args:
        name: its name in the registry.
        settings: sinks and window.
        parallel, recurrent: the two forms of one score; a token gets the same priority from both.
        signals: what they read beside keys and values.
        state_bytes: bytes per KV head of the state they carry, which the budget is charged for.
    """

    def plan(budget: int, config: ModelConfig, entry_bytes: int) -> CachePlan:
        return plan_cache(
            name,
            budget,
            sinks=settings.sinks,
            window=settings.window,
            state_bytes=state_bytes(config),
            entry_bytes=entry_bytes,
        )

    return Policy(
        name=name,
        decode=name,
        signals=signals,
        prefill_mode="expiry",
        plan=plan,
        prefill=partial(_prefill, parallel),
        take_over=partial(_take_over, parallel),
        step=partial(_step, recurrent),
        priorities=lambda params, prompt: parallel(params, prompt)[0],
    )


def _prefill(parallel: Parallel, params: Any, prompt: Prompt, plan: CachePlan) -> tuple[Float[Array, "B S H D"], Kept]:
    layout = prompt.layout
    priority_BKS, _state = parallel(params, prompt)
    expiry_BKS = expiry_from_priority(priority_BKS, layout, plan.window)
    o_BSHD, _lse = masked_attention(
        prompt.q_BSHD, prompt.k_BSKD, prompt.v_BSKD, expiry_BKS, layout.segment_BS, capacity=plan.capacity
    )
    alive_BKS = (layout.segment_BS > 0)[:, None] & (expiry_BKS >= prompt_length(prompt)[:, None, None])
    return o_BSHD, Kept(alive_BKS, prompt.k_BSKD, prompt.v_BSKD)


def _take_over(parallel: Parallel, params: Any, prompt: Prompt, kept: Kept, plan: CachePlan) -> LayerCache:
    # Steps read keys and values from the cache, so the parallel form reads them as they were kept.
    priority_BKS, state = parallel(params, replace(prompt, k_BSKD=kept.k_BSKD, v_BSKD=kept.v_BSKD))
    priority_BKS = protect(priority_BKS, prompt, plan.window)
    alive_BKS = keep_best(kept.alive_BKS, priority_BKS, plan.capacity)
    return cache_from_prompt(kept.k_BSKD, kept.v_BSKD, alive_BKS, priority_BKS, prompt_length(prompt), plan, state)


def _step(
    recurrent: Recurrent, params: Any, cache: LayerCache, new: NewToken, plan: CachePlan
) -> tuple[Float[Array, "B H D"], LayerCache]:
    leaving = leaving_token(cache, new.position_B)
    state, priority_BK = recurrent(params, cache.state, new, leaving, plan)
    position_BKC, priority_BKC, ring_BKW, slot_BK = take_slot(
        cache.position_BKC, cache.priority_BKC, cache.ring_BKW, priority_BK, new.position_B, new.pinned_B, new.own_B
    )
    o_BHD, _lse, k_BKCD, v_BKCD, _ = decode_attention(
        new.q_BHD, cache.k_BKCD, cache.v_BKCD, position_BKC, new.k_BKD, new.v_BKD, slot_BK
    )
    return o_BHD, LayerCache(k_BKCD, v_BKCD, position_BKC, priority_BKC, ring_BKW, state)
