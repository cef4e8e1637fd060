"""What a scorer's step reads, shared by the contract and every back end."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

ROOT_EPSILON = 1e-6
"""Added to a mean square before its root is divided by."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["q_KIX", "k_KIX", "v_KIY", "gates_E2K", "gate_bias_2K", "out_KY", "out_bias_K", "log_decay_K"],
    meta_fields=[],
)
@dataclass(frozen=True)
class ScorerWeights:
    """Maps from features [k; v] (I = 2 D) to the memory's query, key and value; gates from a layer's input; the head.

    Gates are the input gates of all KV heads, then the forget gates, here on axes of their own.
    """

    q_KIX: Float[Array, "K I X"]
    k_KIX: Float[Array, "K I X"]
    v_KIY: Float[Array, "K I Y"]
    gates_E2K: Float[Array, "E 2 K"]
    gate_bias_2K: Float[Array, "2 K"]
    out_KY: Float[Array, "K Y"]
    out_bias_K: Float[Array, "K"]
    log_decay_K: Float[Array, "K"]


def unit_rms(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """x / sqrt(mean(x^2) + 1e-6) over the last axis, in at least float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + ROOT_EPSILON)


def age_decay(log_decay_K: Float[Array, "K"], limit: float) -> Float[Array, "K"]:
    """lambda = exp(log_decay), at most `limit`: what a priority gains with each position."""
    return jnp.minimum(jnp.exp(log_decay_K), limit)
