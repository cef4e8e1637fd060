"""A policy and a budget of its own for every layer, prompts cut by one policy and steps by another, through a model."""

import numpy as np
import pytest
from inference.tiny_model import CONFIG, ENTRY_BYTES, distinct_tokens, make_policy, random_scorer, tiny_model

from kvpop_jax.errors import UserError
from kvpop_jax.inference import Generator, SamplingParams
from kvpop_jax.policies import compose

PROMPTS = [distinct_tokens(1, 64)[0][:50].tolist(), distinct_tokens(2, 64)[1][:12].tolist()]
GREEDY = SamplingParams(max_new_tokens=40)


def test_layers_have_their_own_policy_and_budget_and_are_reported_apart():
    first = compose(make_policy("h2o"), make_policy("kvpop"), prefill_budget=20)
    second = compose(make_policy("kvpop"), make_policy("rkv"))
    scorers = [(None, random_scorer("kvpop", 0)), (random_scorer("kvpop", 1), None)]
    generator = Generator(tiny_model(), [first, second], [60, 64], scorers)
    completions = generator.generate(PROMPTS, GREEDY)
    for completion in completions:
        report = completion.cache
        assert len(completion.tokens) == GREEDY.max_new_tokens and np.isfinite(completion.logprobs).all()
        assert report.layer_budget == (60, 64) and (report.budget, report.total_budget) == (62, 124)
        assert report.total_allocated == sum(report.layer_allocated)
        assert report.layer_allocated == tuple(plan.slots for plan in generator.plans(0))
        assert report.layer_allocated[1] > report.layer_budget[1]  # R-KV's scratch
        assert report.bytes == sum(report.layer_bytes) and report.layer_bytes[0] < report.layer_bytes[1]
        assert all(live <= slots for live, slots in zip(report.layer_peak_live, report.layer_allocated, strict=True))
        assert report.peak_live == max(report.layer_peak_live)
        assert (report.prefill_mode, report.decode) == ("one_shot, expiry", "kvpop, rkv")
    # 20 of the long prompt's tokens are left in the first layer, and no more enter than are generated.
    assert completions[0].cache.layer_peak_live[0] <= 20 + GREEDY.max_new_tokens
    assert completions[0].cache.prompt_survival < completions[1].cache.prompt_survival


def test_an_average_budget_is_spread_by_the_policy():
    generator = Generator(tiny_model(), make_policy("pyramidkv"), 48)
    (completion,) = generator.generate(PROMPTS[:1], GREEDY)
    report = completion.cache
    assert sum(report.layer_budget) == 2 * 48 == 2 * report.budget and report.layer_budget[0] > report.layer_budget[1]
    # Nothing is padded to the largest layer: a key and a value, position and priority of every slot, and the ring.
    per_slot = CONFIG.num_kv_heads * (ENTRY_BYTES + 8)
    assert report.layer_bytes == tuple(per_slot * slots + CONFIG.num_kv_heads * 4 for slots in report.layer_allocated)
    assert report.layer_peak_live == report.layer_peak_mean == report.layer_budget


@pytest.mark.core
def test_policies_and_budgets_that_are_not_one_per_layer_are_refused():
    with pytest.raises(UserError, match="budget has 3 entries; the model has 2 layers"):
        Generator(tiny_model(), make_policy("tova"), [8, 8, 8])
    with pytest.raises(UserError, match="policy has 1 entries; the model has 2 layers"):
        Generator(tiny_model(), [make_policy("tova")], 8)
    pinned = Generator(tiny_model(), make_policy("snapkv+tova"), 60, pin_prompt=True)
    with pytest.raises(UserError, match=r"pin_prompt: a prompt of 50 tokens leaves no pool .* it may have 27"):
        pinned.generate(PROMPTS, GREEDY)
    with pytest.raises(
        UserError, match=r"policy tova\+dense keeps everything: a budget of 60 cannot hold 50 \+ 40 tokens"
    ):
        Generator(tiny_model(), make_policy("tova+dense"), 60).generate(PROMPTS, GREEDY)
