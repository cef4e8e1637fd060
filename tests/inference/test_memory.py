"""The compiled decode program: its cache is updated in place, and nothing in it grows with the text."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from inference.tiny_model import CONFIG, make_policy, random_scorer, tiny_model

from kvpop_jax.errors import UserError
from kvpop_jax.inference import Generator, SamplingParams, decode_steps
from kvpop_jax.inference.decode import Setup, start
from kvpop_jax.inference.memory import cache_bytes, memory_explained

BATCH, BUDGET = 2, 40


def compiled_decode(name: str, length: int):
    """Memory of `decode_steps` after a prompt of `length` tokens that is to become twice as long, and cache bytes."""
    layers = CONFIG.num_layers
    generator = Generator(tiny_model(), make_policy(name), None if name == "dense" else BUDGET)
    setup = Setup(CONFIG, generator.policies, generator.plans(2 * length), pin_prompt=False)
    params, scorers = tiny_model().params, [random_scorer(name, layer) for layer in range(layers)]
    sampling = SamplingParams(max_new_tokens=length)
    row_B = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    token_BS = jax.ShapeDtypeStruct((BATCH, length), jnp.int32)
    state = jax.eval_shape(partial(start, setup, sampling=sampling), params, scorers, token_BS, row_B, row_B)
    decode = jax.jit(partial(decode_steps, setup, sampling=sampling, steps=8), donate_argnums=(2,))
    cache_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.caches))
    return decode.lower(params, scorers, state).compile().memory_analysis(), cache_bytes


@pytest.mark.parametrize("name", ["kvpop", "dense"])
def test_the_cache_is_donated_and_only_dense_grows_with_the_text(name):
    (short, short_cache), (long, long_cache) = (compiled_decode(name, length) for length in (64, 256))
    assert short.alias_size_in_bytes >= short_cache
    assert long.alias_size_in_bytes >= long_cache
    growth = [
        long_cache - short_cache,
        long.argument_size_in_bytes - short.argument_size_in_bytes,
        long.temp_size_in_bytes - short.temp_size_in_bytes,
    ]
    if name == "dense":
        assert growth[1] >= growth[0] > 2 * short_cache
    else:
        assert growth == [0, 0, 0]


@pytest.mark.core
def test_a_batch_that_does_not_fit_is_refused_by_its_size_and_what_to_lower():
    generator = Generator(tiny_model(), make_policy("tova"), 1 << 19, cache_dtype="int8")
    setup = Setup(CONFIG, generator.policies, generator.plans(0), pin_prompt=False)
    slots = (1 << 19) + 1  # and TOVA's scratch
    wanted = 8 * CONFIG.num_layers * CONFIG.num_kv_heads * slots * 2 * (CONFIG.head_dim + 4)
    assert cache_bytes(setup, 8, jnp.float32) == wanted
    explained = partial(memory_explained, setup, 8, jnp.float32)
    said = r"of 8 rows alone take 0\.625 GiB, .* lower the rows \(batch_size\)"
    with pytest.raises(UserError, match=said), explained():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), explained():
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
