"""What one layer loses under one pattern: everything else keeps its full cache (PolyKV section 3.2).

A text is a prompt and a continuation. The model reads it once with full caches, and what enters each layer is kept.
A layer's own input does not depend on how that layer evicts, so a pattern is replayed on the kept input of the layer
alone: that gives the cosine. For the perplexity only the layers above run again; where the prompt's own activations did
not change they read the reference's keys and values of the prompt.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvpop_jax.cache import CachePlan
from kvpop_jax.eviction import token_layout
from kvpop_jax.models import (
    DecoderParams,
    LayerInputs,
    LayerParams,
    ModelConfig,
    apply_layer,
    layer_inputs,
    rope_frequencies,
    rope_rotation,
    unembed,
)
from kvpop_jax.policies import NewToken, Policy, Prompt, read_prompt
from pallas_kernels import masked_attention
from pallas_kernels.norms import rms_norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Reference:
    """The model with full caches on a batch of texts.

    Attributes:
        token_BT: prompts and continuations.
        residual_NBTE: what enters each layer.
        k_NBPKD, v_NBPKD: of the prompts.
        attention_NBCE: what attention adds to the stream for each token of the continuation.
        attended_NT: attention that each position receives from the continuation, averaged over texts, queries, heads.
        nll_BC: of the continuation's tokens but the first, in nats.
    """

    token_BT: Int[Array, "B T"]
    residual_NBTE: Float[Array, "N B T E"]
    k_NBPKD: Float[Array, "N B P K D"]
    v_NBPKD: Float[Array, "N B P K D"]
    attention_NBCE: Float[Array, "N B C E"]
    attended_NT: Float[Array, "N T"]
    nll_BC: Float[Array, "B C-1"]


@partial(jax.jit, static_argnames=("config", "prompt"))
def read_reference(
    config: ModelConfig, params: DecoderParams, token_BT: Int[Array, "B T"], *, prompt: int
) -> Reference:
    """Reads texts of which the first `prompt` tokens are the prompt; `params` has its layers stacked."""
    residual_BTE = params.embedding_VE[token_BT]
    rotation = _rotation(config, token_BT, residual_BTE.dtype)

    def body(residual_BTE, layer):
        def attend(inputs: LayerInputs):
            o_BTHD = _causal(inputs.q_BTHD, inputs.k_BTKD, inputs.v_BTKD)
            attended_T = _attended(inputs.q_BTHD[:, prompt:], inputs.k_BTKD)
            kept = inputs.k_BTKD[:, :prompt], inputs.v_BTKD[:, :prompt], _projected(o_BTHD[:, prompt:], layer)
            return o_BTHD, (residual_BTE, *kept, attended_T)

        return apply_layer(config, attend, layer, residual_BTE, rotation)

    last_BTE, (residual_NBTE, k_NBPKD, v_NBPKD, attention_NBCE, attended_NT) = lax.scan(
        body, residual_BTE, params.layers
    )
    nll_BC = _nll(config, params, last_BTE[:, prompt:], token_BT[:, prompt:])
    return Reference(token_BT, residual_NBTE, k_NBPKD, v_NBPKD, attention_NBCE, attended_NT, nll_BC)


def make_replay(
    config: ModelConfig, policy: Policy, plan: CachePlan, *, prompt: int, prompt_changes: bool, perplexity: bool
) -> Callable[[DecoderParams, Any, Reference, Int[Array, ""], Int[Array, "B"]], tuple[Array, Array]]:
    """A compiled (stacked weights, policy's parameters of the layer, reference, layer, seeds) -> cosines, losses.

    The layer runs under the policy and all others with full caches.

    Args:
        config, policy, plan: the model, what rules the layer, and the layer's cache.
        prompt: tokens of the prompts.
        prompt_changes: the policy evicts within the prompt, so the prompt's own activations change and all of it runs
            again above; else only the continuation does, on the reference's keys and values of the prompt.
        perplexity: also run the layers above.

    Returns of the function:
        Cosine between the attention block's output and the reference's, [B, C]; and the continuation's negative
        log-likelihoods [B, C - 1], those of the reference where perplexity is not asked for.
    """
    first = 0 if prompt_changes else prompt

    @jax.jit
    def replay(params, own, reference, layer, seed_B):
        weights = _layer(params.layers, layer)
        o_BTHD = _attend_under(config, policy, plan, weights, own, reference, layer, seed_B, prompt)
        cosine_BC = _cosine(_projected(o_BTHD[:, prompt:], weights), reference.attention_NBCE[layer])
        if not perplexity:
            return cosine_BC, reference.nll_BC
        last_BTE = _finish(config, params, o_BTHD[:, first:], reference, layer, first)
        return cosine_BC, _nll(config, params, last_BTE[:, prompt - first :], reference.token_BT[:, prompt:])

    return replay


def _attend_under(
    config: ModelConfig,
    policy: Policy,
    plan: CachePlan,
    weights: LayerParams,
    own: Any,
    reference: Reference,
    layer: Array,
    seed_B: Array,
    prompt: int,
) -> Float[Array, "B T H D"]:
    """The layer's attention output: the prompt at once, the continuation token by token from the bounded cache."""
    token_BT, residual_BTE = reference.token_BT, reference.residual_NBTE[layer]
    inputs = layer_inputs(config, weights, residual_BTE, _rotation(config, token_BT, residual_BTE.dtype))
    read = (token_BT, inputs.hidden_BTE, inputs.q_BTHD, inputs.k_BTKD, inputs.v_BTKD)
    frequency_D2 = jnp.asarray(rope_frequencies(config), jnp.float32)
    segment_BP = jnp.ones_like(token_BT[:, :prompt])

    def prompt_under(plan: CachePlan) -> Prompt:
        layout = token_layout(segment_BP, sinks=plan.sinks, pool=plan.pool, prompt_BS=None)
        tokens, hidden, q, k, v = (x[:, :prompt] for x in read)
        return Prompt(tokens, hidden, q, k, v, layout, seed_B, layer, frequency_D2)

    def step(cache, token):
        position, token_B, *tensors = token
        batch = token_B.shape
        position_B, pinned_B, own_B = jnp.full(batch, position), jnp.full(batch, plan.sinks), jnp.full(batch, True)
        new = NewToken(token_B, position_B, pinned_B, own_B, seed_B, *tensors, layer, frequency_D2)
        o_BHD, cache = policy.step(own, cache, new, plan)
        return cache, o_BHD

    o_BPHD, cache = read_prompt(policy, own, prompt_under, plan)
    position_C = jnp.arange(prompt, token_BT.shape[1])
    steps = (position_C, *(jnp.swapaxes(x[:, prompt:], 0, 1) for x in read))
    _, o_CBHD = lax.scan(step, cache, steps)
    return jnp.concatenate([o_BPHD, jnp.swapaxes(o_CBHD, 0, 1)], axis=1)


def _finish(
    config: ModelConfig, params: DecoderParams, o_BTHD: Array, reference: Reference, layer: Array, first: int
) -> Float[Array, "B T E"]:
    """The layer's rest and all layers above with full caches, for the tokens from `first` on."""
    residual_BTE = reference.residual_NBTE[layer][:, first:]
    rotation = tuple(x[:, first:] for x in _rotation(config, reference.token_BT, residual_BTE.dtype))
    residual_BTE, _ = apply_layer(
        config, lambda _: (o_BTHD, None), _layer(params.layers, layer), residual_BTE, rotation
    )

    def above(n, residual_BTE):
        def attend(inputs: LayerInputs):
            if first == 0:
                return _causal(inputs.q_BTHD, inputs.k_BTKD, inputs.v_BTKD), None
            k_BTKD = jnp.concatenate([reference.k_NBPKD[n], inputs.k_BTKD], axis=1)
            v_BTKD = jnp.concatenate([reference.v_NBPKD[n], inputs.v_BTKD], axis=1)
            return _last_queries(inputs.q_BTHD, k_BTKD, v_BTKD), None

        return apply_layer(config, attend, _layer(params.layers, n), residual_BTE, rotation)[0]

    # As many layers as there are above: the bound is traced, so one program serves every layer.
    return lax.fori_loop(layer + 1, config.num_layers, above, residual_BTE)


def _layer(layers: Any, index: Array) -> LayerParams:
    """One layer of stacked weights."""
    return jax.tree.map(lambda leaf_N: leaf_N[index], layers)


def _rotation(config: ModelConfig, token_BT: Array, dtype: jnp.dtype):
    return rope_rotation(config, jnp.broadcast_to(jnp.arange(token_BT.shape[1]), token_BT.shape), dtype)


def _causal(q_BTHD: Array, k_BTKD: Array, v_BTKD: Array) -> Array:
    return masked_attention(q_BTHD, k_BTKD, v_BTKD, None, None)[0]


def _last_queries(q_BCHD: Array, k_BTKD: Array, v_BTKD: Array) -> Array:
    """Causal attention of the last C of T positions."""
    C, T = q_BCHD.shape[1], k_BTKD.shape[1]
    visible_CT = jnp.arange(T) <= jnp.arange(T - C, T)[:, None]
    return jax.nn.dot_product_attention(q_BCHD, k_BTKD, v_BTKD, mask=visible_CT[None, None])


def _attended(q_BCHD: Array, k_BTKD: Array) -> Float[Array, "T"]:
    """Attention that each position receives from the last C, averaged over texts, heads and queries."""
    B, C, H, D = q_BCHD.shape
    T, K = k_BTKD.shape[1:3]
    q_BCKGD = q_BCHD.reshape(B, C, K, H // K, D)
    s_BKGCT = jnp.einsum("BCKGD,BTKD->BKGCT", q_BCKGD, k_BTKD, preferred_element_type=jnp.float32) * D**-0.5
    s_BKGCT = jnp.where(jnp.arange(T) <= jnp.arange(T - C, T)[:, None], s_BKGCT, -jnp.inf)
    return jnp.mean(jax.nn.softmax(s_BKGCT, axis=-1), axis=(0, 1, 2, 3))


def _projected(o_BTHD: Array, layer: LayerParams) -> Array:
    """What the attention block adds to the residual stream."""
    return o_BTHD.reshape(*o_BTHD.shape[:2], -1) @ layer.o_proj


def _cosine(x_BCE: Array, y_BCE: Array) -> Float[Array, "B C"]:
    x_BCE, y_BCE = (x.astype(jnp.float32) for x in (x_BCE, y_BCE))
    norms_BC = jnp.linalg.norm(x_BCE, axis=-1) * jnp.linalg.norm(y_BCE, axis=-1)
    return jnp.sum(x_BCE * y_BCE, axis=-1) / jnp.maximum(norms_BC, 1e-20)


def _nll(config: ModelConfig, params: DecoderParams, last_BCE: Array, token_BC: Array) -> Float[Array, "B C-1"]:
    """Negative log-likelihood of every token but the first, in nats, from what leaves the last layer."""
    hidden_BCE = rms_norm(last_BCE[:, :-1], params.final_norm_E, config.rms_norm_eps)
    log_prob_BCV = jax.nn.log_softmax(unembed(config, params, hidden_BCE).astype(jnp.float32))
    return -jnp.take_along_axis(log_prob_BCV, token_BC[:, 1:, None], axis=-1)[..., 0]
