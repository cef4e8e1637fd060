"""Policies whose priorities never change once given: prefill, decode and training from two scoring functions.

A priority is read once, when the token leaves the window. Then training's parallel mask, prefill and the online cache
are one rule (KVpop sections 1.4 and 1.8), and here is that rule's online half.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvpop_jax.cache import (
    PROTECTED,
    CachePlan,
    LayerCache,
    Leaving,
    cache_from_prompt,
    choose_victim,
    leaving_token,
    place,
    plan_cache,
    replace_priority,
)
from kvpop_jax.eviction import expiry_from_priority
from kvpop_jax.models import ModelConfig
from kvpop_jax.policies.base import NewToken, Policy, PolicySettings, Prompt
from pallas_kernels import decode_attention, masked_attention

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
        signals=signals,
        prefill_mode="expiry",
        plan=plan,
        prefill=partial(_prefill, parallel),
        step=partial(_step, recurrent),
        priorities=lambda params, prompt: parallel(params, prompt)[0],
    )


def _prefill(
    parallel: Parallel, params: Any, prompt: Prompt, plan: CachePlan
) -> tuple[Float[Array, "B S H D"], LayerCache]:
    layout = prompt.layout
    priority_BKS, state = parallel(params, prompt)
    expiry_BKS = expiry_from_priority(priority_BKS, layout, plan.window)
    o_BSHD, _lse = masked_attention(prompt.q_BSHD, prompt.k_BSKD, prompt.v_BSKD, expiry_BKS, layout.segment_BS)
    in_prompt_BS = layout.segment_BS > 0
    length_B = jnp.sum(in_prompt_BS, axis=1)
    alive_BKS = in_prompt_BS[:, None] & (expiry_BKS >= length_B[:, None, None])
    protected_BS = layout.pinned_BS | (layout.position_BS > length_B[:, None] - 1 - plan.window)
    priority_BKS = jnp.where(protected_BS[:, None], PROTECTED, priority_BKS)
    return o_BSHD, cache_from_prompt(prompt.k_BSKD, prompt.v_BSKD, alive_BKS, priority_BKS, length_B, plan, state)


def _step(
    recurrent: Recurrent, params: Any, cache: LayerCache, new: NewToken, plan: CachePlan
) -> tuple[Float[Array, "B H D"], LayerCache]:
    leaving = leaving_token(cache, new.position_B)
    state, priority_BK = recurrent(params, cache.state, new, leaving, plan)
    competes_B = leaving.position_B >= new.pinned_B
    cache = replace_priority(replace(cache, state=state), leaving.slot_BK, priority_BK, competes_B)
    slot_BK = choose_victim(cache)
    cache = place(cache, slot_BK, new.position_B)
    o_BHD, _lse, k_BKCD, v_BKCD, _ = decode_attention(
        new.q_BHD, cache.k_BKCD, cache.v_BKCD, cache.position_BKC, new.k_BKD, new.v_BKD, slot_BK
    )
    return o_BHD, replace(cache, k_BKCD=k_BKCD, v_BKCD=v_BKCD)
