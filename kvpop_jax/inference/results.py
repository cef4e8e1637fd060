"""What a generation gives back: completions, and what their caches cost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from kvpop_jax.cache import LayerCache
from kvpop_jax.inference.decode import CacheUsage, Setup
from kvpop_jax.inference.sampling import SamplingParams
from kvpop_jax.models import ModelConfig, decode_text


@dataclass(frozen=True)
class CacheReport:
    """What a completion's cache cost, entries per KV head.

    Where layers differ, single numbers are the mean over layers, rounded up; the tuples hold every layer's own.

    Attributes:
        budget: entries asked for; for dense, the slots of the whole sequence.
        sinks, window, pool, state_entries, scratch: how they were spent during decoding (see `CachePlan`).
        allocated: slots that exist.
        peak_live: most slots ever occupied in any layer and head.
        bytes: of this sequence's cache over all layers, scales, the policy's state and bookkeeping included.
        cache_dtype: type of the cached keys and values.
        prompt_survival: share of the prompt still cached at the end, averaged over layers and heads.
        pin_prompt: whether the prompt could not be evicted.
        prefill_mode: how the prompt was evicted from.
        decode: the policy whose rule the steps followed.
        total_budget, total_allocated: entries per KV head, summed over layers.
        layer_budget, layer_allocated, layer_bytes: of every layer.
        layer_peak_live: most slots ever occupied in the fullest head of every layer.
        layer_peak_mean: most slots ever occupied in every layer, averaged over its heads. Where heads share a budget
            (Ada-KV), this is what it limits.
    """

    budget: int
    sinks: int
    window: int
    pool: int
    state_entries: int
    scratch: int
    allocated: int
    peak_live: int
    bytes: int
    cache_dtype: str
    prompt_survival: float
    pin_prompt: bool
    prefill_mode: str
    decode: str
    total_budget: int
    total_allocated: int
    layer_budget: tuple[int, ...]
    layer_allocated: tuple[int, ...]
    layer_bytes: tuple[int, ...]
    layer_peak_live: tuple[int, ...]
    layer_peak_mean: tuple[float, ...]


@dataclass(frozen=True)
class Completion:
    """One generated sequence; the stop token is not part of it.

    Attributes:
        text: what a reader sees of the tokens, special ones left out; empty where the model has no tokenizer.
        tokens: token ids.
        logprobs: of each token, in nats, before temperature and truncation.
        finish_reason: "stop" or "length".
        cache: what it cost.
    """

    text: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    cache: CacheReport


def own_tokens(
    token_nB: Int[np.ndarray, "n B"], model: ModelConfig, sampling: SamplingParams, limit_B: Int[np.ndarray, "B"]
) -> Int[np.ndarray, "B"]:
    """How many of the tokens that each row was fed are its own: those before a stop token, at most `limit` of them."""
    stop_nB = np.isin(token_nB, [*model.eos_token_ids, *sampling.stop_tokens])
    before_B = np.where(stop_nB.any(axis=0), stop_nB.argmax(axis=0), len(token_nB))
    return np.minimum(before_B, limit_B)


def completion(
    tokenizer: Any, tokens: list[int], logprobs: list[float], sampling: SamplingParams, cache: CacheReport
) -> Completion:
    """A row that has ended: whatever is shorter than the limit was ended by a stop token."""
    text = "" if tokenizer is None else decode_text(tokenizer, tokens)
    return Completion(text, tokens, logprobs, "length" if len(tokens) == sampling.max_new_tokens else "stop", cache)


def cache_reports(setup: Setup, caches: Sequence[LayerCache], usage: CacheUsage) -> list[CacheReport]:
    """The report of every row of `usage`; of the caches, whose rows may be others, only the sizes count."""
    plans = setup.plans
    layer_bytes = tuple(sum(leaf.nbytes // len(leaf) for leaf in jax.tree.leaves(cache)) for cache in caches)
    parts = ("budget", "sinks", "window", "pool", "state_entries", "scratch")
    shared = dict(
        {part: _mean_up([getattr(plan, part) for plan in plans]) for part in parts},
        allocated=_mean_up([plan.allocated for plan in plans]),
        bytes=sum(layer_bytes),
        cache_dtype=_each_once(cache.k_BKCD.dtype.name for cache in caches),
        pin_prompt=setup.pin_prompt,
        prefill_mode=_each_once(policy.prefill_mode for policy in setup.policies),
        decode=_each_once(policy.decode for policy in setup.policies),
        total_budget=sum(plan.budget for plan in plans),
        total_allocated=sum(plan.allocated for plan in plans),
        layer_budget=tuple(plan.budget for plan in plans),
        layer_allocated=tuple(plan.allocated for plan in plans),
        layer_bytes=layer_bytes,
    )
    peaks = (np.asarray(usage.peak_live_BN), np.asarray(usage.peak_mean_BN), np.asarray(usage.survival_B))
    return [
        CacheReport(
            **shared,
            peak_live=int(live_N.max()),
            prompt_survival=float(share),
            layer_peak_live=tuple(live_N.tolist()),
            layer_peak_mean=tuple(mean_N.tolist()),
        )
        for live_N, mean_N, share in zip(*peaks, strict=True)
    ]


def _mean_up(values: Sequence[int]) -> int:
    return -(-sum(values) // len(values))


def _each_once(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))
