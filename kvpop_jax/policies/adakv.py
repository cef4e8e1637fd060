"""Ada-KV (Feng et al. 2024, arXiv 2407.11550): the heads of a layer share its budget.

SnapKV's scores are compared across heads: of a layer's K * A entries beside the observed tokens, each head gets what
it wins of the best K * A, times 1 - alpha, and alpha * A. The authors' code rounds every head on its own and may miss
the total; here largest remainders make it exact. It also scores with a maximum over 7 neighbours, and packs ragged
rows; kvpress masks keys in a full cache. Here a head has up to `ada_width` times A slots (what it wins beyond goes to
the other heads in proportion to their room), live entries are exact and reported beside those allocated, and each
head keeps its capacity while decoding, where its oldest token goes beside the sinks.
"""

from dataclasses import replace

import jax.numpy as jnp

from kvpop_jax.cache import plan_cache
from kvpop_jax.policies.machinery.attend_then_evict import cache_of
from kvpop_jax.policies.machinery.base import Policy
from kvpop_jax.policies.machinery.keeping import inverse_permutation, keep_all, keep_best, protected_tokens
from kvpop_jax.policies.machinery.prompt_attention import full_attention
from kvpop_jax.policies.machinery.recency import age_priority, place_oldest
from kvpop_jax.policies.machinery.settings import PolicySettings
from kvpop_jax.policies.snapkv import snapkv_score
from pallas_kernels import decode_attention


def make(settings: PolicySettings) -> Policy:
    """Keeps the last `observed` tokens of the prompt and K * A others, A the rest of the budget."""
    methods = settings.methods
    score = snapkv_score(methods)

    def plan(budget, config, entry_bytes):
        sizes = {"sinks": settings.sinks, "window": 1, "state_bytes": 4, "entry_bytes": entry_bytes}
        steps = plan_cache("adakv", budget, **sizes)
        own = plan_cache("adakv", budget, **{**sizes, "sinks": 0, "window": methods.observed})
        # The most that one head can win, or the width that was asked for.
        K, floor = config.num_kv_heads, methods.ada_floor
        most = min(K * (1 - floor) + floor, methods.ada_width)
        extra = int((most - 1) * own.pool)
        return replace(steps, scratch=extra, prompt=replace(own, scratch=extra))

    def cut(kept, prompt, plan):
        protected_BKS = kept.alive_BKS & protected_tokens(prompt, plan.window)[:, None]
        alive_BKS = _share(score(prompt), kept.alive_BKS, protected_BKS, plan, methods.ada_floor)
        return replace(kept, alive_BKS=alive_BKS)

    def prefill(_, prompt, plan):
        return full_attention(prompt), cut(keep_all(prompt), prompt, plan)

    def take_over(_, prompt, kept, plan):
        kept = cut(kept, prompt, plan)
        capacity_BK = jnp.minimum(_spread_rest(jnp.sum(kept.alive_BKS, axis=-1), plan.capacity), plan.slots)
        return cache_of(kept, age_priority(prompt), prompt, plan, capacity_BK)

    return Policy(
        name="adakv",
        decode="adakv",
        signals=frozenset({"attention"}),
        prefill_mode="one_shot",
        plan=plan,
        prefill=prefill,
        take_over=take_over,
        step=_step,
        priorities=None,
    )


def _step(_, cache, new, plan):
    cache, slot_BK = place_oldest(cache, new, cache.state)
    o_BHD, _lse, k_BKCD, v_BKCD, _ = decode_attention(
        new.q_BHD, cache.k_BKCD, cache.v_BKCD, cache.position_BKC, new.k_BKD, new.v_BKD, slot_BK
    )
    return o_BHD, replace(cache, k_BKCD=k_BKCD, v_BKCD=v_BKCD)


def _share(score_BKS, alive_BKS, protected_BKS, plan, floor):
    """The tokens that stay: all while they fit, else the protected ones and each head's best."""
    B, K, S = alive_BKS.shape
    candidate_BKS = alive_BKS & ~protected_BKS
    protected_BK, candidates_BK = jnp.sum(protected_BKS, axis=-1), jnp.sum(candidate_BKS, axis=-1)
    total_B1 = K * plan.capacity - jnp.sum(protected_BK, axis=-1, keepdims=True)

    # Ties go to the older token, then to the lower head.
    flat_BSK = jnp.swapaxes(jnp.where(candidate_BKS, score_BKS, -jnp.inf), 1, 2).reshape(B, S * K)
    rank_BSK = inverse_permutation(jnp.argsort(-flat_BSK, axis=-1, stable=True)).reshape(B, S, K)
    wins_BKS = candidate_BKS & (jnp.swapaxes(rank_BSK, 1, 2) < total_B1[..., None])
    wanted_BK = (1 - floor) * jnp.sum(wins_BKS, axis=-1) + floor * total_B1 / K
    room_BK = jnp.minimum(plan.slots - protected_BK, candidates_BK)
    own_BK = jnp.minimum(wanted_BK, room_BK)
    surplus_B1 = total_B1 - jnp.sum(own_BK, axis=-1, keepdims=True)
    free_BK = room_BK - own_BK
    own_BK += surplus_B1 * free_BK / jnp.maximum(jnp.sum(free_BK, axis=-1, keepdims=True), 1e-6)
    count_BK = jnp.minimum(_round_to_sum(own_BK, total_B1), room_BK)

    fits_B11 = jnp.sum(alive_BKS, axis=(1, 2), keepdims=True) <= K * plan.capacity
    return jnp.where(fits_B11, alive_BKS, protected_BKS | keep_best(candidate_BKS, score_BKS, count_BK))


def _round_to_sum(wanted_BK, total_B1):
    """Integers that sum to the total: rounded down, then the largest remainders up, the lower head first."""
    # What is whole up to rounding is whole.
    rounded_BK = jnp.floor(wanted_BK + 1e-4)
    missing_B1 = total_B1 - jnp.sum(rounded_BK, axis=-1, keepdims=True)
    rank_BK = inverse_permutation(jnp.argsort(jnp.round(rounded_BK - wanted_BK, 4), axis=-1, stable=True))
    return (rounded_BK + (rank_BK < missing_B1)).astype(jnp.int32)


def _spread_rest(live_BK, capacity):
    """Capacities of heads: what they hold, and an even part of what the layer has left."""
    K = live_BK.shape[1]
    rest_B1 = K * capacity - jnp.sum(live_BK, axis=-1, keepdims=True)
    return live_BK + rest_B1 // K + (jnp.arange(K) < rest_B1 % K)
