"""KVpop_mlp: a two-layer MLP per KV head on a token's own key and value (arXiv 2607.05061)."""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvpop_jax.scorers.base import (
    DecayMode,
    Scorer,
    ScorerDims,
    decay_terms,
    features,
    init_per_head,
    per_head,
    zero_unless_leaving,
)
from pallas_kernels.scorer_step import age_decay


@dataclass(frozen=True)
class MLPSettings:
    """The stateless scorer.

    Attributes:
        width: Hidden units per KV head.
        decay: Age decay lambda: "learned", "frozen" at its start, or "zero".
        decay_init: Where lambda starts, in nats per token (1e-4 halves a token's mass in about 7,000 tokens).
        decay_max: Upper bound of lambda.
    """

    width: int = 256
    decay: DecayMode = "learned"
    decay_init: float = 1e-4
    decay_max: float = 1e-3


@partial(jax.tree_util.register_dataclass, data_fields=["in_KIF", "in_bias_KF", "out_KF", "out_bias_K"], meta_fields=[])
@dataclass(frozen=True)
class MLP:
    """out . SiLU(in x + in_bias) + out_bias, for each KV head; `out` starts at zero."""

    in_KIF: Float[Array, "K I F"]
    in_bias_KF: Float[Array, "K F"]
    out_KF: Float[Array, "K F"]
    out_bias_K: Float[Array, "K"]


@partial(jax.tree_util.register_dataclass, data_fields=["mlp", "log_decay_K"], meta_fields=[])
@dataclass(frozen=True)
class MLPParams:
    """The network that scores, and log lambda."""

    mlp: MLP
    log_decay_K: Float[Array, "K"]


def mlp_scorer(settings: MLPSettings, dims: ScorerDims) -> Scorer:
    """Scores a token from its cached key and value; it has no state, so when it scores makes no difference."""

    def init(key: Array) -> MLPParams:
        log_decay_K = jnp.full(dims.num_kv_heads, math.log(settings.decay_init), jnp.float32)
        return MLPParams(init_mlp(key, dims, settings.width), log_decay_K)

    def parallel(params, state, hidden_BSE, k_BSKD, v_BSKD, segment_BS, *, delay):
        score_BSK = apply_mlp(params.mlp, features(k_BSKD, v_BSKD))
        return zero_unless_leaving(score_BSK, segment_BS, delay), state

    def decay(params):
        return age_decay(*decay_terms(params.log_decay_K, settings.decay, settings.decay_max))

    def step(params, state, hidden_BE, k_BKD, v_BKD, leaving):
        score_BK = apply_mlp(params.mlp, features(leaving.k_BKD, leaving.v_BKD))
        return state, score_BK + decay(params) * leaving.position_B[:, None]

    return Scorer(
        kind="mlp",
        init=init,
        init_state=lambda batch, window: (),
        parallel=parallel,
        step=step,
        decay=decay,
        state_bytes_per_head=lambda window: 0,
    )


def init_mlp(key: Array, dims: ScorerDims, width: int) -> MLP:
    """Weights of one layer's network; its output is 0 at the start."""
    K = dims.num_kv_heads
    return MLP(
        in_KIF=init_per_head(key, K, 2 * dims.head_dim, width),
        in_bias_KF=jnp.zeros((K, width)),
        out_KF=jnp.zeros((K, width)),
        out_bias_K=jnp.zeros(K),
    )


def apply_mlp(mlp: MLP, x: Float[Array, "... K I"]) -> Float[Array, "... K"]:
    """The network on features."""
    unit = jax.nn.silu(per_head(x, mlp.in_KIF) + mlp.in_bias_KF)
    return jnp.sum(unit * mlp.out_KF, axis=-1) + mlp.out_bias_K
