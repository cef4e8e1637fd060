"""What a scorer is: pure functions of one layer's parameters, in a parallel and a recurrent form."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvpop_jax.models import ModelConfig
from pallas_kernels.leaving import Leaving, leaving_at_once
from pallas_kernels.scorer_step import unit_rms

DecayMode = Literal["learned", "frozen", "zero"]
"""Whether lambda, the age decay, is trained, kept at its start, or absent."""


@dataclass(frozen=True)
class ScorerDims:
    """What a scorer must know of its model."""

    hidden_size: int
    num_kv_heads: int
    head_dim: int


def dims_of(config: ModelConfig) -> ScorerDims:
    """The sizes of a model."""
    return ScorerDims(config.hidden_size, config.num_kv_heads, config.head_dim)


@dataclass(frozen=True)
class Scorer:
    """A scorer of one layer. Its inputs are detached: nothing it learns reaches the model.

    Attributes:
        kind: "mlstm" or "mlp".
        init: key -> parameters, a registered dataclass.
        init_state: (batch, window) -> the state before the first token.
        parallel: (parameters, state, hidden_BSE, k_BSKD, v_BSKD, segment_BS, *, delay) -> (score_BKS, state). The score
            of token t is the one that the recurrent form ranks it by when it leaves a window of `delay` tokens; 0 where
            the document ends before that.
        step: (parameters, state, hidden_BE, k_BKD, v_BKD, leaving) -> (state, priority_BK). Absorbs the new token, then
            ranks the one that leaves the window, a `Leaving`: its score + lambda * its position.
        decay: parameters -> lambda per KV head, in nats per token.
        state_bytes_per_head: window -> bytes of state per KV head, which the budget is charged for.
    """

    kind: str
    init: Callable[[Array], Any]
    init_state: Callable[[int, int], Any]
    parallel: Callable[..., tuple[Float[Array, "B K S"], Any]]
    step: Callable[
        [Any, Any, Float[Array, "B E"], Float[Array, "B K D"], Float[Array, "B K D"], Leaving],
        tuple[Any, Float[Array, "B K"]],
    ]
    decay: Callable[[Any], Float[Array, "K"]]
    state_bytes_per_head: Callable[[int], int]


def features(k: Float[Array, "... D"], v: Float[Array, "... D"]) -> Float[Array, "... 2D"]:
    """x = [k; v], detached, each half at unit root mean square, in at least float32 (KVpop section 4, row 11)."""
    return jnp.concatenate([unit_rms(x) for x in lax.stop_gradient((k, v))], axis=-1)


def zero_unless_leaving(
    score_BSK: Float[Array, "B S K"], segment_BS: Int[Array, "B S"], delay: int
) -> Float[Array, "B K S"]:
    """Scores by head, 0 for tokens whose document ends before they leave a window of `delay`."""
    later_BS = jnp.pad(segment_BS, ((0, 0), (0, delay)))[:, delay:]
    leaves_BS = (later_BS == segment_BS) & (segment_BS > 0)
    return jnp.where(leaves_BS[:, None], jnp.swapaxes(score_BSK, 1, 2), 0)


def decay_terms(log_decay_K: Float[Array, "K"], mode: DecayMode, limit: float) -> tuple[Float[Array, "K"], float]:
    """What `age_decay` is to be given in that mode: log lambda, detached unless it is learned, and lambda's bound.

    The limit guards against the one degenerate solution: a lambda so large that every newcomer outranks the incumbent.
    """
    log_decay_K = log_decay_K if mode == "learned" else lax.stop_gradient(log_decay_K)
    return log_decay_K, 0.0 if mode == "zero" else limit


def per_head(x: Float[Array, "... K I"], weight_KIO: Float[Array, "K I O"]) -> Float[Array, "... K O"]:
    """A linear map of each KV head's own, in full precision: accelerators would round the factors, and scores rank."""
    return jnp.einsum("...KI,KIO->...KO", x, weight_KIO, precision=lax.Precision.HIGHEST)


def init_per_head(key: Array, heads: int, inputs: int, outputs: int) -> Float[Array, "K I O"]:
    """Normal with variance 1 / inputs."""
    return jax.random.normal(key, (heads, inputs, outputs)) * inputs**-0.5


@partial(jax.tree_util.register_dataclass, data_fields=["inner", "score_BKW"], meta_fields=[])
@dataclass(frozen=True)
class WaitingScores:
    """A scorer's state, and the scores of the tokens in the window, oldest first."""

    inner: Any
    score_BKW: Float[Array, "B K W"]


def immediate(scorer: Scorer) -> Scorer:
    """The ablation of KVpop's delayed read: every token is scored as it arrives, and its score waits in the window."""

    def init_state(batch: int, window: int) -> WaitingScores:
        inner = scorer.init_state(batch, window)
        heads = jax.tree.leaves(inner)[0].shape[1]
        return WaitingScores(inner, jnp.zeros((batch, heads, window)))

    def parallel(params, state, hidden_BSE, k_BSKD, v_BSKD, segment_BS, *, delay):
        score_BKS, inner = scorer.parallel(params, state.inner, hidden_BSE, k_BSKD, v_BSKD, segment_BS, delay=0)
        waited_BKS = jnp.concatenate([state.score_BKW, score_BKS], axis=-1)
        # Window and padded row are one sequence now: its last `delay` scores before the padding wait.
        length_B = jnp.sum(segment_BS > 0, axis=1)
        last_BW = length_B[:, None] + jnp.arange(delay)
        waiting_BKW = jnp.take_along_axis(waited_BKS, last_BW[:, None], axis=-1)
        return score_BKS, WaitingScores(inner, waiting_BKW)

    def step(params, state, hidden_BE, k_BKD, v_BKD, leaving):
        # What waits is the score: at position 0 lambda adds nothing to it.
        itself = leaving_at_once(jnp.zeros_like(leaving.position_B), k_BKD, v_BKD)
        inner, score_BK = scorer.step(params, state.inner, hidden_BE, k_BKD, v_BKD, itself)
        waiting_BKW = jnp.concatenate([state.score_BKW[..., 1:], score_BK[..., None]], axis=-1)
        priority_BK = state.score_BKW[..., 0] + scorer.decay(params) * leaving.position_B[:, None]
        return WaitingScores(inner, waiting_BKW), priority_BK

    return replace(
        scorer,
        init_state=init_state,
        parallel=parallel,
        step=step,
        state_bytes_per_head=lambda window: scorer.state_bytes_per_head(window) + 4 * window,
    )
