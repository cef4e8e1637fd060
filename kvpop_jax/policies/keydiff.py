"""KeyDiff (Park et al. 2025, arXiv 2504.15364): keep keys that differ from the rest.

The anchor is the mean of all cached keys at unit length; the key most similar to it goes. Nothing is protected. The
paper reads a prompt in blocks of 128 under the budget; here, as in kvpress, it is cut once after its attention. Steps
follow the paper: the new key joins, the anchor is taken afresh from what is cached, and one key goes.
"""

from dataclasses import replace

import jax.numpy as jnp

from kvpop_jax.cache import plan_cache
from kvpop_jax.policies.machinery.attend_then_evict import attend_then_evict
from kvpop_jax.policies.machinery.base import Policy
from kvpop_jax.policies.machinery.settings import PolicySettings
from pallas_kernels.rows import read_rows


def make(settings: PolicySettings) -> Policy:
    """Keeps `budget` tokens; neither sinks nor window."""

    def score_prompt(prompt, kept):
        return _difference(jnp.swapaxes(kept.k_BSKD, 1, 2), kept.alive_BKS)

    def rescore(cache, attention_BHC):
        return _difference(read_rows(cache.k_BKCD), cache.position_BKC >= 0)

    def plan(budget, config, entry_bytes):
        return plan_cache("keydiff", budget, sinks=0, window=0, state_bytes=0, entry_bytes=entry_bytes, scratch=1)

    return replace(attend_then_evict("keydiff", plan, score_prompt, rescore), signals=frozenset())


def _difference(k_BKCD, there_BKC):
    """Minus the cosine of every key with the mean direction of those that are there."""
    k_BKCD = k_BKCD.astype(jnp.float32)
    unit_BKCD = k_BKCD / jnp.maximum(jnp.linalg.norm(k_BKCD, axis=-1, keepdims=True), 1e-12)
    anchor_BKD = jnp.sum(jnp.where(there_BKC[..., None], unit_BKCD, 0), axis=2)
    anchor_BKD /= jnp.maximum(jnp.linalg.norm(anchor_BKD, axis=-1, keepdims=True), 1e-12)
    return -jnp.sum(unit_BKCD * anchor_BKD[:, :, None], axis=-1)
