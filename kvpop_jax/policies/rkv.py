"""R-KV (Cai et al. 2025, arXiv 2505.24133): important tokens, less those that repeat one another.

Every `rkv_interval` steps, and once after a prompt above the budget, the cache is cut to the budget; in between it
grows, in slots of scratch. Importance: attention of the last queries over the tokens before them, logits maximal over
a group, averaged over queries, then the maximum over neighbours. Redundancy: softmax of the mean cosine with all
keys, where of its near-duplicates each key spares the most recent. Score: lambda * importance - (1 - lambda) *
redundancy; the last tokens stay. lambda is 0.1 as in the authors' README (0.07 in their code); that code measures
similarity on the first row of a batch only. The queries and a counter of steps are charged to the budget.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from kvpop_jax.cache import PROTECTED, plan_cache
from kvpop_jax.policies.machinery.attend_then_evict import attend, cache_of, cut, free
from kvpop_jax.policies.machinery.base import Policy
from kvpop_jax.policies.machinery.keeping import inverse_permutation, keep_all, keep_best, prompt_length
from kvpop_jax.policies.machinery.prompt_attention import full_attention
from kvpop_jax.policies.machinery.settings import PolicySettings
from pallas_kernels.rows import read_rows, to_rows


def make(settings: PolicySettings) -> Policy:
    """Keeps the last `rkv_observed` tokens and the best of the rest; neither sinks nor a window of its own."""
    methods = settings.methods
    window = methods.rkv_observed

    def plan(budget, config, entry_bytes):
        query_bytes = window * (config.num_heads // config.num_kv_heads) * entry_bytes // 2
        return plan_cache(
            "rkv",
            budget,
            sinks=0,
            window=window,
            state_bytes=query_bytes + 4,
            entry_bytes=entry_bytes,
            scratch=methods.rkv_interval,
        )

    def score_prompt(prompt, kept):
        length_B = prompt_length(prompt)
        position_BKS = jnp.where(kept.alive_BKS, prompt.layout.position_BS[:, None], -1)
        query_BHWD = _last_queries(prompt, length_B, window)
        return _score(methods, query_BHWD, jnp.swapaxes(kept.k_BSKD, 1, 2), position_BKS, length_B - 1)

    def prefill(_, prompt, plan):
        kept = keep_all(prompt)
        return full_attention(prompt), cut(kept, score_prompt(prompt, kept), prompt, plan)

    def take_over(_, prompt, kept, plan):
        score_BKS = score_prompt(prompt, kept)
        length_B = prompt_length(prompt)
        # Kept like the cache's rows, as which the plan counts them.
        state = to_rows(_last_queries(prompt, length_B, window), plan.rows), jnp.zeros_like(length_B)
        return cache_of(cut(kept, score_BKS, prompt, plan), score_BKS, prompt, plan, state)

    def step(_, cache, new, plan):
        o_BHD, cache, _attention = attend(cache, new)
        kept_queries, steps_B = cache.state
        at_W1 = (jnp.arange(window) == (new.position_B % window)[:, None])[:, None, :, None]
        query_BHWD = jnp.where(at_W1, new.q_BHD[:, :, None], read_rows(kept_queries))
        cache = replace(cache, state=(to_rows(query_BHWD, plan.rows), steps_B + 1))
        due_B = ((steps_B + 1) % methods.rkv_interval == 0) & new.own_B

        def compress(cache):
            position_BKC = cache.position_BKC
            score_BKC = _score(methods, query_BHWD, read_rows(cache.k_BKCD), position_BKC, new.position_B)
            last_B11, pinned_B11 = new.position_B[:, None, None], new.pinned_B[:, None, None]
            protected_BKC = (position_BKC > last_B11 - window) | (position_BKC < pinned_B11)
            priority_BKC = jnp.where(protected_BKC, PROTECTED, score_BKC)
            kept_BKC = _keep_slots(position_BKC, priority_BKC, plan.capacity)
            return free(cache, due_B[:, None, None] & ~kept_BKC)

        return o_BHD, lax.cond(jnp.any(due_B), compress, lambda cache: cache, cache)

    return Policy(
        name="rkv",
        decode="rkv",
        signals=frozenset({"attention"}),
        prefill_mode="one_shot",
        plan=plan,
        prefill=prefill,
        take_over=take_over,
        step=step,
        priorities=None,
        shrinks=True,
    )


def _last_queries(prompt, length_B, window):
    """[B, H, W, D]: the query of position p at p modulo the window, as steps go on to write them."""
    last_B1 = length_B[:, None] - 1
    position_BW = jnp.maximum(last_B1 - (last_B1 - jnp.arange(window)) % window, 0)
    return jnp.swapaxes(jnp.take_along_axis(prompt.q_BSHD, position_BW[..., None, None], axis=1), 1, 2)


def _keep_slots(position_BKC, priority_BKC, count):
    """`keep_best` for slots, whose order says nothing: of equal priorities the older token stays."""
    order_BKC = jnp.argsort(_by_age(position_BKC), axis=-1)
    there_BKC, priority_BKC = (jnp.take_along_axis(x, order_BKC, axis=-1) for x in (position_BKC >= 0, priority_BKC))
    return jnp.take_along_axis(keep_best(there_BKC, priority_BKC, count), inverse_permutation(order_BKC), axis=-1)


def _score(methods, query_BHWD, k_BKCD, position_BKC, last_B):
    """Of every slot, in float32; 0 for empty ones and for the last tokens. One KV head at a time: C x C cosines."""
    B, H, W, D = query_BHWD.shape
    K = k_BKCD.shape[1]
    query_BKGWD = query_BHWD.reshape(B, K, H // K, W, D)

    def one_head(head):
        q_GWD, k_CD, position_C, last = head
        order_C = jnp.argsort(_by_age(position_C))
        position_C = position_C[order_C]
        score_C = _score_in_order(methods, q_GWD, k_CD[order_C].astype(jnp.float32), position_C, last)
        return score_C[inverse_permutation(order_C)]

    heads = (query_BKGWD, k_BKCD, position_BKC, jnp.broadcast_to(last_B[:, None], (B, K)))
    flat = jax.tree.map(lambda x: x.reshape(B * K, *x.shape[2:]), heads)
    return lax.map(one_head, flat).reshape(B, K, -1)


def _score_in_order(methods, q_GWD, k_CD, position_C, last):
    exact = {"preferred_element_type": jnp.float32, "precision": lax.Precision.HIGHEST}
    there_C = position_C >= 0
    scored_C = there_C & (position_C <= last - methods.rkv_observed)
    logit_WC = jnp.max(jnp.einsum("GWD,CD->GWC", q_GWD, k_CD, **exact), axis=0) * k_CD.shape[1] ** -0.5
    # The lowest number, not -inf: with nothing to score the softmax is still a number.
    attention_WC = jax.nn.softmax(jnp.where(scored_C, logit_WC, jnp.finfo(jnp.float32).min), axis=-1)
    importance_C = jnp.where(scored_C, jnp.mean(attention_WC, axis=0), 0)
    C, side = len(position_C), methods.rkv_kernel // 2
    padded = jnp.pad(importance_C, side)
    importance_C = jnp.max(jnp.stack([padded[shift : shift + C] for shift in range(2 * side + 1)]), axis=0)

    unit_CD = k_CD / jnp.maximum(jnp.linalg.norm(k_CD, axis=-1, keepdims=True), 1e-12)
    cosine_CC = jnp.einsum("CD,ED->CE", unit_CD, unit_CD, **exact)
    index_C = jnp.arange(C)
    pair_CC = there_C[:, None] & there_C & (index_C[:, None] != index_C)
    cosine_CC = jnp.where(pair_CC, cosine_CC, 0)
    youngest_C1 = jnp.max(jnp.where(cosine_CC > methods.rkv_similarity, index_C, -1), axis=-1, keepdims=True)
    cosine_CC = jnp.where(index_C == youngest_C1, 0, cosine_CC)
    mean_C = jnp.sum(cosine_CC, axis=0) / jnp.maximum(jnp.sum(there_C), 1)
    redundancy_C = jax.nn.softmax(jnp.where(there_C, mean_C, jnp.finfo(jnp.float32).min))
    weight = methods.rkv_importance
    return jnp.where(scored_C, weight * importance_C - (1 - weight) * redundancy_C, 0)


def _by_age(position_C):
    """Sorts empty slots last."""
    return jnp.where(position_C < 0, jnp.iinfo(jnp.int32).max, position_C)
