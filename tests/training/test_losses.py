"""The losses against their definitions, written out over all logits at once."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from kvpop_jax.training import losses

B, S, E, V = 2, 7, 8, 11


@pytest.fixture(params=[1, 3 * V, 10**6], ids=["token by token", "ragged chunks", "one chunk"])
def chunking(request, monkeypatch):
    monkeypatch.setattr(losses, "_LOGITS_AT_ONCE", request.param)


@pytest.fixture
def arrays():
    keys = jax.random.split(jax.random.key(0), 5)
    return {
        "student": jax.random.normal(keys[0], (B, S, E)),
        "teacher": jax.random.normal(keys[1], (B, S, E)),
        "head": jax.random.normal(keys[2], (E, V)),
        "token": jax.random.randint(keys[3], (B, S), 0, V),
        "predicts": jax.random.bernoulli(keys[4], 0.6, (B, S)).at[:, -1].set(False),
    }


def _cross_entropy(hidden, head, arrays):
    return losses.cross_entropy(hidden, lambda x: x @ head, arrays["token"], arrays["predicts"], V)


def _kl(student, head, arrays, teacher=None, top_k=4):
    teacher = arrays["teacher"] if teacher is None else teacher
    return losses.kl_to_teacher(
        student, lambda x: x @ head, teacher, lambda x: x @ arrays["head"], arrays["predicts"], V, top_k=top_k
    )


@pytest.mark.core
def test_only_tokens_of_the_same_document_are_predicted():
    segment = jnp.array([[1, 1, 2, 2, 2, 0, 0]])
    loss = jnp.array([[False, True, False, True, False, False, False]])
    np.testing.assert_array_equal(losses.predicts(segment, loss), [[True, False, True, False, False, False, False]])
    assert not losses.predicts(segment, jnp.zeros_like(loss)).any()


def test_cross_entropy_and_its_gradient_are_those_of_all_logits(arrays, chunking):
    def direct(hidden, head):
        log_p = jax.nn.log_softmax(hidden @ head, axis=-1)[:, :-1]
        nll = -jnp.take_along_axis(log_p, arrays["token"][:, 1:, None], axis=-1)[..., 0]
        weight = arrays["predicts"][:, :-1]
        return jnp.sum(nll * weight) / weight.sum()

    found = jax.jit(jax.value_and_grad(lambda *x: _cross_entropy(*x, arrays)[0], argnums=(0, 1)))(
        arrays["student"], arrays["head"]
    )
    wanted = jax.value_and_grad(direct, argnums=(0, 1))(arrays["student"], arrays["head"])
    chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_kl_and_its_gradient_are_those_of_all_logits(arrays, chunking):
    def direct(student, head):
        top, index = jax.lax.top_k(arrays["teacher"] @ arrays["head"], 4)
        p = jax.nn.softmax(top, axis=-1)
        log_q = jnp.take_along_axis(jax.nn.log_softmax(student @ head, axis=-1), index, axis=-1)
        kl = jnp.sum(p * (jnp.log(p) - log_q), axis=-1)
        return jnp.sum(kl * arrays["predicts"]) / arrays["predicts"].sum()

    found = jax.jit(jax.value_and_grad(lambda *x: _kl(*x, arrays)[0], argnums=(0, 1)))(
        arrays["student"], arrays["head"]
    )
    wanted = jax.value_and_grad(direct, argnums=(0, 1))(arrays["student"], arrays["head"])
    chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_kl_of_a_model_with_itself_is_zero_only_over_the_whole_vocabulary(arrays):
    same, agreement = _kl(arrays["teacher"], arrays["head"], arrays, top_k=V)
    np.testing.assert_allclose(same, 0, atol=1e-6)
    assert agreement == 1
    # The student's mass outside the teacher's top tokens is not renormalised away.
    assert _kl(arrays["teacher"], arrays["head"], arrays, top_k=4)[0] > 0.01


def test_a_masked_end_of_the_vocabulary_changes_nothing(arrays):
    def masked(hidden, head):
        return jnp.pad(hidden @ head, ((0, 0),) * 2 + ((0, 3),), constant_values=-jnp.inf)

    def loss(student, end):
        unembed = masked if end else jnp.matmul
        found = losses.kl_to_teacher(
            student, lambda x: unembed(x, arrays["head"]), arrays["teacher"], lambda x: unembed(x, arrays["head"]),
            arrays["predicts"], V + 3 * end, top_k=V + end,
        )  # fmt: skip
        return found[0], found

    with_end, without = (jax.grad(loss, has_aux=True)(arrays["student"], end) for end in (True, False))
    chex.assert_trees_all_close(with_end, without, rtol=1e-5, atol=1e-6)


def test_agreement_is_of_the_likeliest_tokens(arrays):
    student = 0.6 * arrays["teacher"] + 0.4 * arrays["student"]
    likeliest, teachers = (jnp.argmax(x @ arrays["head"], axis=-1) for x in (student, arrays["teacher"]))
    wanted = jnp.sum((likeliest == teachers) & arrays["predicts"]) / arrays["predicts"].sum()
    assert 0 < wanted < 1
    np.testing.assert_allclose(_kl(student, arrays["head"], arrays)[1], wanted, rtol=1e-6)


def test_likelihoods_that_underflow_are_left_out_of_the_kl(arrays):
    loss, gradient = jax.value_and_grad(lambda x: _kl(x, 1e3 * arrays["head"], arrays)[0])(arrays["student"])
    assert np.isfinite(loss)
    chex.assert_tree_all_finite(gradient)


def test_the_backward_pass_searches_and_sums_no_logits_again(arrays):
    def loss(student):
        return _kl(student, arrays["head"], arrays)[0]

    forward, both = (_equations(jax.make_jaxpr(f)(arrays["student"]).jaxpr) for f in (loss, jax.value_and_grad(loss)))
    for name in ("top_k", "reduce_max", "reduce_sum", "reduce_or"):
        found, wanted = (
            sum(eqn.primitive.name == name and eqn.invars[0].aval.shape[-1:] == (V,) for eqn in equations)
            for equations in (both, forward)
        )
        assert found == wanted > 0, name


def test_nothing_of_the_size_of_the_logits_is_made_outside_of_the_loop(arrays):
    """As a constant operand of it would be, to be read from memory in every turn."""
    gradient = jax.make_jaxpr(jax.grad(lambda x: _kl(x, arrays["head"], arrays)[0]))(arrays["student"])
    outside = _equations(gradient.jaxpr, into=lambda eqn: eqn.primitive.name != "scan")
    assert not [eqn for eqn in outside for var in eqn.outvars if var.aval.shape[-3:] == (B, S, V)]


def _equations(jaxpr, into=lambda eqn: True):
    """Of the program and of those within it."""
    inner = [sub for eqn in jaxpr.eqns if into(eqn) for sub in jaxprs_in_params(eqn.params)]
    return [*jaxpr.eqns, *(eqn for sub in inner for eqn in _equations(sub, into))]


def test_the_teacher_gets_no_gradient(arrays):
    gradient = jax.grad(lambda teacher: _kl(arrays["student"], arrays["head"], arrays, teacher)[0])(arrays["teacher"])
    chex.assert_trees_all_equal(gradient, jnp.zeros_like(gradient))


def test_nothing_to_predict_gives_zero_and_finite_gradients(arrays):
    arrays["predicts"] = jnp.zeros((B, S), bool)
    loss, gradient = jax.value_and_grad(lambda x: _kl(x, arrays["head"], arrays)[0])(arrays["student"])
    assert loss == 0
    chex.assert_tree_all_finite(gradient)
