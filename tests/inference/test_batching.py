"""Continuous batching: completions do not know what they shared a batch with, and nothing is done twice or grows."""

from collections import Counter
from dataclasses import fields, replace
from functools import cache

import jax
import numpy as np
import pytest
from inference.tiny_model import CONFIG, distinct_tokens, make_policy, random_scorer, tiny_model

from kvpop_jax.errors import UserError
from kvpop_jax.inference import BatchStatistics, Completion, Generator, SamplingParams, batching, complete

BUDGET, NEW_TOKENS = 24, 40
# Ragged, two of them longer than the budget, one in a bucket of its own, and one that stands there three times.
TOKENS = distinct_tokens(1, 64)[0].tolist()
PROMPTS = [TOKENS[:30], TOKENS[5:8], [*TOKENS, *TOKENS[:6]], TOKENS[5:8], TOKENS[10:25], TOKENS[5:8]]
SEEDS = [5, 6, 7, 8, 9, 10]
SAMPLED = SamplingParams(temperature=1.0, max_new_tokens=NEW_TOKENS, stop_tokens=(11, 12))


@cache
def generator(name: str) -> Generator:
    """Of one layer: every row's arrays are treated alike, and compiling is what these tests cost."""
    model = tiny_model()
    one = replace(
        model, config=replace(CONFIG, num_layers=1), params=replace(model.params, layers=model.params.layers[:1])
    )
    return Generator(one, make_policy(name), None if name == "dense" else BUDGET, [random_scorer(name, 0)])


@pytest.fixture(autouse=True)
def few_prompts_at_once(monkeypatch):
    monkeypatch.setattr(batching, "GROUP_PROMPTS", 2)


@cache
def completed(name: str, rows: int) -> tuple[dict[int, Completion], list[BatchStatistics]]:
    seen: list[BatchStatistics] = []
    pairs = list(complete(generator(name), PROMPTS, SAMPLED, rows=rows, seeds=SEEDS, progress=seen.append))
    assert sorted(index for index, _ in pairs) == list(range(len(PROMPTS)))
    return dict(pairs), seen


def assert_same(got: Completion, wanted: Completion):
    assert (got.tokens, got.finish_reason) == (wanted.tokens, wanted.finish_reason)
    np.testing.assert_allclose(got.logprobs, wanted.logprobs, atol=1e-4)
    for field in fields(wanted.cache):
        assert getattr(got.cache, field.name) == pytest.approx(getattr(wanted.cache, field.name)), field.name


@pytest.mark.parametrize("name", ["dense", "random", "tova"])
def test_completions_and_reports_are_those_of_generate_whatever_the_rows(name):
    wanted = generator(name).generate(PROMPTS, SAMPLED, SEEDS)
    reasons = Counter(completion.finish_reason for completion in wanted)
    assert reasons["stop"] and reasons["length"] and len({tuple(completion.tokens) for completion in wanted}) == 6
    for rows in (1, 3, len(PROMPTS)) if name == "tova" else (2,):
        found, _ = completed(name, rows)
        for index, completion in enumerate(wanted):
            assert_same(found[index], completion)


@pytest.mark.parametrize(("name", "pairs"), [("tova", 2), ("random", 3)])
def test_prompts_are_prefilled_once_and_no_shape_depends_on_what_the_rows_hold(name, pairs, monkeypatch):
    calls, original = [], Generator.compiled

    def recorded(self, program, statics, build):
        run = original(self, program, statics, build)

        def call(*inputs):
            calls.append((program, jax.tree.map(np.shape, inputs)))
            return run(*inputs)

        return call

    monkeypatch.setattr(Generator, "compiled", recorded)
    list(complete(generator(name), PROMPTS, SAMPLED, rows=2, seeds=SEEDS))
    # The long prompt beside a copy, the others in pairs: five, or three if one prefill serves all three equal prompts.
    prefilled = [inputs[2] for program, inputs in calls if program == "prefill"]
    assert prefilled == [(2, 128)] + [(2, 64)] * pairs
    states = [inputs[2] for program, inputs in calls if program == "steps"]
    assert len(states) > 3 and all(shapes == states[0] for shapes in states)
    assert {shape[0] for shape in jax.tree.leaves(states[0], is_leaf=lambda x: isinstance(x, tuple)) if shape} == {2}


def test_the_statistics_count_own_tokens_and_times():
    found, seen = completed("tova", 3)
    last = seen[-1]
    tokens = sum(len(completion.tokens) for completion in found.values())
    assert (last.requests, last.tokens, last.rows) == (len(PROMPTS), tokens, 3)
    assert last.occupancy == pytest.approx(tokens / (3 * 32 * len(seen)))
    assert last.tokens_per_second == pytest.approx(tokens / last.seconds)
    assert 0 < last.queue_wait_mean < last.queue_wait_max < last.first_token_max < last.seconds
    assert last.queue_wait_mean < last.first_token_mean < last.first_token_max
    assert [statistics.tokens for statistics in seen] == sorted(statistics.tokens for statistics in seen)
    # Rows are handed on: six requests on three rows need fewer dispatches than two full batches of them.
    assert len(completed("tova", 1)[1]) > len(seen)


def test_completions_come_as_they_end_and_the_rest_goes_on():
    lengths = {index: len(found.tokens) for index, found in completed("tova", 6)[0].items()}
    assert min(lengths.values()) < 31 < max(lengths.values())
    order = [index for index, _ in complete(generator("tova"), PROMPTS, SAMPLED, rows=6, seeds=SEEDS)]
    assert [lengths[index] >= 32 for index in order] == sorted(lengths[index] >= 32 for index in order)


@pytest.mark.core
def test_what_cannot_work_is_refused_before_the_first_completion_is_asked_for():
    with pytest.raises(UserError, match="rows must be at least 1, not 0"):
        complete(generator("dense"), PROMPTS, SAMPLED, rows=0)
    with pytest.raises(UserError, match="prompt 1 is empty"):
        complete(generator("dense"), [[1], []], SAMPLED, rows=1)
    with pytest.raises(UserError, match="1 seeds for 2 prompts"):
        complete(generator("dense"), [[1], [2]], SAMPLED, rows=1, seeds=[1])
    assert list(complete(generator("dense"), [], SAMPLED, rows=1)) == []
