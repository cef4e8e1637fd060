"""A batch of sequences on bounded caches: prefill once, then many steps per dispatch, nothing growing.

All functions are pure. A step is one program, jitted with the state donated, its layers unrolled and their caches a
list, so capacities may differ per layer and no step copies a stack of weights; a prefill is one program per kind of
layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvpop_jax.cache import CachePlan, LayerCache, live_entries, survived
from kvpop_jax.eviction import token_layout
from kvpop_jax.inference.sampling import SamplingParams, sample
from kvpop_jax.models import (
    DecoderParams,
    LayerInputs,
    ModelConfig,
    apply_layer,
    apply_layers,
    rope_frequencies,
    rope_rotation,
    unembed,
)
from kvpop_jax.policies import NewToken, Policy, Prompt, read_prompt
from pallas_kernels.norms import rms_norm

TOKENS_AT_ONCE = 8192
"""Tokens of prompts in one matrix product: enough to fill a device, few enough that the feed-forward's hidden layer is
a small part of what a long prompt needs (2 x 12,288 numbers a token in Qwen3-8B, whose residual stream has 4,096)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CacheUsage:
    """How full a row's caches have been, and how much of its prompt they hold.

    Attributes:
        peak_live_BN: most slots ever occupied in the fullest head of each layer.
        peak_mean_BN: most slots ever occupied in each layer, averaged over its heads: what a budget limits where heads
            share it.
        survival_B: share of the prompt that is cached, averaged over layers and heads.
    """

    peak_live_BN: Int[Array, "B N"]
    peak_mean_BN: Float[Array, "B N"]
    survival_B: Float[Array, "B"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["caches", "token_B", "log_prob_B", "position_B", "prompt_B", "seed_B", "done_B", "usage"],
    meta_fields=[],
)
@dataclass(frozen=True)
class DecodeState:
    """Where every row stands.

    Attributes:
        caches: one per layer.
        token_B: the last sampled token, the next to be fed; `log_prob_B` is its log-probability.
        position_B: its position.
        prompt_B: length of its prompt.
        seed_B: the row's random stream.
        done_B: rows that have emitted a stop token. They go on computing, and what they emit is dropped; their caches
            keep the tokens that they have.
        usage: what each row's own tokens made of its caches, counted between dispatches.
    """

    caches: list[LayerCache]
    token_B: Int[Array, "B"]
    log_prob_B: Float[Array, "B"]
    position_B: Int[Array, "B"]
    prompt_B: Int[Array, "B"]
    seed_B: Int[Array, "B"]
    done_B: Bool[Array, "B"]
    usage: CacheUsage


@dataclass(frozen=True)
class Setup:
    """What is fixed when a generator is compiled: the model, one policy and cache plan per layer, and pinning."""

    config: ModelConfig
    policies: tuple[Policy, ...]
    plans: tuple[CachePlan, ...]
    pin_prompt: bool


def prefill(
    setup: Setup,
    params: DecoderParams,
    scorers: Sequence[Any],
    token_BS: Int[Array, "B S"],
    length_B: Int[Array, "B"],
    seed_B: Int[Array, "B"],
    programs: "Programs | None" = None,
) -> tuple[Float[Array, "B V"], list[LayerCache]]:
    """Runs right-padded prompts and compacts what survives.

    Args:
        setup: model, policies, plans.
        params: of the model.
        scorers: parameters of each layer's policy, None where it has none.
        token_BS: prompts, padded on the right.
        length_B: tokens of each prompt, at least 1.
        seed_B: one seed per row.
        programs: what runs the parts; None within a program of the caller's.

    Returns:
        Logits after each prompt's last token, and the caches.
    """
    enter, through, leave = programs or (_enter, _through_layer, _leave)
    residual_BSE, rotation = enter(setup.config, params.embedding_VE, token_BS)
    prompt = token_BS, length_B, seed_B, rotation
    caches = []
    parts = zip(setup.policies, setup.plans, params.layers, scorers, strict=True)
    for index, (policy, plan, layer, scorer) in enumerate(parts):
        kind = LayerKind(setup.config, policy, plan, setup.pin_prompt)
        residual_BSE, cache = through(kind, layer, scorer, np.int32(index), residual_BSE, *prompt)
        caches.append(cache)
    ending = replace(params, layers=[])  # a program takes no weights that it does not read
    return leave(setup.config, ending, residual_BSE, length_B), caches


@dataclass(frozen=True)
class LayerKind:
    """What is fixed when a layer of a prefill is compiled: layers of one kind share a program."""

    config: ModelConfig
    policy: Policy
    plan: CachePlan
    pin_prompt: bool


class Programs(NamedTuple):
    """The compiled parts of a prefill.

    A prompt takes long enough in each layer to hide a dispatch, so a program is one layer: what compiles then does not
    grow with the number of layers, and takes seconds where all layers in one program take minutes.
    """

    enter: Callable[..., Any]
    through_layer: Callable[..., Any]
    leave: Callable[..., Any]


def compile_prefill() -> Programs:
    """Fresh programs; they live as long as whoever holds them."""
    return Programs(
        jax.jit(_enter, static_argnums=0),
        jax.jit(_through_layer, static_argnums=0, donate_argnums=4),
        jax.jit(_leave, static_argnums=0),
    )


def _enter(config, embedding_VE, token_BS):
    """The residual stream that enters the first layer, and the rotation of every position."""
    residual_BSE = embedding_VE[token_BS]
    position_BS = jnp.broadcast_to(jnp.arange(token_BS.shape[1]), token_BS.shape)
    return residual_BSE, rope_rotation(config, position_BS, residual_BSE.dtype)


def _through_layer(kind, layer, scorer, index, residual_BSE, token_BS, length_B, seed_B, rotation):
    """One layer over the prompts: the residual stream that leaves it, and its cache."""
    segment_BS = (jnp.arange(token_BS.shape[1]) < length_B[:, None]).astype(jnp.int32)
    prompt_BS = segment_BS > 0 if kind.pin_prompt else None
    frequency_D2 = jnp.asarray(rope_frequencies(kind.config), jnp.float32)

    def attend(inputs: LayerInputs) -> tuple[Float[Array, "B S H D"], LayerCache]:
        def prompt_under(plan: CachePlan) -> Prompt:
            layout = token_layout(segment_BS, sinks=plan.sinks, pool=plan.pool, prompt_BS=prompt_BS)
            tensors = inputs.hidden_BTE, inputs.q_BTHD, inputs.k_BTKD, inputs.v_BTKD
            return Prompt(token_BS, *tensors, layout, seed_B, index, frequency_D2)

        return read_prompt(kind.policy, scorer, prompt_under, kind.plan)

    return apply_layer(kind.config, attend, layer, residual_BSE, rotation, tokens_at_once=TOKENS_AT_ONCE)


def _leave(config, params, residual_BSE, length_B):
    """Logits after each prompt's last token."""
    last_BE = jnp.take_along_axis(residual_BSE, (length_B - 1)[:, None, None], axis=1)[:, 0]
    return unembed(config, params, rms_norm(last_BE, params.final_norm_E, config.rms_norm_eps))


def decode_step(
    setup: Setup,
    params: DecoderParams,
    scorers: Sequence[Any],
    caches: list[LayerCache],
    token_B: Int[Array, "B"],
    position_B: Int[Array, "B"],
    prompt_B: Int[Array, "B"],
    own_B: Bool[Array, "B"],
    seed_B: Int[Array, "B"],
) -> tuple[Float[Array, "B V"], list[LayerCache]]:
    """Feeds one token per row; gives the logits of the next one and the new caches.

    The step is for the rows marked by `own`: the logits of others mean nothing, their caches keep the tokens they have.
    """
    frequency_D2 = jnp.asarray(rope_frequencies(setup.config), jnp.float32)

    def attend(layer: int, inputs: LayerInputs) -> tuple[Float[Array, "B 1 H D"], LayerCache]:
        plan, policy = setup.plans[layer], setup.policies[layer]
        new = NewToken(
            token_B,
            position_B,
            _pinned(setup, plan, prompt_B),
            own_B,
            seed_B,
            inputs.hidden_BTE[:, 0],
            inputs.q_BTHD[:, 0],
            inputs.k_BTKD[:, 0],
            inputs.v_BTKD[:, 0],
            layer,
            frequency_D2,
        )
        o_BHD, cache = policy.step(scorers[layer], caches[layer], new, plan)
        return o_BHD[:, None], cache

    hidden_B1E, caches = apply_layers(setup.config, params, token_B[:, None], position_B[:, None], attend)
    return unembed(setup.config, params, hidden_B1E[:, 0]), caches


def start(
    setup: Setup,
    params: DecoderParams,
    scorers: Sequence[Any],
    token_BS: Int[Array, "B S"],
    length_B: Int[Array, "B"],
    seed_B: Int[Array, "B"],
    sampling: SamplingParams,
) -> DecodeState:
    """Prefills the prompts and samples the first token of every row."""
    logits_BV, caches = prefill(setup, params, scorers, token_BS, length_B, seed_B)
    return first_state(setup, logits_BV, caches, length_B, seed_B, sampling)


def first_state(
    setup: Setup,
    logits_BV: Float[Array, "B V"],
    caches: list[LayerCache],
    length_B: Int[Array, "B"],
    seed_B: Int[Array, "B"],
    sampling: SamplingParams,
) -> DecodeState:
    """Rows right after their prompts, the first token of each sampled. What `prefill` gave may be forked before."""
    token_B, log_prob_B = sample(logits_BV, seed_B, length_B, sampling)
    done_B = _stops(setup, token_B, sampling)
    usage = cache_usage(caches, length_B)
    return DecodeState(caches, token_B, log_prob_B, length_B, length_B, seed_B, done_B, usage)


def decode_steps(
    setup: Setup,
    params: DecoderParams,
    scorers: Sequence[Any],
    state: DecodeState,
    sampling: SamplingParams,
    steps: int,
) -> tuple[DecodeState, Int[Array, "n B"], Float[Array, "n B"]]:
    """`steps` tokens per row in one program, sampled on the device.

    Returns:
        The next state; the tokens that were fed, in order (the first is the one the state came with), and their
        log-probabilities. What a row emits after its stop token means nothing.
    """

    def one(state: DecodeState, _: None) -> tuple[DecodeState, tuple[Array, Array]]:
        # Other rows may need more steps than this one, and steps come in batches: those are not the row's own.
        own_B = ~state.done_B & (state.position_B - state.prompt_B < sampling.max_new_tokens)
        rows = state.token_B, state.position_B, state.prompt_B, own_B, state.seed_B
        logits_BV, caches = decode_step(setup, params, scorers, state.caches, *rows)
        position_B = state.position_B + 1
        token_B, log_prob_B = sample(logits_BV, state.seed_B, position_B, sampling)
        done_B = state.done_B | _stops(setup, token_B, sampling)
        following = replace(
            state, caches=caches, token_B=token_B, log_prob_B=log_prob_B, position_B=position_B, done_B=done_B
        )
        return following, (state.token_B, state.log_prob_B)

    def stretch(state: DecodeState, _: None) -> tuple[DecodeState, tuple[Array, Array]]:
        state, emitted = lax.scan(one, state, length=together)
        return replace(state, usage=higher_usage(state.usage, cache_usage(state.caches, state.prompt_B))), emitted

    # A cache that only fills up is fullest at the end, and that of a row that has ended stays as it was: one count
    # tells all of the steps before it.
    together = 1 if any(policy.shrinks for policy in setup.policies) else steps
    state, emitted = lax.scan(stretch, state, length=steps // together)
    token_nB, log_prob_nB = (x.reshape(steps, -1) for x in emitted)
    return state, token_nB, log_prob_nB


def cache_usage(caches: Sequence[LayerCache], prompt_B: Int[Array, "B"]) -> CacheUsage:
    """The usage of caches as they stand, one per layer."""
    live_NBK = [live_entries(cache) for cache in caches]
    survival_NB = jnp.stack([survived(cache, prompt_B) for cache in caches])
    return CacheUsage(
        peak_live_BN=jnp.stack([jnp.max(live_BK, axis=-1) for live_BK in live_NBK], axis=1),
        peak_mean_BN=jnp.stack([jnp.mean(live_BK, axis=-1) for live_BK in live_NBK], axis=1),
        survival_B=jnp.mean(survival_NB, axis=0),
    )


def higher_usage(before: CacheUsage, now: CacheUsage) -> CacheUsage:
    """The peaks of both, and what survives now."""
    return CacheUsage(
        peak_live_BN=jnp.maximum(before.peak_live_BN, now.peak_live_BN),
        peak_mean_BN=jnp.maximum(before.peak_mean_BN, now.peak_mean_BN),
        survival_B=now.survival_B,
    )


def _pinned(setup, plan, prompt_B):
    return jnp.maximum(prompt_B, plan.sinks) if setup.pin_prompt else jnp.full_like(prompt_B, plan.sinks)


def _stops(setup, token_B, sampling):
    stops = jnp.asarray((*setup.config.eos_token_ids, *sampling.stop_tokens), jnp.int32)
    return jnp.any(token_B[:, None] == stops, axis=1)
