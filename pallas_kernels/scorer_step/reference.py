"""Plain JAX `scorer_step`."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.mlstm_chunkwise import mlstm_step
from pallas_kernels.scorer_step.weights import age_decay, unit_rms


def scorer_step(weights, state, hidden_BE, k_BKD, v_BKD, leaving, soft_cap, decay_max):
    """See `api.scorer_step`."""
    x_BKI, leaving_BKI = _features(k_BKD, v_BKD), _features(leaving.k_BKD, leaving.v_BKD)
    wide_BE = hidden_BE.astype(weights.gates_E2K.dtype)
    raw_B2K = jnp.einsum("BE,EGK->BGK", wide_BE, weights.gates_E2K, precision=lax.Precision.HIGHEST)
    gate_B2K = soft_cap * jnp.tanh((raw_B2K + weights.gate_bias_2K) / soft_cap)
    q_BKX = _per_head(leaving_BKI, weights.q_KIX) * weights.q_KIX.shape[2] ** -0.5
    k_BKX, v_BKY = _per_head(x_BKI, weights.k_KIX), _per_head(x_BKI, weights.v_KIY)
    state, h_BKY = mlstm_step(state, q_BKX, k_BKX, v_BKY, gate_B2K[:, 0], gate_B2K[:, 1])
    score_BK = jnp.sum(unit_rms(h_BKY) * weights.out_KY, axis=-1) + weights.out_bias_K
    return state, score_BK + age_decay(weights.log_decay_K, decay_max) * leaving.position_B[:, None]


def _features(k_BKD, v_BKD):
    return jnp.concatenate([unit_rms(k_BKD), unit_rms(v_BKD)], axis=-1)


def _per_head(x_BKI, weight_KIO):
    # Accelerators would round the factors; scores are ranked.
    return jnp.einsum("BKI,KIO->BKO", x_BKI, weight_KIO, precision=lax.Precision.HIGHEST)
