"""What distillation minimises, depending on which weights it trains (KVpop section 1.6)."""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvpop_jax.models import DecoderParams, ModelConfig
from kvpop_jax.training import losses
from kvpop_jax.training.data import Batch
from kvpop_jax.training.objectives import cast, dense_hidden, whole_unembed
from kvpop_jax.training.step import Groups, Measure, Metrics, Objective
from kvpop_jax.training.student import Student, student_hidden


def distill(config: ModelConfig, student: Student, dtype: jnp.dtype, *, remat: bool) -> Objective:
    """KL to the dense model plus the boundary loss (KVpop section 1.6); trains "base", and "scorer" if there is one.

    The frozen weights are the dense model's, in `dtype`.
    """
    run = partial(student_hidden, student, config, remat=remat)

    def objective(
        weights: Groups, frozen: DecoderParams, batch: Batch, pool_B: Int[Array, "B"], key: Array
    ) -> tuple[Float[Array, ""], Metrics]:
        params = cast(weights["base"], dtype)
        hidden_BSE, layers = run(params, weights.get("scorer"), batch, pool_B, key)
        distance = _distance(config, student, params, hidden_BSE, frozen, batch)
        tokens = losses.terms(losses.predicts(batch.segment_BS, batch.loss_BS))
        if "scorer" not in weights:
            return distance["kl"], {**distance, **layers, "terms/base": tokens}
        boundary, metrics = _boundary(student, layers)
        return distance["kl"] + boundary, {**distance, **metrics, "terms/base": tokens}

    return objective


def train_scorer(config: ModelConfig, student: Student, *, remat: bool) -> Objective:
    """The boundary loss alone; trains "scorer" and leaves the model, the frozen weights, as it is."""
    run = partial(student_hidden, student, config, remat=remat)

    def objective(
        weights: Groups, frozen: DecoderParams, batch: Batch, pool_B: Int[Array, "B"], key: Array
    ) -> tuple[Float[Array, ""], Metrics]:
        _, layers = run(frozen, weights["scorer"], batch, pool_B, key)
        return _boundary(student, layers)

    return objective


def distance(config: ModelConfig, student: Student) -> Measure:
    """How far eviction takes a frozen model from itself: "kl" and "agreement", which `train_scorer` does not need."""

    def measure(weights: Groups, frozen: DecoderParams, batch: Batch, pool_B: Int[Array, "B"], key: Array) -> Metrics:
        hidden_BSE, _ = student_hidden(student, config, frozen, weights["scorer"], batch, pool_B, key)
        return _distance(config, student, frozen, hidden_BSE, frozen, batch)

    return measure


def _distance(config, student, params, hidden_BSE, teacher, batch):
    """KL to the dense model, and the share of tokens on which both agree."""
    kl, agreement = losses.kl_to_teacher(
        hidden_BSE,
        whole_unembed(config, params),
        dense_hidden(config, teacher, batch),
        whole_unembed(config, teacher),
        losses.predicts(batch.segment_BS, batch.loss_BS),
        config.vocab_size,
        top_k=student.losses.top_k_logits,
    )
    return {"kl": kl, "agreement": agreement}


def _boundary(student: Student, layers: Metrics) -> tuple[Float[Array, ""], Metrics]:
    """The scorer's loss, and the metrics with how many comparisons it is a mean over: as many in every layer."""
    comparisons_N = layers["comparisons"]
    metrics = {name: value for name, value in layers.items() if name != "comparisons"}
    return student.losses.score_weight * layers["boundary"].mean(), metrics | {"terms/scorer": comparisons_N[0]}
