"""The losses against their definitions, written out over all logits at once."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def test_the_teacher_gets_no_gradient(arrays):
    gradient = jax.grad(lambda teacher: _kl(arrays["student"], arrays["head"], arrays, teacher)[0])(arrays["teacher"])
    chex.assert_trees_all_equal(gradient, jnp.zeros_like(gradient))


def test_nothing_to_predict_gives_zero_and_finite_gradients(arrays):
    arrays["predicts"] = jnp.zeros((B, S), bool)
    loss, gradient = jax.value_and_grad(lambda x: _kl(x, arrays["head"], arrays)[0])(arrays["student"])
    assert loss == 0
    chex.assert_tree_all_finite(gradient)
