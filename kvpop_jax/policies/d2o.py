"""D2O (Wan et al. 2024, arXiv 2406.13035): H2O, but what is dropped is merged into the most similar token that stays.

Scores and the recent share are H2O's, with sinks. A dropped token joins the kept one whose key has the largest cosine
c with its own, if the mean of c over the heads is at least tau: key and value become the mean of the kept ones and of
the joining ones times c. tau starts as the mean of c over what the prompt dropped, and moves halfway to each step's c
before it is compared. As in the authors' code, whose j-th dropped tokens of all heads decide together; unlike it,
layers 0, 1 and the last are cut like the others, and layer budgets are uniform or given to `Generator`. tau is
charged to the budget.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from kvpop_jax.policies.h2o import recent_plan
from kvpop_jax.policies.machinery.attend_then_evict import attend, cache_of, cut, free, overflow
from kvpop_jax.policies.machinery.base import Policy
from kvpop_jax.policies.machinery.keeping import keep_all
from kvpop_jax.policies.machinery.prompt_attention import accumulated_attention, full_attention, group_mean
from kvpop_jax.policies.machinery.settings import PolicySettings

_NONE_YET = -2.0  # tau before anything was dropped: below every cosine


def make(settings: PolicySettings) -> Policy:
    """Keeps `sinks`, the most recent `recent_share` of the budget, and heavy hitters in the rest."""
    return Policy(
        name="d2o",
        decode="d2o",
        signals=frozenset({"attention"}),
        prefill_mode="one_shot",
        plan=recent_plan("d2o", settings.methods.recent_share, sinks=settings.sinks, state_bytes=4),
        prefill=_prefill,
        take_over=_take_over,
        step=_step,
        priorities=None,
        rewrites=True,
    )


def _prefill(_, prompt, plan):
    everything = keep_all(prompt)
    kept = cut(everything, accumulated_attention(prompt), prompt, plan)
    return full_attention(prompt), _merge_dropped(prompt, everything, kept, plan)[0]


def _take_over(_, prompt, kept, plan):
    score_BKS = accumulated_attention(prompt)
    kept, tau_B = _merge_dropped(prompt, kept, cut(kept, score_BKS, prompt, plan), plan)
    return cache_of(kept, score_BKS, prompt, plan, tau_B)


def _step(_, cache, new, plan):
    o_BHD, cache, attention_BHC = attend(cache, new)
    cache = replace(cache, priority_BKC=cache.priority_BKC + group_mean(attention_BHC, cache.k_BKCD.shape[1]))
    dropped_BKC = overflow(cache, new, plan)
    drops_BK = jnp.any(dropped_BKC, axis=-1)
    drops_B = jnp.any(drops_BK, axis=-1)
    k_BKCD = cache.k_BKCD
    unit_BKCD = _unit(k_BKCD)
    own_BKD, k_BKD, v_BKD = (
        jnp.sum(jnp.where(dropped_BKC[..., None], x, 0), axis=2) for x in (unit_BKCD, k_BKCD, cache.v_BKCD)
    )
    cosine_BKC = jnp.einsum("BKCD,BKD->BKC", unit_BKCD, own_BKD, precision=lax.Precision.HIGHEST)
    stays_BKC = (cache.position_BKC >= 0) & ~dropped_BKC
    cosine_BKC = jnp.where(stays_BKC, cosine_BKC, -jnp.inf)
    largest_BK1 = jnp.max(cosine_BKC, axis=-1, keepdims=True)
    # Of equally similar tokens the oldest.
    age_BKC = jnp.where(cosine_BKC == largest_BK1, cache.position_BKC, jnp.iinfo(jnp.int32).max)
    target_BKC = jnp.arange(age_BKC.shape[-1]) == jnp.argmin(age_BKC, axis=-1, keepdims=True)

    tau_B = cache.state
    mean_B = jnp.sum(jnp.where(drops_BK, largest_BK1[..., 0], 0), axis=-1) / jnp.maximum(jnp.sum(drops_BK, axis=-1), 1)
    moved_B = jnp.where(tau_B == _NONE_YET, mean_B, (tau_B + mean_B) / 2)
    joins_BKC1 = (target_BKC & (drops_BK & (mean_B >= moved_B)[:, None])[..., None])[..., None]
    k_BKCD, v_BKCD = (
        jnp.where(joins_BKC1, (old + largest_BK1[..., None] * x_BKD[:, :, None]) / 2, old).astype(old.dtype)
        for old, x_BKD in ((k_BKCD, k_BKD), (cache.v_BKCD, v_BKD))
    )
    cache = replace(cache, k_BKCD=k_BKCD, v_BKCD=v_BKCD, state=jnp.where(drops_B, moved_B, tau_B))
    return o_BHD, free(cache, dropped_BKC)


def _merge_dropped(prompt, before, kept, plan):
    """Merges what was there `before` and was not kept; also tau of everything that the prompt has lost so far.

    Similarity is that of the prompt's own keys.
    """
    real_BS = prompt.layout.segment_BS > 0
    gone_BKS = real_BS[:, None] & ~kept.alive_BKS
    joining_BKS = before.alive_BKS & ~kept.alive_BKS
    row = (prompt.k_BSKD, kept.k_BSKD, kept.v_BSKD, kept.alive_BKS, gone_BKS, joining_BKS)
    k_BSKD, v_BSKD, tau_B = lax.map(lambda x: _merge_row(*x, slots=plan.slots), row)
    return replace(kept, k_BSKD=k_BSKD, v_BSKD=v_BSKD), tau_B


def _merge_row(own_SKD, k_SKD, v_SKD, alive_KS, gone_KS, joining_KS, *, slots):
    S = alive_KS.shape[1]
    kept_KC = jnp.argsort(~alive_KS, axis=-1, stable=True)[:, :slots]
    unit_KSD = _unit(jnp.swapaxes(own_SKD, 0, 1))
    kept_KCD = jnp.take_along_axis(unit_KSD, kept_KC[..., None], axis=1)
    cosine_KSC = jnp.einsum("KSD,KCD->KSC", unit_KSD, kept_KCD, precision=lax.Precision.HIGHEST)
    cosine_KSC = jnp.where(jnp.take_along_axis(alive_KS, kept_KC, axis=1)[:, None], cosine_KSC, -jnp.inf)
    largest_KS = jnp.max(cosine_KSC, axis=-1)
    target_KS = jnp.take_along_axis(kept_KC, jnp.argmax(cosine_KSC, axis=-1), axis=1)

    # Heads drop different tokens: the j-th of each decide together.
    nth_KS = jnp.where(gone_KS, jnp.cumsum(gone_KS, axis=-1) - 1, S)
    scatter = jax.vmap(lambda nth_S, x_S: jnp.zeros(S).at[nth_S].set(x_S, mode="drop"))
    count_S = jnp.sum(scatter(nth_KS, jnp.ones_like(largest_KS)), axis=0)
    mean_S = jnp.sum(scatter(nth_KS, largest_KS), axis=0) / jnp.maximum(count_S, 1)
    tau = jnp.where(count_S[0] > 0, jnp.sum(mean_S) / jnp.maximum(jnp.sum(count_S > 0), 1), _NONE_YET)
    joins_KS = joining_KS & (jnp.take(mean_S, nth_KS, mode="clip") >= tau)

    into_KS = jnp.where(joins_KS, target_KS, S)
    weight_KS = jnp.where(joins_KS, largest_KS, 0)
    add = jax.vmap(lambda into_S, x_S: jnp.zeros((S, *x_S.shape[1:]), x_S.dtype).at[into_S].add(x_S, mode="drop"))
    joined_KS1 = 1 + add(into_KS, joins_KS.astype(jnp.float32))[..., None]
    merged = []
    for x_SKD in (k_SKD, v_SKD):
        x_KSD = jnp.swapaxes(x_SKD, 0, 1)
        sum_KSD = x_KSD + add(into_KS, weight_KS[..., None] * x_KSD)
        merged.append(jnp.swapaxes(sum_KSD / joined_KS1, 0, 1).astype(x_SKD.dtype))
    return *merged, tau


def _unit(x):
    x = x.astype(jnp.float32)
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
