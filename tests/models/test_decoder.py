import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from kvpop_jax.models import (
    Decoder,
    apply_layer,
    apply_layers,
    forward,
    init_params,
    rope_rotation,
    segment_positions,
    unembed,
)
from kvpop_jax.models.huggingface import read_huggingface

forward = jax.jit(forward, static_argnums=0)


@pytest.fixture
def model(golden):
    return read_huggingface(golden, jnp.float32)


@pytest.fixture
def llama(llama31):
    return read_huggingface(llama31, jnp.float32)


@pytest.mark.core
def test_logits_are_those_of_transformers(golden, model):
    expected = np.load(golden / "logits.npz")
    logits = forward(*model, jnp.asarray(expected["tokens"]))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)
    assert np.abs(expected["logits"]).max() > 1  # or the tolerance would mean nothing


def test_bfloat16_weights_stay_near_the_float32_logits(golden):
    expected = np.load(golden / "logits.npz")
    config, params = read_huggingface(golden, jnp.bfloat16)
    logits = forward(config, params, jnp.asarray(expected["tokens"]))
    assert params.layers[0].qkv_proj.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    assert np.linalg.norm(logits - expected["logits"]) < 0.05 * np.linalg.norm(expected["logits"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_of_logits_is_multiplied_in_the_dtype_of_the_weights(llama, dtype):
    config, params = llama
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    hidden_BTE = jax.random.normal(jax.random.key(0), (2, 5, config.hidden_size), dtype)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (params, hidden_BTE))

    def product(params, hidden_BTE):
        return hidden_BTE @ (params.embedding_VE.T if config.tie_embeddings else params.head_EV)

    def gradient(run, *inputs):
        logits, transpose = jax.vjp(run, *inputs)
        return transpose(jax.random.normal(jax.random.key(1), logits.shape, logits.dtype))

    run = functools.partial(unembed, config)
    found, wanted = gradient(run, params, hidden_BTE), gradient(product, *wide)
    if dtype == "float32":
        chex.assert_trees_all_equal(found, wanted)
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        # Cotangent and result are rounded to 8 bits; so are, on some CPUs, the ten terms of a sum as they add up.
        assert np.max(np.abs(x - y)) <= 2**-5 * np.max(np.abs(y))
    factors = {
        var.aval.dtype
        for eqn in _equations(jax.make_jaxpr(functools.partial(gradient, run))(params, hidden_BTE).jaxpr)
        if eqn.primitive.name == "dot_general"
        for var in eqn.invars
    }
    assert factors == {jnp.dtype(dtype)}


def _equations(jaxpr):
    """Of the program and of those within it."""
    inner = [sub for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params)]
    return [*jaxpr.eqns, *(eqn for sub in inner for eqn in _equations(sub))]


def test_double_precision_runs_in_double_precision(llama31):
    expected = np.load(llama31 / "logits.npz")
    with jax.enable_x64(True):
        config, params = read_huggingface(llama31, jnp.float64)
        logits = forward(config, params, jnp.asarray(expected["tokens"]))
    assert logits.dtype == jnp.float64
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.core
@pytest.mark.parametrize("seed", range(5))
def test_packed_documents_do_not_see_each_other_or_the_padding(model, seed):
    config, params = model
    rng = np.random.default_rng(seed)
    before, first, second = rng.integers(1, 8, size=3)
    tokens = rng.integers(0, config.vocab_size, size=(1, 24))
    segments = np.repeat([0, 1, 2, 0], [before, first, second, 24 - before - first - second])[None]

    packed = forward(config, params, tokens, segments)
    assert np.isfinite(packed).all()
    for segment, start, length in ((1, before, first), (2, before + first, second)):
        alone = np.roll(tokens, -start, axis=1)  # the document first, what follows is never seen
        logits = forward(config, params, alone, np.ones_like(segments))
        np.testing.assert_allclose(packed[segments == segment], logits[0, :length], rtol=0, atol=2e-5)


def test_positions_restart_with_each_segment():
    segments = jnp.array([[1, 1, 1, 2, 2, 0], [0, 0, 3, 3, 3, 3]])
    np.testing.assert_array_equal(segment_positions(segments), [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]])


@pytest.mark.core
def test_a_later_token_does_not_change_earlier_logits(model):
    config, params = model
    tokens = np.random.default_rng(0).integers(0, config.vocab_size - 1, size=(2, 9))
    changed = tokens + (np.arange(9) == 6)
    before, after = forward(config, params, tokens), forward(config, params, changed)
    np.testing.assert_allclose(before[:, :6], after[:, :6], rtol=0, atol=1e-5)
    assert not np.allclose(before[:, 6:], after[:, 6:], atol=1e-2)


@pytest.mark.core
def test_attention_is_called_once_per_layer_with_the_projected_heads(model):
    config, params = model
    seen = []

    def attend(index, inputs):
        seen.append(index)
        chex.assert_shape(inputs.hidden_BTE, (2, 5, config.hidden_size))
        chex.assert_shape(inputs.q_BTHD, (2, 5, config.num_heads, config.head_dim))
        chex.assert_shape([inputs.k_BTKD, inputs.v_BTKD], (2, 5, config.num_kv_heads, config.head_dim))
        return jnp.zeros_like(inputs.q_BTHD), {"layer": jnp.asarray(index)}

    @jax.jit
    def run(params, tokens):
        return apply_layers(config, params, tokens, segment_positions(jnp.ones_like(tokens)), attend)

    hidden, extras = run(params, jnp.zeros((2, 5), jnp.int32))
    assert seen == [0, 1] and [int(extra["layer"]) for extra in extras] == [0, 1]
    chex.assert_shape(hidden, (2, 5, config.hidden_size))


def hooked_loss(config, tokens_at_once):
    """A scalar that depends on the weights and on an array that the attention hook closes over."""

    def loss(params, scale, tokens):
        def attend(index, inputs):
            v_BTHD = jnp.repeat(inputs.v_BTKD, config.num_heads // config.num_kv_heads, axis=2)
            return inputs.q_BTHD * v_BTHD * scale, jnp.mean(inputs.k_BTKD) * index

        rotation = rope_rotation(config, segment_positions(jnp.ones_like(tokens)), jnp.dtype(jnp.float32))
        residual, total = params.embedding_VE[tokens], 0.0
        for index, layer in enumerate(params.layers):
            hook = functools.partial(attend, index)
            residual, extra = apply_layer(config, hook, layer, residual, rotation, tokens_at_once=tokens_at_once)
            total += extra
        return jnp.mean(unembed(config, params, residual) ** 2) + total

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


# 18 tokens in turns of 4: the last turn is not full, and one turn has tokens of both rows.
def test_tokens_that_take_turns_change_neither_loss_nor_gradients(llama):
    config, params = llama
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, size=(2, 9))
    plain, saved = (hooked_loss(config, most)(params, jnp.float32(0.7), tokens) for most in (None, 4))
    chex.assert_trees_all_close(plain, saved, rtol=1e-4, atol=1e-5)
    assert abs(plain[1][1]) > 1e-3


def test_initial_weights_have_the_loaded_structure(model):
    config, params = model
    fresh = init_params(config, jax.random.key(0), jnp.float32)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, fresh)
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(fresh)]
    assert len(set(buffers)) == len(buffers)  # a shared buffer could not be donated


def test_initial_weights_have_the_documented_deviations(llama):
    config = dataclasses.replace(llama[0], hidden_size=256, num_layers=2)
    layer = init_params(config, jax.random.key(0), jnp.float32).layers[0]
    np.testing.assert_allclose([layer.qkv_proj.std(), layer.o_proj.std()], [0.02, 0.01], rtol=0.05)
    np.testing.assert_array_equal(layer.mlp_norm_E, 1.0)


@pytest.mark.core
def test_the_flax_shell_splits_and_merges_to_the_same_model(model):
    config, params = model
    tokens = jnp.arange(10)[None]
    graph, state = nnx.split(Decoder(config, params))
    chex.assert_trees_all_equal(nnx.merge(graph, state).params, params)
    logits = jax.jit(lambda state: nnx.merge(graph, state)(tokens))(state)
    np.testing.assert_allclose(logits, forward(config, params, tokens), rtol=0, atol=1e-5)
