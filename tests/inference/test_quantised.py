"""A cache of rows in 8 bits: what it costs, that batches do not change it, and what cannot have one."""

from dataclasses import fields
from functools import cache

import jax
import numpy as np
import pytest
from inference.tiny_model import CONFIG, ENTRY_BYTES, distinct_tokens, make_policy, random_scorer, tiny_model

from kvpop_jax.errors import UserError
from kvpop_jax.inference import Generator, SamplingParams, complete

BUDGET = 60
PROMPTS = [distinct_tokens(1, 64)[0][:20].tolist(), distinct_tokens(2, 64)[1].tolist(), [3, 1, 4]]
SAMPLED = SamplingParams(temperature=1.0, max_new_tokens=40, stop_tokens=(11, 12))
SEEDS = [5, 6, 7]


@cache
def generator(name: str, cache_dtype: str | None) -> Generator:
    scorers = [random_scorer(name, layer) for layer in range(CONFIG.num_layers)]
    return Generator(tiny_model(), make_policy(name), BUDGET, scorers, cache_dtype=cache_dtype)


@pytest.mark.parametrize("name", ["kvpop", "rkv"])
def test_a_completion_is_the_same_alone_in_a_batch_and_in_a_row_that_is_handed_on(name):
    quantised = generator(name, "int8")
    batch = quantised.generate(PROMPTS, SAMPLED, SEEDS)
    alone = quantised.generate(PROMPTS[2:], SAMPLED, SEEDS[2:])
    handed_on = dict(complete(quantised, PROMPTS, SAMPLED, rows=2, seeds=SEEDS))
    for got, wanted in [*((handed_on[n], one) for n, one in enumerate(batch)), (alone[0], batch[2])]:
        assert (got.tokens, got.finish_reason) == (wanted.tokens, wanted.finish_reason)
        np.testing.assert_allclose(got.logprobs, wanted.logprobs, atol=1e-4)
        for field in fields(wanted.cache):
            assert getattr(got.cache, field.name) == pytest.approx(getattr(wanted.cache, field.name)), field.name


@pytest.mark.core
@pytest.mark.parametrize(("cache_dtype", "stored"), [("int8", "int8"), ("fp8", "float8_e4m3fn")])
def test_every_byte_is_counted_and_a_state_takes_more_of_the_smaller_entries(cache_dtype, stored):
    (plain,), (small,) = (set(generator("kvpop", dtype).plans(0)) for dtype in (None, cache_dtype))
    per_entry = 2 * (CONFIG.head_dim + 4)
    state_bytes = plain.state_entries * ENTRY_BYTES
    assert plain.budget == small.budget == BUDGET and plain.rows is None and small.rows == stored
    assert (small.state_entries - 1) * per_entry < state_bytes
    assert small.state_entries * per_entry > state_bytes - ENTRY_BYTES
    assert small.state_entries > plain.state_entries and small.pool < plain.pool

    (streaming,) = Generator(tiny_model(), make_policy("streaming_llm"), BUDGET, cache_dtype=cache_dtype).generate(
        PROMPTS[:1], SamplingParams(max_new_tokens=1)
    )
    # Beside an entry: its position and its priority; and the ring.
    per_layer = CONFIG.num_kv_heads * (BUDGET * (per_entry + 8) + 4)
    window = make_policy("streaming_llm").plan(BUDGET, CONFIG, per_entry).window
    assert streaming.cache.layer_bytes == (per_layer + CONFIG.num_kv_heads * 4 * (window - 1),) * CONFIG.num_layers
    assert (streaming.cache.cache_dtype, streaming.cache.allocated) == (stored, BUDGET)


@pytest.mark.core
@pytest.mark.parametrize("name", ["cam", "d2o", "streaming_llm_in_cache", "snapkv+cam"])
def test_policies_whose_steps_rewrite_the_cache_are_refused_by_name(name):
    with pytest.raises(UserError, match=rf"cache_dtype int8: policy {name.replace('+', '.')} rewrites cached rows"):
        Generator(tiny_model(), make_policy(name), BUDGET, cache_dtype="int8")
    Generator(tiny_model(), make_policy("cam+streaming_llm"), BUDGET, cache_dtype="int8")  # merges before it rounds


@pytest.mark.core
def test_an_unknown_format_is_refused_with_those_there_are():
    with pytest.raises(UserError, match="cache_dtype must be int8 or fp8, .* not 'int4'"):
        Generator(tiny_model(), make_policy("tova"), BUDGET, cache_dtype="int4")


def test_the_logits_are_near_those_of_the_full_cache():
    """Half a step of 1/254 of a row; the tiny model's attention is sharp, so the bound is of what it does to logits."""
    token_BT = distinct_tokens(1, 50)
    plain, small = (
        np.stack([np.asarray(x) for x in generator("streaming_llm", dtype).teacher_forced(token_BT, 40)])
        for dtype in (None, "int8")
    )
    assert not np.array_equal(plain, small)
    np.testing.assert_array_equal(plain[0], small[0])  # a prompt attends to its own rows, as they are
    assert np.max(np.abs(plain - small)) < 0.05 * np.std(plain)
    assert jax.tree.leaves(plain)
