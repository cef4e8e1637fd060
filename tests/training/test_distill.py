"""The student under eviction: which loss moves which weights, and what it must equal where eviction does nothing."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.test_util import check_grads

from kvpop_jax import policies
from kvpop_jax.config import LossConfig, TargetConfig
from kvpop_jax.models import ModelConfig, init_params
from kvpop_jax.policies import PolicySettings
from kvpop_jax.scorers import MLPSettings, MLSTMSettings, dims_of
from kvpop_jax.scorers.files import make_scorer
from kvpop_jax.training import distill
from kvpop_jax.training.data import Batch
from kvpop_jax.training.objectives import dense_hidden
from kvpop_jax.training.step import GroupOptimizer, init_state, make_step
from kvpop_jax.training.student import Student, student_hidden

CONFIG = ModelConfig(
    family="qwen3", vocab_size=64, hidden_size=32, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, tie_embeddings=True, qk_norm=True,
    max_position=64, bos_token_id=None, eos_token_ids=(0,), pad_token_id=0,
)  # fmt: skip
ONE_LAYER = dataclasses.replace(CONFIG, num_layers=1)
SINKS, WINDOW, S = 2, 4, 48
SCORERS = {"kvpop": MLSTMSettings(), "kvpop_mlp": MLPSettings()}
KEY = jax.random.key(7)


@functools.cache
def _student(policy="kvpop"):
    scorer = make_scorer(SCORERS[policy], dims_of(CONFIG)) if policy in SCORERS else None
    made = policies.make(policy, PolicySettings(SINKS, WINDOW, scorer))
    return Student(made.priorities, scorer, SINKS, WINDOW, pin_prompt=False, losses=LossConfig(top_k_logits=16))


def _fresh(student, layers=1):
    return [student.scorer.init(jax.random.key(layer)) for layer in range(layers)]


def _opinionated(student, layers=1):
    """Scorers whose zero-initialised heads were shaken."""
    params = _fresh(student, layers)

    def shake(leaf):
        noise = jax.random.normal(jax.random.key(leaf.size), leaf.shape, leaf.dtype)
        return leaf + 0.5 * noise if leaf.ndim > 1 else leaf

    return jax.tree.map(shake, params)


def _batch(lengths=((30, 18), (40,)), seed=1):
    segment, position = np.zeros((2, len(lengths), S), np.int32)
    for row, documents in enumerate(lengths):
        end = 0
        for number, length in enumerate(documents, start=1):
            segment[row, end : end + length], position[row, end : end + length] = number, np.arange(length)
            end += length
    token = np.random.default_rng(seed).integers(1, CONFIG.vocab_size, segment.shape) * (segment > 0)
    arrays = (token, segment, position, (position < 5) & (segment > 0), position > 0)
    return Batch(*(jnp.asarray(array) for array in arrays))


def _init(config, seed):
    # Ten times the usual scale: attention that prefers some keys, so that it matters which are kept.
    params = init_params(config, jax.random.key(seed), jnp.float32)
    return jax.tree.map(lambda x: 10 * x if x.ndim > 1 else x, params)


@pytest.fixture(scope="module")
def params():
    return _init(ONE_LAYER, 0)


@pytest.fixture(scope="module")
def teacher():
    return _init(ONE_LAYER, 5)


_compiled = jax.jit(student_hidden, static_argnums=(0, 1))


def _hidden(student, params, scorer_params, batch, pools=(6, 6)):
    """Hidden states and metrics; one compilation for all tests of the same student."""
    return _compiled(student, ONE_LAYER, params, scorer_params, batch, jnp.array(pools), KEY)


@pytest.mark.core
@pytest.mark.parametrize("policy", ["kvpop", "kvpop_mlp"])
def test_each_loss_moves_its_own_weights_only(policy):
    # Two layers: what the second one's scorer reads was made by the first one's weights.
    student = _student(policy)
    objective = distill.distill(CONFIG, student, jnp.dtype(jnp.float32), remat=False)
    weights = {"base": _init(CONFIG, 0), "scorer": _opinionated(student, layers=2)}
    batch, pool_B = _batch(), jnp.array([6, 9])

    def gradient(metric, of):
        def value(part):
            return objective(weights | {of: part}, _init(CONFIG, 5), batch, pool_B, KEY)[1][metric].sum()

        return jax.grad(value)(weights[of])

    found = jax.jit(lambda: [gradient("kl", of="scorer"), gradient("boundary", of="base")])()
    chex.assert_trees_all_equal(found, jax.tree.map(jnp.zeros_like, found))


@pytest.mark.core
def test_a_pool_of_the_whole_sequence_is_the_dense_model(params):
    student, batch = _student(), _batch()
    hidden, metrics = _hidden(student, params, _opinionated(student), batch, (S, S))
    real = batch.segment_BS[..., None] > 0
    np.testing.assert_allclose(hidden * real, dense_hidden(ONE_LAYER, params, batch) * real, atol=1e-5)
    np.testing.assert_allclose(metrics["kept_mass"], 1, atol=1e-5)
    np.testing.assert_array_equal(metrics["boundary"], 0)  # nothing ever competes


@pytest.mark.parametrize("policy", ["kvpop", "kvpop_mlp"])
def test_training_starts_as_streaming_llm(policy, params):
    student, batch = _student(policy), _batch()
    hidden, metrics = _hidden(student, params, _fresh(student), batch)
    streaming, _ = _hidden(_student("streaming_llm"), params, None, batch)
    chex.assert_trees_all_close(hidden, streaming, atol=1e-5)
    assert np.all(metrics["kept_mass"] < 0.99)


def test_documents_of_a_row_do_not_see_each_other(params):
    student, packed, alone = _student(), _batch(((30, 18), (40,))), _batch(((30,), (18,)))
    first, second = packed.token_BS[0, :30], packed.token_BS[0, 30:]
    token_BS = jnp.stack([jnp.pad(first, (0, S - 30)), jnp.pad(second, (0, S - 18))])
    hidden_BSE, _ = _hidden(student, params, _opinionated(student), packed)
    alone_BSE, _ = _hidden(student, params, _opinionated(student), dataclasses.replace(alone, token_BS=token_BS))
    np.testing.assert_allclose(hidden_BSE[0, :30], alone_BSE[0, :30], atol=1e-5)
    np.testing.assert_allclose(hidden_BSE[0, 30:], alone_BSE[1, :18], atol=1e-5)


def test_every_row_has_its_own_pool(params):
    student, batch = _student(), _batch()
    mixed, small, large = (
        _hidden(student, params, _opinionated(student), batch, pools)[0] for pools in ((4, 11), (4, 4), (11, 11))
    )
    np.testing.assert_allclose(mixed, jnp.stack([small[0], large[1]]), atol=1e-5)
    assert not np.allclose(mixed, small, atol=1e-2)


def test_a_pinned_prompt_is_kept_at_the_expense_of_the_pool(params):
    student, batch = _student("streaming_llm"), _batch(((40,), (33,)))
    pinned, _ = _hidden(dataclasses.replace(student, pin_prompt=True), params, None, batch)
    # Five prompt tokens instead of two sinks: three slots fewer in the pool.
    more = policies.make("streaming_llm", PolicySettings(5, WINDOW))
    sinks, _ = _hidden(dataclasses.replace(student, sinks=5, priorities=more.priorities), params, None, batch, (3, 3))
    np.testing.assert_allclose(pinned, sinks, atol=1e-5)


@pytest.mark.parametrize("target", [TargetConfig(lse="dense"), TargetConfig(group="mean", query_share=0.5)])
def test_switches_of_the_target_change_the_loss_and_nothing_else(params, target):
    student, batch = _student("kvpop_mlp"), _batch()
    scorer = _opinionated(student)
    plain, metrics = _hidden(student, params, scorer, batch)
    changed = dataclasses.replace(student, losses=dataclasses.replace(student.losses, target=target))
    hidden, other = _hidden(changed, params, scorer, batch)
    chex.assert_trees_all_close(hidden, plain, atol=1e-6)
    assert np.all(np.isfinite(other["boundary"]))
    assert not np.allclose(other["boundary"], metrics["boundary"], rtol=1e-4)


def test_rematerialised_layers_give_the_same_gradient(params):
    student, batch = _student("streaming_llm"), _batch()

    def gradient(remat):
        def value(params):
            hidden, _ = student_hidden(student, ONE_LAYER, params, None, batch, jnp.array([6, 9]), KEY, remat=remat)
            return jnp.sum(hidden**3)

        return jax.jit(jax.grad(value))(params)

    chex.assert_trees_all_close(gradient(True), gradient(False), rtol=1e-3, atol=1e-4)


def test_the_backward_pass_neither_attends_nor_evicts_nor_scores_again(params):
    # With rematerialisation: what a forward pass does beside projections happens once.
    student, batch = _student(), _batch()

    def value(params, scorer):
        hidden, metrics = student_hidden(student, ONE_LAYER, params, scorer, batch, jnp.array([6, 9]), KEY, remat=True)
        return jnp.sum(hidden) + metrics["boundary"].sum()

    forward = jax.make_jaxpr(value)(params, _fresh(student))
    both = jax.make_jaxpr(jax.value_and_grad(value, argnums=(0, 1)))(params, _fresh(student))
    assert _count(both.jaxpr, "population_count") == _count(forward.jaxpr, "population_count") > 0  # of expiry
    assert _count(both.jaxpr, "reduce_max") == _count(forward.jaxpr, "reduce_max") > 0  # of the log-sum-exps
    assert _count(both.jaxpr, "tanh") == _count(forward.jaxpr, "tanh") > 0  # of the scorer's gates


def test_the_gradient_of_the_boundary_loss_is_its_slope(params):
    student, batch = _student("kvpop"), _batch()
    # Without the weight by the targets' gap, which lambda moves and which takes no gradient.
    unweighted = dataclasses.replace(student.losses.boundary, margin_weight=False)
    student = dataclasses.replace(student, losses=dataclasses.replace(student.losses, boundary=unweighted))
    with jax.enable_x64(True):
        params, scorer = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (params, _opinionated(student)))

        @jax.jit
        def loss(scorer):
            _, metrics = student_hidden(student, ONE_LAYER, params, scorer, batch, jnp.array([6, 9]), KEY, remat=True)
            return metrics["boundary"].sum()

        # The step is too small for any token to be evicted at another time: the slope counts none of that.
        check_grads(loss, (scorer,), order=1, modes=["rev"], eps=1e-6, rtol=1e-6, atol=1e-8)


def _count(jaxpr, primitive):
    inner = sum(_count(sub, primitive) for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params))
    return inner + sum(eqn.primitive.name == primitive for eqn in jaxpr.eqns)


def test_a_scorer_learns_on_a_frozen_model(params):
    student, batch = _student("kvpop_mlp"), _batch()
    rate = optax.constant_schedule(1e-2)
    optimizers = {"scorer": GroupOptimizer(optax.adam(rate), rate)}
    state = init_state({"scorer": _fresh(student)}, optimizers)
    step = make_step(distill.train_scorer(ONE_LAYER, student, remat=False), optimizers, pools=(6,), seed=0)
    history = []
    for _ in range(40):
        state, metrics = step(state, params, batch)
        history.append(float(metrics["loss"]))
    assert history[-1] < 0.8 * history[0]
    assert metrics["boundary_accuracy"].mean() > 0.75
    assert set(state.weights) == {"scorer"}


def test_rows_take_turns_through_the_budgets():
    seen = []

    def objective(weights, frozen, batch, pool_B, key):
        return weights["base"].sum(), {"pool": pool_B, "terms/base": jnp.ones(())}

    rate = optax.constant_schedule(0.0)
    optimizers = {"base": GroupOptimizer(optax.sgd(rate), rate)}
    state = init_state({"base": jnp.ones(2)}, optimizers)
    step = make_step(objective, optimizers, pools=(10, 20, 30), seed=0)
    for _ in range(3):
        state, metrics = step(state, (), _batch())
        seen += metrics["pool"].tolist()
    assert seen == [10, 20, 30, 10, 20, 30]


def test_without_a_scorer_the_kl_is_the_whole_loss(params, teacher):
    objective = distill.distill(ONE_LAYER, _student("streaming_llm"), jnp.dtype(jnp.float32), remat=False)
    loss, metrics = jax.jit(objective)({"base": params}, teacher, _batch(), jnp.array([6, 9]), KEY)
    assert loss == metrics["kl"]
    assert set(metrics) == {"kl", "agreement", "kept_mass", "terms/base"}


@pytest.mark.core
def test_rows_in_parts_teach_what_they_teach_together(params, teacher):
    """The second row has few tokens to predict, and fewer to compare: nothing in it may weigh more for that."""
    student = _student("kvpop_mlp")
    alike = dataclasses.replace(student.losses.boundary, balance=False)  # which is of a part
    student = dataclasses.replace(student, losses=dataclasses.replace(student.losses, boundary=alike))
    rate = optax.constant_schedule(1.0)
    optimizers = {group: GroupOptimizer(optax.sgd(rate), rate) for group in ("base", "scorer")}
    objective = distill.distill(ONE_LAYER, student, jnp.dtype(jnp.float32), remat=False)
    found = []
    for parts in (1, 2):
        state = init_state(jax.tree.map(jnp.copy, {"base": params, "scorer": _opinionated(student)}), optimizers)
        step = make_step(objective, optimizers, pools=(6,), seed=0, accumulate=parts)
        state, metrics = step(state, teacher, _batch(((48,), (15,))))
        found.append((state.weights, metrics["kl"]))
    assert metrics["terms/scorer"] == ONE_LAYER.num_kv_heads * (48 + 15 - 2 * (SINKS + WINDOW + 6))
    chex.assert_trees_all_close(*found, rtol=2e-5, atol=2e-6)
