"""KVpop's scorer: one mLSTM memory per KV head, read once per token, as the token leaves the window (section 1.7).

The memory absorbs every token as it arrives; the read for token t happens w tokens later, so its score knows w tokens
of the future. In the parallel form that is an ordinary causal mLSTM whose queries are shifted right by w.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kvpop_jax.scorers.base import (
    DecayMode,
    Scorer,
    ScorerDims,
    decay_terms,
    features,
    immediate,
    init_per_head,
    per_head,
    zero_unless_leaving,
)
from kvpop_jax.scorers.mlp import MLP, apply_mlp, init_mlp
from pallas_kernels.mlstm_chunkwise import mlstm_chunkwise, mlstm_initial_state
from pallas_kernels.scorer_step import ScorerWeights, age_decay, scorer_step, unit_rms


@dataclass(frozen=True)
class MLSTMSettings:
    """The recurrent scorer.

    Attributes:
        key_dim: Key size of the memory; null is half the model's head size. The float32 state is charged to the budget.
        value_dim: Value size of the memory; null is the model's head size.
        skip_width: Hidden units of an MLP on the token itself that is added to the score; 0 leaves it out.
        read: When a token is scored: "delayed" until it leaves the window, or "immediate" at arrival (an ablation).
        gate_soft_cap: The gates' inputs are bounded as cap * tanh(x / cap).
        forget_bias: First and last KV head's forget bias, linear between; 4 to 8 are half-lives of 38 to 2,000 tokens.
        decay: Age decay lambda: "learned", "frozen" at its start, or "zero".
        decay_init: Where lambda starts, in nats per token (1e-4 halves a token's mass in about 7,000 tokens).
        decay_max: Upper bound of lambda.
    """

    key_dim: int | None = None
    value_dim: int | None = None
    skip_width: int = 0
    read: Literal["delayed", "immediate"] = "delayed"
    gate_soft_cap: float = 15.0
    forget_bias: tuple[float, float] = (4.0, 8.0)
    decay: DecayMode = "learned"
    decay_init: float = 1e-4
    decay_max: float = 1e-3


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["q_KIX", "k_KIX", "v_KIY", "gates_E2K", "gate_bias_2K", "out_KY", "out_bias_K", "log_decay_K", "skip"],
    meta_fields=[],
)
@dataclass(frozen=True)
class MLSTMParams:
    """Maps from features x = [k; v] to the memory's query, key and value; gates from the layer's input; the score head.

    `gates_E2K` and `gate_bias_2K` hold the input gates of all KV heads, then the forget gates. `out_KY` starts at zero.
    """

    q_KIX: Float[Array, "K I X"]
    k_KIX: Float[Array, "K I X"]
    v_KIY: Float[Array, "K I Y"]
    gates_E2K: Float[Array, "E 2K"]
    gate_bias_2K: Float[Array, "2K"]
    out_KY: Float[Array, "K Y"]
    out_bias_K: Float[Array, "K"]
    log_decay_K: Float[Array, "K"]
    skip: MLP | None


def mlstm_scorer(settings: MLSTMSettings, dims: ScorerDims) -> Scorer:
    """The scorer of those settings for a model of those sizes."""
    K = dims.num_kv_heads
    X, Y = settings.key_dim or dims.head_dim // 2, settings.value_dim or dims.head_dim

    def decay_terms_of(params):
        return decay_terms(params.log_decay_K, settings.decay, settings.decay_max)

    def add_skip(params, score, x):
        return score if params.skip is None else score + apply_mlp(params.skip, x)

    def gates(params, hidden):
        wide = lax.stop_gradient(hidden).astype(params.gates_E2K.dtype)
        raw = jnp.matmul(wide, params.gates_E2K, precision=lax.Precision.HIGHEST) + params.gate_bias_2K
        capped = settings.gate_soft_cap * jnp.tanh(raw / settings.gate_soft_cap)
        return jnp.split(capped, 2, axis=-1)

    def parallel(params, state, hidden_BSE, k_BSKD, v_BSKD, segment_BS, *, delay):
        x_BSKI = features(k_BSKD, v_BSKD)
        i_BSK, f_BSK = gates(params, hidden_BSE)
        # One product, and what is shifted is the queries: the features are four times as wide.
        weight_KIO = jnp.concatenate([params.q_KIX, params.k_KIX, params.v_KIY], axis=-1)
        q_BSKX, write_BSKX, value_BSKY = jnp.split(per_head(x_BSKI, weight_KIO), (X, 2 * X), axis=-1)
        late_BSKX = jnp.pad(q_BSKX, ((0, 0), (delay, 0), (0, 0), (0, 0)))[:, : q_BSKX.shape[1]]
        h_BSKY, state = mlstm_chunkwise(
            late_BSKX * X**-0.5,
            write_BSKX,
            value_BSKY,
            i_BSK,
            f_BSK,
            state,
            segment_BS,
        )
        # Row t + delay is the read-out of token t; back to where it belongs.
        back_BSKY = jnp.pad(h_BSKY, ((0, 0), (0, delay), (0, 0), (0, 0)))[:, delay:]
        score_BSK = jnp.sum(unit_rms(back_BSKY) * params.out_KY, axis=-1) + params.out_bias_K
        return zero_unless_leaving(add_skip(params, score_BSK, x_BSKI), segment_BS, delay), state

    def step(params, state, hidden_BE, k_BKD, v_BKD, leaving):
        log_decay_K, decay_max = decay_terms_of(params)
        *new, leaving = lax.stop_gradient((hidden_BE, k_BKD, v_BKD, leaving))
        weights = ScorerWeights(
            q_KIX=params.q_KIX,
            k_KIX=params.k_KIX,
            v_KIY=params.v_KIY,
            gates_E2K=params.gates_E2K.reshape(-1, 2, K),
            gate_bias_2K=params.gate_bias_2K.reshape(2, K),
            out_KY=params.out_KY,
            out_bias_K=params.out_bias_K,
            log_decay_K=log_decay_K,
        )
        state, priority_BK = scorer_step(
            weights, state, *new, leaving, soft_cap=settings.gate_soft_cap, decay_max=decay_max
        )
        return state, add_skip(params, priority_BK, features(leaving.k_BKD, leaving.v_BKD))

    scorer = Scorer(
        kind="mlstm",
        init=lambda key: _init(key, settings, dims, X, Y),
        init_state=lambda batch, window: mlstm_initial_state(batch, K, X, Y),
        parallel=parallel,
        step=step,
        decay=lambda params: age_decay(*decay_terms_of(params)),
        state_bytes_per_head=lambda window: 4 * (X * Y + X + 1),
    )
    return scorer if settings.read == "delayed" else immediate(scorer)


def _init(key, settings, dims, X, Y):
    K, I = dims.num_kv_heads, 2 * dims.head_dim
    q_key, k_key, v_key, skip_key = jax.random.split(key, 4)
    skip = init_mlp(skip_key, dims, settings.skip_width) if settings.skip_width else None
    return MLSTMParams(
        q_KIX=init_per_head(q_key, K, I, X),
        k_KIX=init_per_head(k_key, K, I, X),
        v_KIY=init_per_head(v_key, K, I, Y),
        gates_E2K=jnp.zeros((dims.hidden_size, 2 * K)),
        gate_bias_2K=jnp.concatenate([jnp.zeros(K), jnp.linspace(*settings.forget_bias, K)]),
        out_KY=jnp.zeros((K, Y)),
        out_bias_K=jnp.zeros(K),
        log_decay_K=jnp.full(K, math.log(settings.decay_init), jnp.float32),
        skip=skip,
    )
