"""The student: a model whose attention obeys an eviction policy, and the loss by which its scorer learns.

Per layer: priorities, expiry, masked attention; then, from the student's own queries, keys and normalisers and without
gradient to them, the future attention of every token, and the boundary loss against it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvpop_jax.config import LossConfig
from kvpop_jax.eviction import (
    TokenLayout,
    boundary_loss,
    expiry_from_priority,
    future_attention_target,
    kept_mass,
    target_recall,
    token_layout,
)
from kvpop_jax.models import DecoderParams, LayerInputs, ModelConfig
from kvpop_jax.models.rope import rope_frequencies
from kvpop_jax.policies import Prompt
from kvpop_jax.scorers import Scorer
from kvpop_jax.training.data import Batch
from kvpop_jax.training.scan import scan_layers
from pallas_kernels.masked_attention import masked_attention
from pallas_kernels.residuals import saved

_SAMPLED_QUERIES = 16
"""Queries per row that kept mass and recall are measured on."""


@dataclass(frozen=True)
class Student:
    """How a model is run under a policy.

    Attributes:
        priorities: of the policy: (parameters of the layer, prompt) -> static priorities.
        scorer: what the policy ranks by, if it is learned.
        sinks, window: protected tokens.
        pin_prompt: the prompt is protected too.
        losses: the target and the boundary loss.
        capacity: keys that a query sees at most, sinks + window + the largest pool; None where nobody has counted.
    """

    priorities: Callable[[Any, Prompt], Float[Array, "B K S"]]
    scorer: Scorer | None
    sinks: int
    window: int
    pin_prompt: bool
    losses: LossConfig
    capacity: int | None = None


LayerMetrics = dict[str, Float[Array, ""]]


def student_hidden(
    student: Student,
    config: ModelConfig,
    params: DecoderParams,
    scorer_params: Any,
    batch: Batch,
    pool_B: Int[Array, "B"],
    key: Array,
    *,
    remat: bool = False,
) -> tuple[Float[Array, "B S E"], dict[str, Float[Array, "N"]]]:
    """Final hidden states under the policy, and one value per layer of what each layer measures.

    Gradients of the hidden states reach `params` only: an expiry is a number without slope. Gradients of "boundary"
    reach `scorer_params` only.

    Args:
        student: policy and settings.
        config, params: the model, in the dtype it computes in; layers in a list or stacked.
        scorer_params: one tree per layer, None for a policy without a scorer.
        batch: packed rows.
        pool_B: pool size of each row.
        key: seeds what the policy draws and which queries the target samples.

    Returns:
        The hidden states; "kept_mass", and with a scorer also "boundary" (its loss), "comparisons" (what that is a mean
        over), "boundary_accuracy", "keep_rate", "recall" (of the target's pool) and "lambda".
    """
    prompt_BS = batch.prompt_BS if student.pin_prompt else None
    layout = token_layout(batch.segment_BS, sinks=student.sinks, pool=pool_B, prompt_BS=prompt_BS)
    frequency_D2 = jnp.asarray(rope_frequencies(config), jnp.float32)
    draw_key, query_key = jax.random.split(key)
    seed_B = jax.random.randint(draw_key, pool_B.shape, 0, 2**31 - 1)
    query_BS = _sample_queries(query_key, student.losses.target.query_share, batch.segment_BS)

    def attend(layer: Any, scorer_of_layer: Any, inputs: LayerInputs) -> tuple[Float[Array, "B S H D"], LayerMetrics]:
        q_BSHD, k_BSKD, v_BSKD = inputs.q_BTHD, inputs.k_BTKD, inputs.v_BTKD
        # Only the attention output carries gradient to the model.
        tensors = lax.stop_gradient((inputs.hidden_BTE, q_BSHD, k_BSKD, v_BSKD))
        view = Prompt(batch.token_BS, *tensors, layout, seed_B, layer, frequency_D2)
        scorer_alone = lax.stop_gradient(scorer_of_layer)
        priority_BKS, to_scorer = jax.vjp(lambda own: student.priorities(own, view), scorer_alone)
        expiry_BKS = saved(expiry_from_priority(priority_BKS, layout, student.window))
        o_BSHD, lse_BHS = masked_attention(
            q_BSHD, k_BSKD, v_BSKD, expiry_BKS, layout.segment_BS, capacity=student.capacity
        )
        seen = _Seen(*tensors[1:3], lax.stop_gradient(lse_BHS), layout, query_BS)
        metrics = {"kept_mass": _kept_mass(seen)}
        if student.scorer is None:
            return o_BSHD, metrics
        # The scorer's gradient is taken on the spot: for a backward pass the scorer would have to run again.
        taught = jax.value_and_grad(_boundary, argnums=(0, 1), has_aux=True)
        (loss, measured), (slope, to_priority_BKS) = taught(scorer_alone, priority_BKS, student, seen)
        slope = jax.tree.map(jnp.add, slope, *to_scorer(to_priority_BKS))
        loss = _with_slope(loss, jax.tree.map(saved, slope), scorer_of_layer)
        return o_BSHD, metrics | measured | {"boundary": loss}

    return scan_layers(config, params, batch.token_BS, batch.position_BS, attend, scorer_params, remat=remat)


class _Seen(NamedTuple):
    """What a layer's attention has seen, for measuring: nothing of it takes gradient."""

    q_BSHD: Float[Array, "B S H D"]
    k_BSKD: Float[Array, "B S K D"]
    lse_BHS: Float[Array, "B H S"]
    layout: TokenLayout
    query_BS: Bool[Array, "B S"] | None


def _stride(seen: _Seen) -> int:
    return max(1, seen.layout.segment_BS.shape[1] // _SAMPLED_QUERIES)


def _kept_mass(seen: _Seen) -> Float[Array, ""]:
    return kept_mass(seen.q_BSHD, seen.k_BSKD, seen.lse_BHS, seen.layout.segment_BS, stride=_stride(seen))


def _boundary(
    scorer_params: Any, priority_BKS: Float[Array, "B K S"], student: Student, seen: _Seen
) -> tuple[Float[Array, ""], LayerMetrics]:
    """The boundary loss of one layer, and what is logged with it."""
    assert student.scorer is not None
    layout, window, target_config = seen.layout, student.window, student.losses.target
    target_BKS = future_attention_target(
        seen.q_BSHD,
        seen.k_BSKD,
        _NORMALISERS[target_config.lse](seen),
        layout,
        window=window,
        group=target_config.group,
        power=target_config.power,
        query_BT=seen.query_BS,
        floor=target_config.floor,
    )
    decay_K = student.scorer.decay(scorer_params)
    age_BKS = decay_K[:, None] * layout.position_BS[:, None]
    # The policy's priority is score + lambda * position; the loss ages score and target itself.
    loss, boundary = boundary_loss(
        priority_BKS - age_BKS, decay_K, target_BKS, layout, window=window, settings=student.losses.boundary
    )
    recall = target_recall(priority_BKS, target_BKS + age_BKS, layout, window=window, stride=_stride(seen))
    return loss, {
        "comparisons": boundary.comparisons,
        "keep_rate": boundary.keep_rate,
        "boundary_accuracy": boundary.accuracy,
        "recall": recall,
        "lambda": decay_K.mean(),
    }


@jax.custom_jvp
def _with_slope(value: Float[Array, ""], slope: Any, at: Any) -> Float[Array, ""]:
    """`value`, a function of the tree `at` whose gradient there is known to be `slope`."""
    del slope, at
    return value


@_with_slope.defjvp
def _with_slope_jvp(primals, tangents):
    value, slope, _ = primals
    products = jax.tree.map(lambda slope, at_dot: jnp.sum(slope * at_dot), slope, tangents[2])
    return value, sum(jax.tree.leaves(products), jnp.zeros_like(value))


def _dense_lse(seen: _Seen) -> Float[Array, "B H S"]:
    return masked_attention(seen.q_BSHD, seen.k_BSKD, seen.k_BSKD, None, seen.layout.segment_BS)[1]


_NORMALISERS: dict[str, Callable[[_Seen], Array]] = {"sparse": lambda seen: seen.lse_BHS, "dense": _dense_lse}


def _sample_queries(key: Array, share: float, segment_BS: Int[Array, "B S"]) -> Bool[Array, "B S"] | None:
    return None if share == 1 else jax.random.bernoulli(key, share, segment_BS.shape)
