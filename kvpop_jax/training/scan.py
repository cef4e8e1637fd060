"""The decoder's layers as one loop, so that a step compiles in the time of one layer and not of thirty-six.

The sorts, loops and kernels of the student take seconds per layer to compile. Models and exports are lists over layers;
a run stacks its weights once, trained and frozen ones, at its start.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvpop_jax.models import DecoderParams, LayerInputs, ModelConfig, apply_layer, rope_rotation
from kvpop_jax.sharding import constrain, gathered
from kvpop_jax.training.stacked import stack
from pallas_kernels.norms import rms_norm
from pallas_kernels.residuals import SAVE_RESIDUALS

ScannedAttend = Callable[[Int[Array, ""], Any, LayerInputs], tuple[Float[Array, "B T H D"], Any]]
"""(layer index, what belongs to the layer, inputs) -> attention output and a pytree of arrays."""


def stack_layers(params: DecoderParams) -> DecoderParams:
    """The same weights with all layers in one tree, each leaf with the layer as its first axis."""
    return replace(params, layers=stack(params.layers))


def scan_layers(
    config: ModelConfig,
    params: DecoderParams,
    token_BT: Int[Array, "B T"],
    position_BT: Int[Array, "B T"],
    attend: ScannedAttend,
    of_layers: Any = None,
    *,
    remat: bool = False,
) -> tuple[Float[Array, "B T E"], Any]:
    """`models.apply_layers` as a loop.

    Args:
        params: with its layers in a list, or stacked.
        position_BT: rotary positions.
        attend: the attention; it may close over arrays, and gradients reach them.
        of_layers: whatever else each layer has of its own: a list over layers, or stacked; None for nothing.
        remat: keep only each layer's input and `pallas_kernels.residuals` for the backward pass, and compute the rest
            again: neither attention nor what eviction decided is, nor a scorer run twice.

    Returns:
        Hidden states after the final norm, and what `attend` returned beside its output, stacked over layers.
    """
    residual_BTE = constrain(gathered(params.embedding_VE)[token_BT], "BTE")
    rotation = rope_rotation(config, position_BT, residual_BTE.dtype)

    def body(residual_BTE, layer):
        index, weights, own = layer
        residual_BTE, extra = apply_layer(config, partial(attend, index, own), weights, residual_BTE, rotation)
        return constrain(residual_BTE, "BTE"), extra

    layers = jnp.arange(config.num_layers), stack(params.layers), stack(of_layers)
    residual_BTE, extras = lax.scan(
        jax.checkpoint(body, policy=SAVE_RESIDUALS) if remat else body, residual_BTE, layers
    )
    return rms_norm(residual_BTE, params.final_norm_E, config.rms_norm_eps), extras
