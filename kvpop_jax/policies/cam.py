"""CaM ("Cache Merging", Zhang et al. 2024, ICML; no arXiv id): the value of a token that leaves joins others.

StreamingLLM's rule says which token leaves: beside the sinks the oldest. Its value, over m, is added to those of the
next m tokens that are cached, with probability clip(A / mean of theirs, 0, 1), A the attention received so far,
averaged over a group; keys are not merged. A prompt is cut once, after its attention, its tokens leaving one after
another, each with what earlier ones have left in it, and A that of the whole prompt. Draws depend on a row's seed,
layer, head and the token's position only. m is 32 as in the authors' benchmarks (16 in their demo), and never more
than the pool.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from kvpop_jax.cache import plan_cache
from kvpop_jax.policies.machinery.attend_then_evict import cache_of, cut
from kvpop_jax.policies.machinery.base import Policy
from kvpop_jax.policies.machinery.keeping import inverse_permutation, keep_all
from kvpop_jax.policies.machinery.prompt_attention import accumulated_attention, full_attention, group_mean
from kvpop_jax.policies.machinery.recency import age_priority, oldest, place_oldest
from kvpop_jax.policies.machinery.settings import PolicySettings
from pallas_kernels import decode_attention


def make(settings: PolicySettings) -> Policy:
    """Keeps `sinks` tokens and the `budget - sinks` last ones."""

    def plan(budget, config, entry_bytes):
        return plan_cache("cam", budget, sinks=settings.sinks, window=1, state_bytes=0, entry_bytes=entry_bytes)

    def spread_over(plan):
        return min(settings.methods.merged, plan.pool)

    def leave(prompt, before, plan):
        kept = cut(before, age_priority(prompt), prompt, plan)
        leaving_BKS = before.alive_BKS & ~kept.alive_BKS
        received_BKS = accumulated_attention(prompt)
        v_BSKD = _leave_in_turn(prompt, before.v_BSKD, before.alive_BKS, leaving_BKS, received_BKS, spread_over(plan))
        return replace(kept, v_BSKD=v_BSKD), received_BKS

    def prefill(_, prompt, plan):
        return full_attention(prompt), leave(prompt, keep_all(prompt), plan)[0]

    def take_over(_, prompt, kept, plan):
        kept, received_BKS = leave(prompt, kept, plan)
        return cache_of(kept, received_BKS, prompt, plan, ())

    def step(_, cache, new, plan):
        full_BK = jnp.sum(cache.position_BKC >= 0, axis=-1) >= plan.capacity
        cache = _merge_oldest(cache, new, full_BK, spread_over(plan))
        received_BKC = cache.priority_BKC
        cache, slot_BK = place_oldest(cache, new, plan.capacity)
        o_BHD, _lse, k_BKCD, v_BKCD, attention_BHC = decode_attention(
            new.q_BHD, cache.k_BKCD, cache.v_BKCD, cache.position_BKC, new.k_BKD, new.v_BKD, slot_BK,
            return_probabilities=True,
        )  # fmt: skip
        newest_BKC = jnp.arange(received_BKC.shape[-1]) == slot_BK[..., None]
        received_BKC = jnp.where(newest_BKC, 0, received_BKC) + group_mean(attention_BHC, k_BKCD.shape[1])
        return o_BHD, replace(cache, k_BKCD=k_BKCD, v_BKCD=v_BKCD, priority_BKC=received_BKC)

    return Policy(
        name="cam",
        decode="cam",
        signals=frozenset({"attention", "seed"}),
        prefill_mode="one_shot",
        plan=plan,
        prefill=prefill,
        take_over=take_over,
        step=step,
        priorities=None,
        rewrites=True,
    )


def _merge_oldest(cache, new, full_BK, m):
    """Adds the value of the token that is about to leave a full head to those after it."""
    slot_BK = oldest(cache, new)
    leaving_BKC = jnp.arange(cache.position_BKC.shape[-1]) == slot_BK[..., None]
    position_BK = jnp.sum(jnp.where(leaving_BKC, cache.position_BKC, 0), axis=-1)
    younger_BKC = cache.position_BKC > position_BK[..., None]
    age_BKC = jnp.where(younger_BKC, cache.position_BKC, jnp.iinfo(jnp.int32).max)
    next_BKC = younger_BKC & (cache.position_BKC <= jnp.sort(age_BKC, axis=-1)[..., m - 1 : m])

    received_BKC = cache.priority_BKC
    own_BK = jnp.sum(jnp.where(leaving_BKC, received_BKC, 0), axis=-1)
    joins_BK = _draw(new.seed_B, new.layer, position_BK) * _mean(received_BKC, next_BKC) < own_BK
    v_BKD = jnp.sum(jnp.where(leaving_BKC[..., None], cache.v_BKCD, 0), axis=2)
    joining_BKC1 = (next_BKC & (joins_BK & full_BK)[..., None])[..., None]
    added = jnp.where(joining_BKC1, v_BKD[:, :, None] / m, 0).astype(v_BKD.dtype)
    return replace(cache, v_BKCD=cache.v_BKCD + added)


def _leave_in_turn(prompt, v_BSKD, alive_BKS, leaving_BKS, received_BKS, m):
    """The values after every leaving token, the oldest first, was added to the `m` alive ones that follow it."""
    B, K, S = alive_BKS.shape
    # In this order the tokens that follow are the next rows.
    order_BKS = jnp.argsort(~alive_BKS, axis=-1, stable=True)
    sort = partial(jnp.take_along_axis, indices=order_BKS, axis=-1)
    ahead = ((0, 0), (0, 0), (0, m))
    there_BKS, received_BKS = (jnp.pad(sort(x), ahead) for x in (alive_BKS, received_BKS))
    leaving_BKS = sort(leaving_BKS)
    draw_BKS = _draws(prompt, sort(jnp.broadcast_to(prompt.layout.position_BS[:, None], (B, K, S))))
    v_BKSD = jnp.take_along_axis(jnp.swapaxes(v_BSKD, 1, 2), order_BKS[..., None], axis=2)

    def one(v_BKSD, token):
        following = partial(lax.dynamic_slice_in_dim, start_index=token + 1, slice_size=m, axis=2)
        next_BKm, v_BKmD = following(there_BKS), following(v_BKSD)
        threshold_BK = draw_BKS[..., token] * _mean(following(received_BKS), next_BKm)
        joins_BK = (threshold_BK < received_BKS[..., token]) & leaving_BKS[..., token]
        joining_BKm1 = (next_BKm & joins_BK[..., None])[..., None]
        v_BKmD += jnp.where(joining_BKm1, v_BKSD[:, :, token, None] / m, 0).astype(v_BKmD.dtype)
        return lax.dynamic_update_slice_in_dim(v_BKSD, v_BKmD, token + 1, axis=2), None

    v_BKSD, _ = lax.scan(one, jnp.pad(v_BKSD, (*ahead, (0, 0))), jnp.arange(S))
    back_BKS = inverse_permutation(order_BKS)
    return jnp.swapaxes(jnp.take_along_axis(v_BKSD, back_BKS[..., None], axis=2), 1, 2)


def _draws(prompt, position_BKS):
    draw = jax.vmap(_draw, in_axes=(None, None, 2), out_axes=2)
    return draw(prompt.seed_B, prompt.layer, position_BKS)


def _mean(x, where):
    return jnp.sum(jnp.where(where, x, 0), axis=-1) / jnp.maximum(jnp.sum(where, axis=-1), 1)


def _draw(seed_B, layer, position_BK):
    """A number from [0, 1) per row and head."""

    def one(seed, position, head):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), layer), position), head)
        return jax.random.uniform(key)

    heads_K = jnp.arange(position_BK.shape[1])
    return jax.vmap(jax.vmap(one, (None, 0, 0)), (0, 0, None))(seed_B, position_BK, heads_K)
