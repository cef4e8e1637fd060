"""What policies do with a budget: exact totals over layers and heads, charges, refusals."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inference.tiny_model import CONFIG, ENTRY_BYTES, SCORERS

from kvpop_jax import policies
from kvpop_jax.errors import UserError
from kvpop_jax.eviction import token_layout
from kvpop_jax.policies import MethodSettings, PolicySettings, Prompt, compose, read_prompt

SETTINGS = PolicySettings(sinks=2, window=4, methods=MethodSettings(observed=4, ada_width=1.5))


def make(name: str):
    return policies.make(name, replace(SETTINGS, scorer=SCORERS.get(name)))


@pytest.mark.core
@pytest.mark.parametrize("layers", [1, 2, 3, 28, 32, 36])
@pytest.mark.parametrize("budget", [33, 128, 512, 1001])
def test_pyramidkv_spreads_its_budget_to_the_entry(budget, layers):
    spread = policies.make("pyramidkv", PolicySettings()).layer_budgets(budget, layers)
    assert len(spread) == layers and sum(spread) == layers * budget
    assert list(spread) == sorted(spread, reverse=True) and min(spread) >= 32
    if budget == 128 and layers == 36:
        # 32 observed tokens and, of 96, from 1.95 times in the first layer to 0.05 in the last.
        assert (spread[0], spread[-1]) == (219, 37)


@pytest.mark.core
def test_pyramidkv_is_snapkv_but_for_its_budgets():
    """Which is why it has no literal form of its own."""
    assert make("pyramidkv").plan(40, CONFIG, ENTRY_BYTES) == make("snapkv").plan(40, CONFIG, ENTRY_BYTES)
    length, rng = 24, np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, length, heads, 16)), jnp.float32) for heads in (4, 2, 2))
    segment_BS = jnp.ones((1, length), jnp.int32)
    layout = token_layout(segment_BS, sinks=0, pool=8)
    prompt = Prompt(segment_BS, segment_BS[..., None], q, k, v, layout, jnp.zeros(1, jnp.int32), 0, jnp.ones(8))
    plan = make("snapkv").plan(12, CONFIG, ENTRY_BYTES).for_prompt
    kept = [jax.jit(make(name).prefill, static_argnums=2)(None, prompt, plan)[1] for name in ("pyramidkv", "snapkv")]
    np.testing.assert_array_equal(kept[0].alive_BKS, kept[1].alive_BKS)


@pytest.mark.core
def test_adakv_shares_exactly_what_the_heads_of_a_layer_have():
    heads, budget, length = 4, 12, 24
    config = replace(CONFIG, num_heads=heads, num_kv_heads=heads)
    policy = make("adakv")
    plan = policy.plan(budget, config, ENTRY_BYTES)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, length, heads, CONFIG.head_dim)), jnp.float32) for _ in range(3))
    # Attention of the first head is even, of the last sharp: the last wins most, and more than it may have.
    q *= jnp.array([0.0, 0.1, 0.1, 3.0])[:, None]
    length_B = jnp.array([length, budget - 1])

    @jax.jit
    def caches():
        def prompt_under(plan):
            segment_BS = (jnp.arange(length) < length_B[:, None]).astype(jnp.int32)
            layout = token_layout(segment_BS, sinks=plan.sinks, pool=plan.pool)
            return Prompt(segment_BS, segment_BS[..., None], q, k, v, layout, length_B, 0, jnp.ones(8))

        return read_prompt(policy, None, prompt_under, plan)[1]

    live_BK = np.asarray(jnp.sum(caches().position_BKC >= 0, axis=-1))
    # One entry per head is charged for the heads' capacities.
    assert plan.state_entries == 1 and live_BK[0].sum() == heads * (budget - 1)
    assert live_BK[0].max() == plan.slots > budget > live_BK[0].min() > 0
    assert np.all(live_BK[1] == budget - 1)
    np.testing.assert_array_equal(caches().state[0], live_BK[0])
    np.testing.assert_array_equal(caches().state[1], [budget - 1] * heads)


@pytest.mark.core
def test_what_a_policy_keeps_beside_its_slots_is_charged():
    """A number per slot is its priority, which all have; of the rest every byte, rounded up to entries."""
    charged = {name: make(name).plan(300, CONFIG, ENTRY_BYTES).state_entries for name in policies.names()}
    group = CONFIG.num_heads // CONFIG.num_kv_heads
    queries = 8 * group * CONFIG.head_dim * 4
    assert charged.pop("rkv") == -(-(queries + 4) // ENTRY_BYTES)
    assert charged.pop("d2o") == charged.pop("adakv") == 1
    assert charged.pop("kvpop") > 1
    assert set(charged.values()) == {0}


@pytest.mark.core
def test_a_prompt_may_be_cut_to_less_than_the_budget_but_not_to_more():
    both = compose(make("snapkv"), make("h2o"), prefill_budget=20)
    plan = both.plan(30, CONFIG, ENTRY_BYTES)
    assert (plan.for_prompt.budget, plan.budget, both.name, both.decode) == (20, 30, "snapkv+h2o", "h2o")
    assert plan.for_prompt.window == SETTINGS.methods.observed
    with pytest.raises(UserError, match=r"policy snapkv\+h2o: the prefill budget 20 is larger than .* budget 19"):
        both.plan(19, CONFIG, ENTRY_BYTES)


@pytest.mark.core
def test_a_name_with_a_plus_is_two_policies():
    made = make("pyramidkv+tova")
    assert made.name == "pyramidkv+tova" and (made.decode, made.prefill_mode) == ("tova", "one_shot")
    assert made.layer_budgets(20, 2) == make("pyramidkv").layer_budgets(20, 2) != (20, 20)
    assert make("tova+pyramidkv").layer_budgets(20, 2) != (20, 20) == make("tova").layer_budgets(20, 2)
    assert make("tova+pyramidkv").decode == "streaming_llm"
    for name in ("snapkv+", "+h2o", "snapkv+h2o+tova", "snapkv+nonesuch"):
        with pytest.raises(UserError, match="unknown policy"):
            make(name)


@pytest.mark.parametrize(
    ("field", "value"), [("kernel", 4), ("observed", 0), ("ada_floor", 1.5), ("decay", 0.0), ("ada_width", 0.5)]
)
def test_a_setting_that_makes_no_sense_is_refused_by_name_and_value(field, value):
    with pytest.raises(UserError, match=rf"{field}.* {value}"):
        MethodSettings(**{field: value})
