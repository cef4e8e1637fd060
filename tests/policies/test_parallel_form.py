"""Policies whose priorities never change: the bounded cache, fed token by token, against one masked pass."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inference.parallel_pass import parallel_logits
from inference.tiny_model import (
    CONFIG,
    ENTRY_BYTES,
    FREQUENCY_D2,
    distinct_tokens,
    initial_scorer,
    make_policy,
    random_scorer,
    tiny_model,
)
from oracles import assert_close

from kvpop_jax.cache import live_entries
from kvpop_jax.eviction import token_layout
from kvpop_jax.models import apply_layers, forward, unembed
from kvpop_jax.policies import NewToken, Prompt, read_prompt

LENGTH, BUDGET, TOLERANCE = 56, 30, 2e-5
TOKEN_BT = distinct_tokens(6, LENGTH)
SEED_B = np.array([7, 8, 7, 8, 7, 8], np.int32)
# One token, fewer than the window, more than the budget; and three that are pinned, the longest leaving a small pool.
PROMPT_B = np.array([1, 4, 40, 1, 4, 8], np.int32)
PINNED_PROMPT_B = np.where(np.arange(6) < 3, 0, PROMPT_B)
ANSWER_BT = np.arange(LENGTH) >= PROMPT_B[:, None] - 1
# One policy per layer, so that a model of two layers tests two.
PAIRS = [
    ("dense", "streaming_llm"),
    ("random", "knorm"),
    pytest.param(("kvpop", "kvpop_mlp"), marks=pytest.mark.core),
    ("kvpop_immediate", "random"),
]


def plan_of(name: str, budget: int = BUDGET):
    return make_policy(name).plan(LENGTH if name == "dense" else budget, CONFIG, ENTRY_BYTES)


@partial(jax.jit, static_argnums=0)
def cached_logits(names, params, scorers, token_BT):
    """Prefills each row's prompt and feeds it the rest, on caches of bounded size.

    Returns:
        Logits of every token from the prompt's last one on, and the entries that were live at each step and layer.
    """
    policies, plans = [make_policy(name) for name in names], [plan_of(name) for name in names]
    (B, T), row_B, seed_B = token_BT.shape, jnp.arange(len(token_BT)), jnp.asarray(SEED_B)
    index_BT = jnp.broadcast_to(jnp.arange(T), (B, T))

    def attend_to_prompt(layer, inputs):
        def prompt_under(plan):
            layout = token_layout(
                (index_BT < PROMPT_B[:, None]).astype(jnp.int32),
                sinks=plan.sinks,
                pool=plan.pool,
                prompt_BS=index_BT < PINNED_PROMPT_B[:, None],
            )
            tensors = inputs.hidden_BTE, inputs.q_BTHD, inputs.k_BTKD, inputs.v_BTKD
            return Prompt(token_BT, *tensors, layout, seed_B, layer, FREQUENCY_D2)

        return read_prompt(policies[layer], scorers[layer], prompt_under, plans[layer])

    def feed(carry, step):
        caches, logits_BTV = carry
        position_B = PROMPT_B + step
        token_B = token_BT[row_B, jnp.minimum(position_B, T - 1)]

        def read_token(layer, inputs):
            pinned_B = jnp.maximum(PINNED_PROMPT_B, plans[layer].sinks)
            own_B = jnp.full(len(token_B), True)
            tensors = (x[:, 0] for x in (inputs.hidden_BTE, inputs.q_BTHD, inputs.k_BTKD, inputs.v_BTKD))
            new = NewToken(token_B, position_B, pinned_B, own_B, seed_B, *tensors, layer, FREQUENCY_D2)
            o_BHD, cache = policies[layer].step(scorers[layer], caches[layer], new, plans[layer])
            return o_BHD[:, None], cache

        hidden_B1E, caches = apply_layers(CONFIG, params, token_B[:, None], position_B[:, None], read_token)
        logits_BTV = logits_BTV.at[row_B, position_B].set(unembed(CONFIG, params, hidden_B1E[:, 0]), mode="drop")
        return (caches, logits_BTV), jnp.stack([live_entries(cache).max(-1) for cache in caches])

    hidden_BTE, caches = apply_layers(CONFIG, params, token_BT, index_BT, attend_to_prompt)
    first_BTV = jnp.where((index_BT == PROMPT_B[:, None] - 1)[..., None], unembed(CONFIG, params, hidden_BTE), 0)
    (_, logits_BTV), live_nNB = jax.lax.scan(feed, (caches, first_BTV), jnp.arange(T - 1))
    return logits_BTV, live_nNB


def parallel(names, scorers, plans):
    policies = [make_policy(name) for name in names]
    return parallel_logits(policies, plans, scorers, TOKEN_BT, SEED_B, PINNED_PROMPT_B)


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_a_prompt_and_single_steps_give_the_logits_of_one_parallel_pass(names):
    scorers = [random_scorer(name, layer) for layer, name in enumerate(names)]
    plans = [plan_of(name) for name in names]
    wanted_BTV, most_seen = parallel(names, scorers, plans)
    got_BTV, live_nNB = cached_logits(names, tiny_model().params, scorers, TOKEN_BT)
    slots = [plan.slots for plan in plans]
    # The pool was overfull, or this would compare nothing; and not one slot beyond the plan was ever used.
    assert most_seen == slots
    assert list(np.max(live_nNB, axis=(0, 2))) == slots and np.min(live_nNB) > 0
    assert_close(np.asarray(got_BTV)[ANSWER_BT], wanted_BTV[ANSWER_BT], TOLERANCE)


@pytest.mark.core
def test_an_untrained_scorer_with_age_decay_is_streaming_llm_at_the_same_slots():
    names = ("kvpop", "kvpop_mlp")
    plans = [plan_of(name) for name in names]
    wanted_BTV, _ = parallel(["streaming_llm"] * 2, [None, None], plans)
    scorers = [initial_scorer(name, layer) for layer, name in enumerate(names)]
    got_BTV, _ = cached_logits(names, tiny_model().params, scorers, TOKEN_BT)
    assert_close(np.asarray(got_BTV)[ANSWER_BT], wanted_BTV[ANSWER_BT], TOLERANCE)


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_a_pool_as_long_as_the_text_gives_the_dense_logits(names):
    scorers = [random_scorer(name, layer) for layer, name in enumerate(names)]
    got_BTV, _ = parallel(names, scorers, [plan_of(name, budget=2 * LENGTH) for name in names])
    wanted_BTV = jax.jit(forward, static_argnums=0)(CONFIG, tiny_model().params, TOKEN_BT)
    assert_close(got_BTV, np.asarray(wanted_BTV), TOLERANCE)
