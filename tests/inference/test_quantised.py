"""A cache of rows in 8 bits: what it costs, that batches do not change it, and what cannot have one."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inference.tiny_model import CONFIG, ENTRY_BYTES, distinct_tokens, make_policy, random_scorer, tiny_model

from kvpop_jax.errors import UserError
from kvpop_jax.inference import Generator, SamplingParams, prefill
from kvpop_jax.inference.decode import CacheUsage
from kvpop_jax.inference.results import cache_reports

BUDGET = 60
PROMPTS = [distinct_tokens(1, 64)[0][:50].tolist(), distinct_tokens(2, 64)[1].tolist(), [3, 1, 4]]
SAMPLED = SamplingParams(temperature=1.0, max_new_tokens=32)
SEEDS = [5, 6, 7]


@cache
def generator(name: str, cache_dtype: str | None) -> Generator:
    """Of one layer: compiling is what these tests cost."""
    model = tiny_model()
    one = replace(
        model, config=replace(CONFIG, num_layers=1), params=replace(model.params, layers=model.params.layers[:1])
    )
    return Generator(one, make_policy(name), BUDGET, [random_scorer(name, 0)], cache_dtype=cache_dtype)


@pytest.mark.parametrize("name", ["kvpop", "rkv"])
def test_a_completion_depends_on_its_prompt_and_seed_only(name):
    """In one compiled program: in another, a sum in another order may round a number to the next of 255 steps."""
    batch = generator(name, "int8").generate(PROMPTS, SAMPLED, SEEDS)
    for row, wanted in enumerate(batch):
        for got in generator(name, "int8").generate([PROMPTS[row]] * 3, SAMPLED, [SEEDS[row]] * 3):
            assert got == wanted
    assert len({tuple(completion.tokens) for completion in batch}) == 3
    assert batch[1].cache.prompt_survival < batch[0].cache.prompt_survival <= batch[2].cache.prompt_survival


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

    streaming = generator("streaming_llm", cache_dtype)
    setup = streaming.setup([len(PROMPTS[0])], 1)
    shapes = jax.eval_shape(partial(prefill, setup), streaming.model.params, [None], *_one_row(PROMPTS[0]))[1]
    assert {cache.k_BKCD.dtype for cache in shapes} == {cache.v_BKCD.dtype for cache in shapes} == {jnp.dtype(stored)}
    # Beside an entry its position and its priority, and the ring.
    window = make_policy("streaming_llm").plan(BUDGET, CONFIG, per_entry).window
    counted = CONFIG.num_kv_heads * (BUDGET * (per_entry + 8) + window * 4)
    usage = CacheUsage(np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32), np.zeros(1, np.float32))
    (report,) = cache_reports(setup, [jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), shapes[0])], usage)
    assert (report.layer_bytes, report.bytes, report.cache_dtype) == ((counted,), counted, stored)
    assert report.allocated == BUDGET


def _one_row(prompt):
    return np.asarray([prompt], np.int32), np.asarray([len(prompt)], np.int32), np.zeros(1, np.int32)


@pytest.mark.core
@pytest.mark.parametrize("name", ["cam", "d2o", "streaming_llm_in_cache", "snapkv+cam"])
def test_policies_whose_steps_rewrite_the_cache_are_refused_by_name(name):
    with pytest.raises(UserError, match=rf"cache_dtype int8: policy {name.replace('+', '.')} rewrites cached rows"):
        Generator(tiny_model(), make_policy(name), BUDGET, cache_dtype="int8")
    Generator(tiny_model(), make_policy("cam+streaming_llm"), BUDGET, cache_dtype="int8")  # merges before it rounds


@pytest.mark.core
def test_an_unknown_format_is_refused_with_those_there_are():
    with pytest.raises(UserError, match=r"cache_dtype must be int8 or fp8, .* not 'int4'"):
        Generator(tiny_model(), make_policy("tova"), BUDGET, cache_dtype="int4")


def test_only_steps_read_rounded_rows_and_logits_move_little():
    token_BT = distinct_tokens(1, 50)
    plain, small = (
        np.stack([np.asarray(x) for x in generator("streaming_llm", dtype).teacher_forced(token_BT, 40)])
        for dtype in (None, "int8")
    )
    assert not np.array_equal(plain[1:], small[1:])
    np.testing.assert_array_equal(plain[0], small[0])  # a prompt attends to its own rows, as they are
    assert np.max(np.abs(plain - small)) < 0.05 * np.std(plain)
