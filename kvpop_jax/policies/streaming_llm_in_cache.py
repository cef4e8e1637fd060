"""StreamingLLM (Xiao et al. 2023, arXiv 2309.17453) as published: positions are counted within the cache.

The tokens of `streaming_llm`, but keys are cached without rotary embedding, and at every step each is turned to its
rank in the cache and the query to the last rank: a distance is never larger than the cache. A prompt is attended to
at its true positions and cut once, after its attention, as in the authors' code, which also reads a prompt in one
piece.
"""

from dataclasses import replace

import jax.numpy as jnp

from kvpop_jax.cache import plan_cache
from kvpop_jax.policies.machinery.attend_then_evict import cache_of, cut
from kvpop_jax.policies.machinery.base import Policy
from kvpop_jax.policies.machinery.keeping import inverse_permutation, keep_all
from kvpop_jax.policies.machinery.prompt_attention import full_attention
from kvpop_jax.policies.machinery.recency import age_priority, place_oldest
from kvpop_jax.policies.machinery.rotation import linear_turn, turn
from kvpop_jax.policies.machinery.settings import PolicySettings
from pallas_kernels import decode_attention


def make(settings: PolicySettings) -> Policy:
    """Keeps `sinks` tokens and the `budget - sinks` last ones."""

    def plan(budget, config, entry_bytes):
        return plan_cache(
            "streaming_llm_in_cache", budget, sinks=settings.sinks, window=1, state_bytes=0, entry_bytes=entry_bytes
        )

    return Policy(
        name="streaming_llm_in_cache",
        decode="streaming_llm_in_cache",
        signals=frozenset(),
        prefill_mode="one_shot",
        plan=plan,
        prefill=_prefill,
        take_over=_take_over,
        step=_step,
        priorities=None,
        rewrites=True,
    )


def _prefill(_, prompt, plan):
    return full_attention(prompt), cut(keep_all(prompt), age_priority(prompt), prompt, plan)


def _take_over(_, prompt, kept, plan):
    priority_BKS = age_priority(prompt)
    kept = cut(kept, priority_BKS, prompt, plan)
    angle_BS1D2 = prompt.layout.position_BS[..., None, None] * prompt.frequency_D2
    kept = replace(kept, k_BSKD=turn(kept.k_BSKD, -angle_BS1D2))
    return cache_of(kept, priority_BKS, prompt, plan, ())


def _step(_, cache, new, plan):
    cache, slot_BK = place_oldest(cache, new, plan.capacity)
    angle_B1D2 = new.position_B[:, None, None] * new.frequency_D2
    newest_BKC1 = (jnp.arange(plan.allocated) == slot_BK[..., None])[..., None]
    k_BKCD = jnp.where(newest_BKC1, turn(new.k_BKD, -angle_B1D2)[:, :, None], cache.k_BKCD)

    position_BKC = cache.position_BKC
    there_BKC = position_BKC >= 0
    rank_BKC = inverse_permutation(jnp.argsort(jnp.where(there_BKC, position_BKC, jnp.iinfo(jnp.int32).max), axis=-1))
    last_BK = jnp.sum(there_BKC, axis=-1) - 1
    B, H, D = new.q_BHD.shape
    # By as much as the newest key moves, from its true position to the last rank of its head.
    moved_BK = last_BK - new.position_B[:, None]
    q_BKGD = new.q_BHD.reshape(B, last_BK.shape[1], -1, D)
    q_BHD = turn(q_BKGD, moved_BK[..., None, None] * new.frequency_D2).reshape(B, H, D)
    angle_CD2 = jnp.arange(plan.allocated)[:, None] * new.frequency_D2
    turned_BKCD = linear_turn(k_BKCD, jnp.cos(angle_CD2)[rank_BKC], jnp.sin(angle_CD2)[rank_BKC])
    newest_BKD = jnp.sum(jnp.where(newest_BKC1, turned_BKCD, 0), axis=2)
    o_BHD, _lse, _turned, v_BKCD, _ = decode_attention(
        q_BHD, turned_BKCD, cache.v_BKCD, position_BKC, newest_BKD, new.v_BKD, slot_BK
    )
    return o_BHD, replace(cache, k_BKCD=k_BKCD, v_BKCD=v_BKCD)
