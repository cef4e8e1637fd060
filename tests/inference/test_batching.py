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
LONG = 2
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


def requests(name: str) -> list[int]:
    """Of the prompts; only one policy has those of two buckets."""
    return [index for index in range(len(PROMPTS)) if name == "tova" or index != LONG]


@cache
def completed(name: str, rows: int) -> tuple[list[int], list[Completion], list[BatchStatistics]]:
    """Requests as they ended, their completions in order, and the statistics on the way."""
    chosen, seen = requests(name), []
    prompts, seeds = [PROMPTS[index] for index in chosen], [SEEDS[index] for index in chosen]
    pairs = list(complete(generator(name), prompts, SAMPLED, rows=rows, seeds=seeds, progress=seen.append))
    assert sorted(index for index, _ in pairs) == list(range(len(chosen)))
    return (
        [index for index, _ in pairs],
        [completion for _, completion in sorted(pairs, key=lambda pair: pair[0])],
        seen,
    )


def assert_same(got: Completion, wanted: Completion):
    assert (got.tokens, got.finish_reason) == (wanted.tokens, wanted.finish_reason)
    np.testing.assert_allclose(got.logprobs, wanted.logprobs, atol=1e-4)
    for field in fields(wanted.cache):
        assert getattr(got.cache, field.name) == pytest.approx(getattr(wanted.cache, field.name)), field.name


@pytest.mark.parametrize(("name", "row_counts"), [("tova", (1, 3, 6)), ("dense", (3,))])
def test_completions_and_reports_are_those_of_generate_whatever_the_rows(name, row_counts):
    chosen = requests(name)
    wanted = generator(name).generate([PROMPTS[i] for i in chosen], SAMPLED, [SEEDS[i] for i in chosen])
    reasons = Counter(completion.finish_reason for completion in wanted)
    assert reasons["stop"] and reasons["length"]
    assert len({tuple(completion.tokens) for completion in wanted}) == len(wanted)
    for rows in row_counts:
        for got, one in zip(completed(name, rows)[1], wanted, strict=True):
            assert_same(got, one)


# The long prompt beside a copy of it, and the others in pairs: five where the policy draws, else three different ones.
@pytest.mark.parametrize(("name", "prefills"), [("tova", [(2, 128), (2, 64), (2, 64)]), ("random", [(2, 64)] * 3)])
def test_prompts_are_prefilled_once_and_no_shape_depends_on_what_the_rows_hold(name, prefills, monkeypatch):
    calls, original = [], Generator.compiled

    def recorded(self, program, statics, build):
        run = original(self, program, statics, build)

        def call(*inputs):
            calls.append((program, jax.tree.map(np.shape, inputs)))
            return run(*inputs)

        return call

    monkeypatch.setattr(Generator, "compiled", recorded)
    completed.__wrapped__(name, 3)
    assert [inputs[2] for program, inputs in calls if program == "prefill"] == prefills
    states = [inputs[2] for program, inputs in calls if program == "steps"]
    assert len(states) >= 3 and all(shapes == states[0] for shapes in states)
    assert {shape[0] for shape in jax.tree.leaves(states[0], is_leaf=lambda x: isinstance(x, tuple)) if shape} == {3}


def test_the_statistics_count_own_tokens_and_times():
    _, completions, seen = completed("tova", 3)
    last = seen[-1]
    tokens = sum(len(completion.tokens) for completion in completions)
    assert (last.requests, last.tokens, last.rows) == (len(PROMPTS), tokens, 3)
    assert last.occupancy == pytest.approx(tokens / (3 * 32 * len(seen)))
    assert last.tokens_per_second == pytest.approx(tokens / last.seconds)
    assert 0 < last.queue_wait_mean < last.queue_wait_max < last.first_token_max < last.seconds
    assert last.queue_wait_mean < last.first_token_mean < last.first_token_max
    assert [statistics.tokens for statistics in seen] == sorted(statistics.tokens for statistics in seen)
    assert len(completed("tova", 1)[2]) > len(seen) > len(completed("tova", 6)[2]) == 2


def test_completions_come_as_they_end_and_the_rest_goes_on():
    order, completions, _ = completed("tova", 6)
    dispatches = [-(-(len(completions[index].tokens) + 1) // 32) for index in order]
    assert dispatches == sorted(dispatches) and set(dispatches) == {1, 2}


@pytest.mark.core
def test_what_cannot_work_is_refused_before_the_first_completion_is_asked_for():
    with pytest.raises(UserError, match="rows must be at least 1, not 0"):
        complete(generator("dense"), PROMPTS, SAMPLED, rows=0)
    with pytest.raises(UserError, match="prompt 1 is empty"):
        complete(generator("dense"), [[1], []], SAMPLED, rows=1)
    with pytest.raises(UserError, match="1 seeds for 2 prompts"):
        complete(generator("dense"), [[1], [2]], SAMPLED, rows=1, seeds=[1])
    assert list(complete(generator("dense"), [], SAMPLED, rows=1)) == []
