"""The largest of many numbers, against a sort of all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvpop_jax.training.largest import largest, largest_by_blocks

ROWS = {
    "few ties": lambda rng, V: rng.normal(size=V),
    "many ties": lambda rng, V: rng.integers(-3, 3, V),
    "all equal": lambda rng, V: np.zeros(V),
    "all in the first block": lambda rng, V: -np.arange(V),
    "all in the last block": lambda rng, V: np.arange(V),
    "a masked end": lambda rng, V: np.where(np.arange(V) < V // 3, rng.normal(size=V), -np.inf),
    "nothing finite": lambda rng, V: np.full(V, -np.inf),
    "some of infinite size": lambda rng, V: rng.choice([-np.inf, -1.0, 1.0, np.inf], V),
}


@pytest.mark.parametrize(
    "V, count",
    [(1, 1), (127, 3), (128, 1), (129, 1), (129, 129), (2048, 16), (2050, 17), (5000, 1), (5000, 39), (5000, 40)],
)
def test_they_are_the_values_of_a_sort_of_all(V, count):
    rng = np.random.default_rng(V + count)
    x_LV = np.stack([row(rng, V) for row in ROWS.values()]).astype(np.float32)
    for form in (largest, largest_by_blocks):
        np.testing.assert_array_equal(jax.jit(form, static_argnums=1)(x_LV, count), jax.lax.top_k(x_LV, count)[0])


@pytest.mark.parametrize("shape", [(700,), (2, 3, 700)])
def test_any_axes_may_come_before(shape):
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    np.testing.assert_array_equal(largest_by_blocks(x, 2), jax.lax.top_k(x, 2)[0])


def test_by_blocks_a_vocabulary_is_not_sorted():
    jaxpr = jax.make_jaxpr(lambda x_LV: largest_by_blocks(x_LV, 256))(jax.ShapeDtypeStruct((2, 151_936), jnp.float32))
    sorted_ = [eqn.invars[0].aval.shape[-1] for eqn in jaxpr.eqns if eqn.primitive.name == "top_k"]
    assert sum(sorted_) < 151_936 / 20
