"""One step apart from any model: parts of a batch, pools, names of what went wrong."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kvpop_jax.config import OptimizerConfig, ScheduleConfig
from kvpop_jax.training.data import Batch
from kvpop_jax.training.metrics import DivergedError, check_finite
from kvpop_jax.training.optimizer import make_optimizer, schedule
from kvpop_jax.training.stacked import Stacked, map_parts, stack_lists
from kvpop_jax.training.step import GroupOptimizer, init_state, make_step, part_names

RATE = optax.constant_schedule(0.1)
SGD = {"base": GroupOptimizer(optax.sgd(RATE), RATE)}


def _batch(rows=4, length=3):
    token_BS = jnp.arange(rows * length).reshape(rows, length)
    return Batch(token_BS, jnp.ones_like(token_BS), token_BS, token_BS > 0, token_BS > 0)


def _quadratic(weights, frozen, batch, pool_B, key):
    """A mean over what is to be predicted."""
    error_BS = weights["base"]["layers"][0] - batch.token_BS
    terms = batch.loss_BS.sum(dtype=jnp.float32)
    return jnp.sum(batch.loss_BS * error_BS**2) / jnp.maximum(terms, 1), {"terms/base": terms}


def _state():
    return init_state({"base": {"layers": [jnp.ones(3)], "norm": jnp.ones(2)}}, SGD)


@pytest.mark.core
def test_accumulated_parts_average_to_the_step_of_the_batch():
    """Also where they hold more to be predicted, or less, or nothing."""
    loss_BS = jnp.array([[0, 1, 1], [1, 1, 1], [0, 1, 0], [0, 0, 0]], bool)
    states = [
        make_step(_quadratic, SGD, pools=(1,), seed=0, accumulate=parts)(
            _state(), (), dataclasses.replace(_batch(), loss_BS=loss_BS)
        )
        for parts in (1, 2, 4)
    ]
    for state, metrics in states[1:]:
        np.testing.assert_allclose(
            state.weights["base"]["layers"][0], states[0][0].weights["base"]["layers"][0], rtol=1e-6
        )
        np.testing.assert_allclose(metrics["loss"], states[0][1]["loss"], rtol=1e-6)
        assert metrics["terms/base"] == loss_BS.sum()
        assert state.step == 1


def test_memory_holds_one_gradient_however_many_parts_a_batch_has():
    def loss(weights, frozen, batch, pool_B, key):
        return jnp.mean(jnp.square(weights["base"] - jnp.sum(batch.token_BS))), {"terms/base": jnp.ones(())}

    state = init_state({"base": jnp.ones(1 << 16)}, SGD)
    taken = []
    for parts in (2, 8):
        step = make_step(loss, SGD, pools=(1,), seed=0, accumulate=parts).lower(state, (), _batch(rows=8)).compile()
        taken.append(step.memory_analysis().temp_size_in_bytes)
    assert taken[1] < taken[0] + state.weights["base"].nbytes, "the gradient of every part is kept"


def test_norms_are_told_apart_by_group_and_part():
    state = _state()
    names = part_names(state.weights["base"])
    _, metrics = make_step(_quadratic, SGD, pools=(1,), seed=0)(state, (), _batch())
    norms = dict(zip(names, metrics["part_norms/base"].tolist(), strict=True))
    assert norms["norm"] == 0
    np.testing.assert_allclose(norms["layer 0"], metrics["grad_norm/base"], rtol=1e-6)


def test_stacked_layers_are_updated_and_measured_as_each_would_be_alone():
    """Decay by a layer's own rank, a norm per layer, and one norm over all of them to clip by."""
    generator = np.random.default_rng(0)

    def layer():
        return {"matrix_EF": generator.normal(size=(3, 4)), "norm_E": generator.normal(size=3)}

    def tree():
        made = {"layers": [layer() for _ in range(3)], "head_EV": generator.normal(size=(3, 5))}
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), made)

    weights, gradient = tree(), tree()
    optimizer = make_optimizer(
        OptimizerConfig(clip=1.0, weight_decay=0.5), ScheduleConfig(lr=1.0, shape="constant", warmup=0), steps=10
    )
    optimizers = {"base": GroupOptimizer(optimizer, RATE)}
    updates, _ = optimizer.update(gradient, optimizer.init(weights), weights)
    expected = optax.apply_updates(weights, updates)  # now: the step takes over the weights' buffers

    def objective(groups, frozen, batch, pool_B, key):
        terms = jax.tree.map(lambda x, g: jnp.sum(x * g), groups["base"], stack_lists(gradient))
        return sum(jax.tree.leaves(terms)), {"terms/base": jnp.ones(())}

    state = init_state({"base": weights}, optimizers)
    names = part_names(state.weights["base"])
    state, metrics = make_step(objective, optimizers, pools=(1,), seed=0)(state, (), _batch())
    after = map_parts(lambda part: list(part) if isinstance(part, Stacked) else part, state.weights["base"])
    chex.assert_trees_all_close(after, expected, rtol=1e-5)
    norms = dict(zip(names, metrics["part_norms/base"].tolist(), strict=True))
    assert norms.keys() == {"head_EV", "layer 0", "layer 1", "layer 2"}
    for n, part in enumerate(gradient["layers"]):
        np.testing.assert_allclose(norms[f"layer {n}"], optax.global_norm(part), rtol=1e-5)


METRICS = {
    "boundary": np.array([0.1, 0.2, 0.3]),
    "kl": np.array(0.5),
    "loss": np.array(0.7),
    "grad_norm/base": np.array(1.0),
    "part_norms/base": np.array([0.5, 0.5]),
}
NAMES = {"base": ["embedding_VE", "layer 0"]}


@pytest.mark.core
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"kl": np.array(np.nan), "loss": np.array(np.nan)}, "step 7: kl is nan"),
        (
            {"boundary": np.array([0.1, np.inf, np.nan]), "loss": np.array(np.nan)},
            "step 7: boundary is inf in layer 1, 2",
        ),
        ({"loss": np.array(-np.inf)}, "step 7: loss is -inf"),
        (
            {"grad_norm/base": np.array(np.nan), "part_norms/base": np.array([0.5, np.nan])},
            r"step 7: the gradient of base is nan \(layer 0\)",
        ),
    ],
)
def test_what_is_not_finite_is_named(broken, message):
    with pytest.raises(DivergedError, match=message):
        check_finite(7, METRICS | broken, NAMES)


def test_finite_metrics_pass():
    check_finite(7, METRICS, NAMES)


def test_schedules_warm_up_from_the_first_step_and_end_where_they_should():
    rate = schedule(ScheduleConfig(lr=2.0, shape="cosine", warmup=4, final=0.1), steps=20)
    np.testing.assert_allclose([rate(step) for step in range(5)], [0.5, 1.0, 1.5, 2.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(rate(20), 0.2, rtol=1e-6)
    constant = schedule(ScheduleConfig(lr=2.0, shape="constant", warmup=0), steps=20)
    assert constant(0) == constant(19) == 2.0


def test_groups_are_clipped_apart_and_only_matrices_decay():
    settings = OptimizerConfig(clip=1.0, weight_decay=0.5)
    optimizer = make_optimizer(settings, ScheduleConfig(lr=1.0, shape="constant", warmup=0), steps=10)
    layer = {"in_bias_KF": jnp.ones((2, 2)), "in_KIF": jnp.ones((2, 2, 2))}
    weights = {"matrix": jnp.ones((2, 2)), "vector": jnp.ones(2)} | stack_lists({"layers": [layer, layer]})
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, weights), optimizer.init(weights), weights)
    np.testing.assert_allclose(updates["matrix"], -0.5)
    np.testing.assert_allclose(updates["vector"], 0)
    np.testing.assert_allclose(updates["layers"].of_layers["in_KIF"], -0.5)
    np.testing.assert_allclose(updates["layers"].of_layers["in_bias_KF"], 0)
