"""One decoder for Qwen3 and Llama: parameters as plain data, the forward pass as functions, attention as a hook.

Whoever calls `apply_layers` supplies the attention: dense over the whole sequence (`forward` here), under an eviction
rule with its losses (training), or against a bounded cache (generation). Everything else happens once, here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvpop_jax.models.config import ModelConfig
from kvpop_jax.models.rope import rope_rotation
from pallas_kernels.masked_attention import masked_attention
from pallas_kernels.norms import rms_norm
from pallas_kernels.rotary import Rotation
from pallas_kernels.scans import running_max
from pallas_kernels.split_qkv import split_qkv
from pallas_kernels.thin_matmul import matmul_add, norm_matmul, norm_swiglu


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerParams:
    """Weights of one layer; matrices are (in, out), so that a projection is `x @ w`.

    What reads the same input is one matrix: a decode step is bound by memory, and small matrices do not reach its
    speed. `qkv_proj` holds for each KV head its G query heads, then its key, then its value, so that heads can be
    sharded without parting a group; `gate_up_proj` the gates, then what they gate.
    """

    attention_norm_E: Float[Array, "E"]
    qkv_proj: Float[Array, "E K G+2 D"]
    o_proj: Float[Array, "HD E"]
    q_norm_D: Float[Array, "D"] | None
    k_norm_D: Float[Array, "D"] | None
    mlp_norm_E: Float[Array, "E"]
    gate_up_proj: Float[Array, "E 2 F"]
    down_proj: Float[Array, "F E"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecoderParams:
    """Weights of a model; `head_EV` is None where the embedding doubles as the unembedding."""

    embedding_VE: Float[Array, "V E"]
    layers: list[LayerParams]
    final_norm_E: Float[Array, "E"]
    head_EV: Float[Array, "E V"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerInputs:
    """What the attention of one layer may look at; q and k after QK-norm and rotary embedding."""

    hidden_BTE: Float[Array, "B T E"]
    """The layer's input after the attention norm, the same that the projections read."""
    q_BTHD: Float[Array, "B T H D"]
    k_BTKD: Float[Array, "B T K D"]
    v_BTKD: Float[Array, "B T K D"]


Attend = Callable[[int, LayerInputs], tuple[Float[Array, "B T H D"], Any]]
"""(layer index, inputs) -> attention output and a pytree of arrays that `apply_layers` hands back."""


def forward(
    config: ModelConfig,
    params: DecoderParams,
    token_BT: Int[Array, "B T"],
    segment_BT: Int[Array, "B T"] | None = None,
    position_BT: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T V"]:
    """Logits of the dense model.

    Args:
        segment_BT: the document of each token in a packed row, 0 for padding; None: every row is one document.
        position_BT: rotary positions; None: counted from the start of each document.

    Returns:
        Logits in float32. At padding they are finite and mean nothing.
    """
    if position_BT is None:
        position_BT = segment_positions(jnp.ones_like(token_BT) if segment_BT is None else segment_BT)

    def dense(_: int, inputs: LayerInputs) -> tuple[Float[Array, "B T H D"], None]:
        o_BTHD, _lse = masked_attention(inputs.q_BTHD, inputs.k_BTKD, inputs.v_BTKD, None, segment_BT)
        return o_BTHD, None

    hidden_BTE, _ = apply_layers(config, params, token_BT, position_BT, dense)
    return unembed(config, params, hidden_BTE)


def apply_layers(
    config: ModelConfig,
    params: DecoderParams,
    token_BT: Int[Array, "B T"],
    position_BT: Int[Array, "B T"],
    attend: Attend,
) -> tuple[Float[Array, "B T E"], list[Any]]:
    """Embed the tokens and run every layer, with `attend` as the attention.

    Args:
        position_BT: rotary positions.
        attend: called once per layer, in order. It may close over arrays; gradients reach them.

    Returns:
        The hidden states after the final norm, in the dtype of the weights, and what `attend` returned beside its
        output, one entry per layer.
    """
    residual_BTE = params.embedding_VE[token_BT]
    rotation = rope_rotation(config, position_BT, residual_BTE.dtype)
    extras = []
    for index, layer in enumerate(params.layers):
        residual_BTE, extra = apply_layer(config, partial(attend, index), layer, residual_BTE, rotation)
        extras.append(extra)
    return rms_norm(residual_BTE, params.final_norm_E, config.rms_norm_eps), extras


def apply_layer(
    config: ModelConfig,
    attend: Callable[[LayerInputs], tuple[Float[Array, "B T H D"], Any]],
    layer: LayerParams,
    residual_BTE: Float[Array, "B T E"],
    rotation: Rotation,
    *,
    tokens_at_once: int | None = None,
) -> tuple[Float[Array, "B T E"], Any]:
    """One layer: attention and feed-forward on the residual stream, and what `attend` returned beside its output.

    Args:
        tokens_at_once: more tokens than this, of all rows together, take turns in all but the attention. A long prompt
            then needs little more than its residual stream, q, k and v; the feed-forward's hidden layer alone would be
            twice as large. None for all at once. The result is the same.
    """
    inputs = _in_turns(partial(layer_inputs, config, layer), tokens_at_once, residual_BTE, rotation)
    o_BTHD, extra = attend(inputs)
    return _in_turns(partial(after_attention, config, layer), tokens_at_once, residual_BTE, o_BTHD), extra


def layer_inputs(
    config: ModelConfig, layer: LayerParams, residual: Float[Array, "*T E"], rotation: Rotation
) -> LayerInputs:
    """What a layer's attention reads, from the residual stream that enters the layer; of any tokens, [*T, ...]."""
    tokens = residual.shape[:-1]
    E, K, J, D = layer.qkv_proj.shape
    x, qkv = norm_matmul(residual, layer.attention_norm_E, layer.qkv_proj.reshape(E, -1), eps=config.rms_norm_eps)
    q, k, v = split_qkv(
        qkv.reshape(*tokens, K, J, D), rotation, layer.q_norm_D, layer.k_norm_D, eps=config.rms_norm_eps
    )
    return LayerInputs(x, q, k, v)


def after_attention(
    config: ModelConfig, layer: LayerParams, residual: Float[Array, "*T E"], o: Float[Array, "*T H D"]
) -> Float[Array, "*T E"]:
    """The residual stream that leaves a layer: attention's output and the feed-forward (SwiGLU) on it."""
    residual = matmul_add(o.reshape(*residual.shape[:-1], -1), layer.o_proj, residual)
    hidden = norm_swiglu(residual, layer.mlp_norm_E, layer.gate_up_proj, eps=config.rms_norm_eps)
    return matmul_add(hidden, layer.down_proj, residual)


def _in_turns(f: Callable[..., Any], most: int | None, *of_tokens: Any) -> Any:
    """What `f` makes of arrays [B, T, ...], `most` tokens at a time; it must treat every token alike."""
    batch, length = jax.tree.leaves(of_tokens)[0].shape[:2]
    if most is None or batch * length <= most:
        return f(*of_tokens)
    flat = jax.tree.map(lambda x: x.reshape(batch * length, *x.shape[2:]), of_tokens)
    # Turns of many tokens: a map over single ones would look like decode steps to whatever picks kernels.
    whole = batch * length // most * most
    turns = jax.tree.map(lambda x: x[:whole].reshape(-1, most, *x.shape[1:]), flat)
    made = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), jax.lax.map(lambda turn: f(*turn), turns))
    if whole < batch * length:
        rest = f(*jax.tree.map(lambda x: x[whole:], flat))
        made = jax.tree.map(lambda *parts: jnp.concatenate(parts), made, rest)
    return jax.tree.map(lambda x: x.reshape(batch, length, *x.shape[1:]), made)


def unembed(config: ModelConfig, params: DecoderParams, hidden: Float[Array, "... E"]) -> Float[Array, "... V"]:
    """Logits of final hidden states, accumulated and returned in float32 (float64 for float64 weights).

    Their gradient is rounded to the dtype of the hidden states before it is multiplied, also with float32 sums.
    """
    head_EV = params.embedding_VE.T if config.tie_embeddings else params.head_EV
    assert head_EV is not None, "an untied model has a head"
    return _logits(hidden, head_EV)


@jax.custom_vjp
def _logits(hidden: Float[Array, "... E"], head_EV: Float[Array, "E V"]) -> Float[Array, "... V"]:
    return jnp.matmul(hidden, head_EV, preferred_element_type=jnp.promote_types(hidden.dtype, jnp.float32))


def _logits_forward(hidden, head_EV):
    return _logits(hidden, head_EV), (hidden, head_EV)


def _logits_backward(factors, cotangent):
    # Rounded to the dtype of the product's factors, as every other product's cotangent is: a float32 one would widen
    # the whole head, and multiply at half the speed of a matrix unit, or less.
    product, transpose = jax.vjp(jnp.matmul, *factors)
    return transpose(cotangent.astype(product.dtype))


_logits.defvjp(_logits_forward, _logits_backward)


def segment_positions(segment_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Positions counted from 0 at each change of the segment id along a row, int32."""
    index_T = jnp.arange(segment_BT.shape[1], dtype=jnp.int32)
    starts_BT = jnp.diff(segment_BT, axis=1, prepend=segment_BT[:, :1]) != 0
    return index_T - running_max(jnp.where(starts_BT, index_T, 0))


def init_params(config: ModelConfig, key: Array, dtype: jnp.dtype) -> DecoderParams:
    """Random weights: normal with deviation 0.02, the two projections that write to the residual stream scaled by
    1 / sqrt(2 N) so that its variance does not grow with depth (GPT-2); norms are 1.

    Compiled for one layer and called for each: an outer `jit` would compile all of them, minutes on a GPU.

    Args:
        key: a JAX random key; each layer's weights depend on the key and the layer's index only.
    """
    embedding_key, head_key, layers_key = jax.random.split(key, 3)
    layers = [_init_layer(config, jax.random.fold_in(layers_key, n), dtype) for n in range(config.num_layers)]
    embedding_VE = _normal(embedding_key, (config.vocab_size, config.hidden_size), 0.02, dtype)
    final_norm_E = jnp.ones(config.hidden_size, dtype)
    if config.tie_embeddings:
        return DecoderParams(embedding_VE, layers, final_norm_E, None)
    head_EV = _normal(head_key, (config.hidden_size, config.vocab_size), 0.02, dtype)
    return DecoderParams(embedding_VE, layers, final_norm_E, head_EV)


@partial(jax.jit, static_argnums=(0, 2))
def _init_layer(config: ModelConfig, key: Array, dtype: jnp.dtype) -> LayerParams:
    E, F = config.hidden_size, config.intermediate_size
    K, D = config.num_kv_heads, config.head_dim
    HD, KD = config.num_heads * D, K * D
    residual = 0.02 / (2 * config.num_layers) ** 0.5
    keys = jax.random.split(key, 7)
    q_EKGD, k_EK1D, v_EK1D = (
        _normal(keys[n], (E, size), 0.02, dtype).reshape(E, K, -1, D) for n, size in enumerate((HD, KD, KD))
    )
    return LayerParams(
        attention_norm_E=jnp.ones(E, dtype),
        qkv_proj=jnp.concatenate([q_EKGD, k_EK1D, v_EK1D], axis=2),
        o_proj=_normal(keys[3], (HD, E), residual, dtype),
        q_norm_D=jnp.ones(config.head_dim, dtype) if config.qk_norm else None,
        k_norm_D=jnp.ones(config.head_dim, dtype) if config.qk_norm else None,
        mlp_norm_E=jnp.ones(E, dtype),
        gate_up_proj=jnp.stack([_normal(keys[n], (E, F), 0.02, dtype) for n in (4, 5)], axis=1),
        down_proj=_normal(keys[6], (F, E), residual, dtype),
    )


@partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: Array, shape: tuple[int, int], deviation: float, dtype: jnp.dtype) -> Float[Array, "..."]:
    return (deviation * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
