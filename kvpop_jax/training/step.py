"""One optimizer step: gradients of an objective, a clipped update per group of weights, and what is worth logging.

Weights come in named groups ("base", "scorer"); a group that is frozen is simply not there. Whatever else an eviction
method trains is one more group, or part of one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from kvpop_jax.sharding import constrain, constrain_weights
from kvpop_jax.training.data import Batch
from kvpop_jax.training.stacked import Stacked, stack_lists

Groups = dict[str, Any]
"""Weights by group; each a pytree with float32 leaves. Layers are a list, or `Stacked` where a step changes them."""

Metrics = dict[str, Array]
"""Named values of a step, scalars or one value per layer."""

Objective = Callable[[Groups, Any, Batch, Int[Array, "B"], Array], tuple[Float[Array, ""], Metrics]]
"""(trained weights, frozen weights, batch, pool of each row, random key) -> loss and metrics.

What trains a group is a mean, and the metric `terms/GROUP` says over how many terms: tokens, or comparisons.
"""

Measure = Callable[[Groups, Any, Batch, Int[Array, "B"], Array], Metrics]
"""The same without a loss: what is only looked at."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes; `optimizer` has the groups of `weights`."""

    step: Int[Array, ""]
    weights: Groups
    optimizer: dict[str, optax.OptState]


@dataclass(frozen=True)
class GroupOptimizer:
    """How one group is updated, and at which learning rate (for the log)."""

    update: optax.GradientTransformation
    rate: optax.Schedule


def init_state(weights: Groups, optimizers: Mapping[str, GroupOptimizer]) -> TrainState:
    """The state before the first step, with lists over layers stacked."""
    weights = stack_lists(weights)
    optimizer = {group: optimizers[group].update.init(tree) for group, tree in weights.items()}
    return TrainState(jnp.zeros((), jnp.int32), weights, optimizer)


def make_step(
    objective: Objective,
    optimizers: Mapping[str, GroupOptimizer],
    *,
    pools: tuple[int, ...],
    seed: int,
    accumulate: int = 1,
    state_shardings: Any = None,
) -> Callable[[TrainState, Any, Batch], tuple[TrainState, Metrics]]:
    """Compiles a step; it takes over the buffers of the state it is given.

    Args:
        objective: what is minimised.
        optimizers: one per group of weights.
        pools: the pool sizes that rows take turns through, over the rows of a batch and on through the run.
        seed: with the step number it determines what is sampled in the step.
        accumulate: parts of the batch that are taken one after the other; divides the rows of a batch. Each counts by
            its terms, so a token weighs the same whatever else is in its part.
        state_shardings: where the next state lies, a tree like it; metrics then lie everywhere, as its step does. None
            leaves both to the compiler.

    Returns:
        `(state, frozen weights, batch) -> (state, metrics)`. Beside the objective's, the metrics hold the loss,
        `grad_norm/GROUP` and `lr/GROUP`, and under `part_norms/GROUP` one gradient norm per part in `part_names`. Loss
        and metrics of several parts are averaged by the terms of the first group.
    """
    gradient = jax.value_and_grad(objective, has_aux=True)

    def step(state: TrainState, frozen: Any, batch: Batch) -> tuple[TrainState, Metrics]:
        pool_B, key = _pools(pools, state.step, batch), _key(seed, state.step)

        def part(total, inputs):
            (loss, metrics), grads = gradient(state.weights, frozen, *inputs)
            # A running sum: the gradients of all parts would not fit.
            terms = {group: metrics[f"terms/{group}"] for group in grads}
            total = {group: _plus(total[group], terms[group], grads[group]) for group in grads}
            return constrain_weights(total), ({"loss": loss, **metrics}, terms)

        split = jax.tree.map(lambda x: constrain(x.reshape(accumulate, -1, *x.shape[1:]), "NB"), (batch, pool_B))
        nothing = constrain_weights(jax.tree.map(jnp.zeros_like, state.weights))
        total, (metrics_P, terms_P) = lax.scan(part, nothing, (*split, jax.random.split(key, accumulate)))
        counts = {group: terms.sum() for group, terms in terms_P.items()}
        grads = {group: _over(total[group], counts[group]) for group in total}
        metrics = _averaged(metrics_P, terms_P[min(terms_P)]) | {f"terms/{group}": n for group, n in counts.items()}
        return _update(state, grads, optimizers), metrics | _norms(grads, state.step, optimizers)

    if state_shardings is None:
        return jax.jit(step, donate_argnums=0)
    return jax.jit(step, donate_argnums=0, out_shardings=(state_shardings, state_shardings.step))


def make_measure(
    measure: Measure, *, pools: tuple[int, ...], seed: int, everywhere: Any = None
) -> Callable[[Groups, Any, Batch, Int[Array, ""]], Metrics]:
    """Compiles a measurement: `(weights, frozen weights, batch, step) -> metrics`, with the step's pools and key.

    `everywhere` is the sharding of the metrics; None leaves it to the compiler.
    """

    def run(weights: Groups, frozen: Any, batch: Batch, step: Int[Array, ""]) -> Metrics:
        return measure(weights, frozen, batch, _pools(pools, step, batch), _key(seed, step))

    return jax.jit(run, out_shardings=everywhere)


def part_names(tree: Any) -> list[str]:
    """Names of the parts of a group of weights: its layers, and whatever lies outside of them."""
    return [name for names in _parts(tree) for name in names]


def _pools(pools: tuple[int, ...], step: Int[Array, ""], batch: Batch) -> Int[Array, "B"]:
    """Rows take turns through the pools, and go on where the step before stopped."""
    rows = batch.token_BS.shape[0]
    turn_B = (step * rows + jnp.arange(rows)) % len(pools)
    return jnp.asarray(pools, jnp.int32)[turn_B]


def _key(seed: int, step: Int[Array, ""]) -> Array:
    return jax.random.fold_in(jax.random.key(seed), step)


def _plus(total: Any, terms: Float[Array, ""], gradient: Any) -> Any:
    return jax.tree.map(lambda x, y: x + terms * y, total, gradient)


def _over(total: Any, terms: Float[Array, ""]) -> Any:
    return jax.tree.map(lambda x: x / jnp.maximum(terms, 1), total)


def _averaged(metrics_P: Metrics, terms_P: Float[Array, "P"]) -> Metrics:
    """Metrics of the parts of a batch as those of the batch."""
    share_P = terms_P / jnp.maximum(terms_P.sum(), 1)
    return jax.tree.map(lambda x: jnp.tensordot(share_P, x.astype(share_P.dtype), axes=1), metrics_P)


def _update(state: TrainState, grads: Groups, optimizers: Mapping[str, GroupOptimizer]) -> TrainState:
    weights, optimizer = {}, {}
    for group, gradient in grads.items():
        updates, optimizer[group] = optimizers[group].update.update(
            gradient, state.optimizer[group], state.weights[group]
        )
        weights[group] = optax.apply_updates(state.weights[group], updates)
    return TrainState(state.step + 1, weights, optimizer)


def _norms(grads: Groups, step: Int[Array, ""], optimizers: Mapping[str, GroupOptimizer]) -> Metrics:
    metrics: Metrics = {}
    for group, gradient in grads.items():
        squares = jnp.concatenate([_squares(leaves) for leaves in _parts(gradient).values()])
        metrics[f"grad_norm/{group}"] = jnp.sqrt(squares.sum())
        metrics[f"lr/{group}"] = jnp.asarray(optimizers[group].rate(step), jnp.float32)
        metrics[f"part_norms/{group}"] = jnp.sqrt(squares)
    return metrics


def _parts(tree: Any) -> dict[tuple[str, ...], list[Any]]:
    """Names of parts, and what they consist of: leaves, or for all layers together what is stacked of them."""
    parts: dict[tuple[str, ...], list[Any]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda part: isinstance(part, Stacked)):
        names: tuple[str, ...] = (jax.tree_util.keystr(path[:1], simple=True),)
        if isinstance(leaf, Stacked):
            names = tuple(f"layer {n}" for n in range(len(leaf)))
        parts.setdefault(names, []).append(leaf)
    return parts


def _squares(part: list[Any]) -> Float[Array, "P"]:
    """The sum of the squares of a part, or of each layer of what is stacked."""

    def of(leaf: Array, first: int) -> Array:
        return jnp.sum(jnp.square(leaf), axis=tuple(range(first, leaf.ndim))).reshape(-1)

    sums = [of(leaf, isinstance(tree, Stacked)) for tree in part for leaf in jax.tree.leaves(tree)]
    return jnp.stack(sums).sum(axis=0)
