"""TOVA (Oren et al. 2024, arXiv 2401.06104): drop the token that the current query attends to least.

Attention is averaged over all query heads, so all KV heads of a layer keep the same tokens. Nothing is protected: the
newest token competes too, as in the authors' code (kvpress keeps it). The prompt is cut once, after its attention, by
the weights of its last query. A step attends over the budget and one scratch slot, then frees the weakest.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from kvpop_jax.cache import PROTECTED, cache_from_prompt, choose_victim, place, plan_cache
from kvpop_jax.policies.machinery.base import Policy, PolicySettings
from kvpop_jax.policies.machinery.keeping import full_attention, keep_all, keep_best, prompt_length, protect
from pallas_kernels import decode_attention


def make(settings: PolicySettings) -> Policy:
    """Keeps `budget` tokens; neither sinks nor window."""
    return Policy(
        name="tova",
        decode="tova",
        signals=frozenset({"attention"}),
        prefill_mode="one_shot",
        plan=lambda budget, config, entry_bytes: plan_cache(
            "tova", budget, sinks=0, window=0, state_bytes=0, entry_bytes=entry_bytes, scratch=1
        ),
        prefill=_prefill,
        take_over=_take_over,
        step=_step,
        priorities=None,
    )


def _prefill(_, prompt, plan):
    kept = keep_all(prompt)
    alive_BKS = keep_best(kept.alive_BKS, _weight(prompt), plan.capacity)
    return full_attention(prompt), replace(kept, alive_BKS=alive_BKS)


def _take_over(_, prompt, kept, plan):
    weight_BKS = _weight(prompt)
    alive_BKS = keep_best(kept.alive_BKS, weight_BKS, plan.capacity)
    return cache_from_prompt(kept.k_BSKD, kept.v_BSKD, alive_BKS, weight_BKS, prompt_length(prompt), plan, ())


def _weight(prompt):
    weight_BS = _last_query_attention(prompt, prompt_length(prompt))
    return protect(jnp.repeat(weight_BS[:, None], prompt.k_BSKD.shape[2], axis=1), prompt, window=0)


def _step(_, cache, new, plan):
    slot_BK = choose_victim(cache)
    cache = place(cache, slot_BK, new.position_B)
    o_BHD, _lse, k_BKCD, v_BKCD, attention_BHC = decode_attention(
        new.q_BHD, cache.k_BKCD, cache.v_BKCD, cache.position_BKC, new.k_BKD, new.v_BKD, slot_BK,
        return_probabilities=True,
    )  # fmt: skip
    pinned_BKC = (cache.position_BKC >= 0) & (cache.position_BKC < new.pinned_B[:, None, None])
    priority_BKC = jnp.where(pinned_BKC, PROTECTED, jnp.mean(attention_BHC, axis=1)[:, None])
    cache = replace(cache, k_BKCD=k_BKCD, v_BKCD=v_BKCD, priority_BKC=priority_BKC)
    return o_BHD, _free_overflow(cache, plan.budget)


def _free_overflow(cache, budget):
    """Empties the weakest slot of every head that holds more than the budget."""
    slots = cache.position_BKC.shape[-1]
    over_BK1 = jnp.sum(cache.position_BKC >= 0, axis=-1, keepdims=True) > budget
    weakest_BKC = jnp.arange(slots) == choose_victim(cache)[..., None]
    return replace(cache, position_BKC=jnp.where(over_BK1 & weakest_BKC, -1, cache.position_BKC))


def _last_query_attention(prompt, length_B):
    """Attention of the last prompt token, averaged over all heads."""
    B, _S, H, D = prompt.q_BSHD.shape
    K = prompt.k_BSKD.shape[2]
    q_BKGD = jnp.take_along_axis(prompt.q_BSHD, (length_B - 1)[:, None, None, None], axis=1).reshape(B, K, H // K, D)
    s_BKGS = jnp.einsum("BKGD,BSKD->BKGS", q_BKGD, prompt.k_BSKD, preferred_element_type=jnp.float32) * D**-0.5
    s_BKGS = jnp.where((prompt.layout.segment_BS > 0)[:, None, None], s_BKGS, -jnp.inf)
    return jnp.mean(jax.nn.softmax(s_BKGS, axis=-1), axis=(1, 2))
