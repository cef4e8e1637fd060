"""Rotary position embedding, half-split as in Hugging Face checkpoints, with Llama 3.1's frequency scaling."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from numpy.typing import NDArray

from kvpop_jax.models.config import ModelConfig, RopeScaling
from pallas_kernels.rotary import Rotation


def rope_frequencies(config: ModelConfig) -> NDArray[np.float64]:
    """Angular frequency of each of the D/2 rotary pairs, in radians per position."""
    frequency = unscaled_frequencies(config.head_dim, config.rope_theta)
    return frequency if config.rope_scaling is None else rescale_frequencies(frequency, config.rope_scaling)


def unscaled_frequencies(head_dim: int, theta: float) -> NDArray[np.float64]:
    """theta ** (-2 i / D) for i < D/2. Source: Su et al., RoFormer, equation 15."""
    return theta ** -(np.arange(0, head_dim, 2) / head_dim)


def rescale_frequencies(frequency: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    """Llama 3.1: short wavelengths stay, long ones are stretched by the factor, those between are blended linearly."""
    turns = scaling.original_max_position * frequency / (2 * math.pi)  # full turns within the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return kept * frequency + (1 - kept) * frequency / scaling.factor


def rope_rotation(config: ModelConfig, position_BT: Int[Array, "B T"], dtype: jnp.dtype) -> Rotation:
    """Cosines and sines for `split_qkv`, computed once for all layers.

    In at least float32 whatever `dtype` is: bfloat16 cannot even count positions past 256.
    """
    angle_dtype = jnp.promote_types(dtype, jnp.float32)
    frequency_D2 = jnp.asarray(rope_frequencies(config), angle_dtype)
    angle_BTD2 = position_BT[..., None].astype(angle_dtype) * frequency_D2
    return jnp.cos(angle_BTD2), jnp.sin(angle_BTD2)
