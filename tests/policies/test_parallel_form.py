"""Policies whose priorities never change: the bounded cache, fed token by token, against one masked pass."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inference.tiny_model import CONFIG, EXPIRY_POLICIES, SCORERS, make_policy, random_scorers, random_tokens, tiny_model
from oracles import assert_close

from kvpop_jax.eviction import expiry_from_priority, token_layout
from kvpop_jax.inference import decode_step, prefill
from kvpop_jax.inference.decode import Setup
from kvpop_jax.models import apply_layers, forward, unembed
from kvpop_jax.policies import Prompt
from pallas_kernels import masked_attention

LENGTH, BUDGET = 56, 26
TOKEN_BT = random_tokens(3, LENGTH)
SEED_B = np.array([7, 8, 7], np.int32)
# One token, fewer than the window, more than the budget; a pinned prompt must leave a pool.
PROMPT_B = np.array([1, 4, 40], np.int32)
PINNED_PROMPT_B = np.array([1, 4, 13], np.int32)


def make_setup(name: str, *, budget: int | None = None, pin_prompt: bool = False) -> Setup:
    policy = make_policy(name)
    budget = budget or (LENGTH if name == "dense" else BUDGET)
    plan = policy.plan(budget, CONFIG, 2 * CONFIG.head_dim * 4)
    return Setup(CONFIG, (policy,) * CONFIG.num_layers, (plan,) * CONFIG.num_layers, pin_prompt)


@partial(jax.jit, static_argnums=0)
def cached_logits(setup, params, scorers, token_BT, prompt_B):
    """Prefills each row's prompt and feeds it the rest: logits of every token from the prompt's last one on, else 0."""
    B, T = token_BT.shape
    row_B = jnp.arange(B)
    first_BV, caches = prefill(setup, params, scorers, token_BT, prompt_B, SEED_B)
    logits_BTV = jnp.zeros((B, T, first_BV.shape[-1]), first_BV.dtype).at[row_B, prompt_B - 1].set(first_BV)

    def feed(carry, step):
        caches, logits_BTV = carry
        position_B = prompt_B + step
        token_B = token_BT[row_B, jnp.minimum(position_B, T - 1)]
        logits_BV, caches = decode_step(setup, params, scorers, caches, token_B, position_B, prompt_B, SEED_B)
        return (caches, logits_BTV.at[row_B, position_B].set(logits_BV, mode="drop")), None

    (_, logits_BTV), _ = jax.lax.scan(feed, (caches, logits_BTV), jnp.arange(T - 1))
    return logits_BTV


@partial(jax.jit, static_argnums=0)
def parallel_logits(setup, params, scorers, token_BT, prompt_B):
    """One pass over whole rows under the mask of the policy's static priorities, and which keys live to the end."""
    B, T = token_BT.shape
    segment_BT = jnp.ones_like(token_BT)
    prompt_BT = jnp.arange(T) < prompt_B[:, None] if setup.pin_prompt else None

    def attend(layer, inputs):
        plan, policy = setup.plans[layer], setup.policies[layer]
        layout = token_layout(segment_BT, sinks=plan.sinks, pool=plan.pool, prompt_BS=prompt_BT)
        tensors = inputs.hidden_BTE, inputs.q_BTHD, inputs.k_BTKD, inputs.v_BTKD
        priority_BKT = policy.priorities(scorers[layer], Prompt(token_BT, *tensors, layout, SEED_B, layer))
        expiry_BKT = expiry_from_priority(priority_BKT, layout, plan.window)
        return masked_attention(*tensors[1:], expiry_BKT, segment_BT)[0], expiry_BKT >= T

    hidden_BTE, kept = apply_layers(CONFIG, params, token_BT, jnp.broadcast_to(jnp.arange(T), (B, T)), attend)
    return unembed(CONFIG, params, hidden_BTE), jnp.stack(kept)


def answers(prompt_B) -> np.ndarray:
    """Where logits are compared: from each prompt's last token on."""
    return np.arange(LENGTH) >= prompt_B[:, None] - 1


@pytest.mark.parametrize("pin_prompt", [False, True])
@pytest.mark.parametrize("name", EXPIRY_POLICIES)
def test_a_prompt_and_single_steps_give_the_logits_of_one_parallel_pass(name, pin_prompt):
    setup = make_setup(name, pin_prompt=pin_prompt)
    params, scorers = tiny_model().params, random_scorers(name) or [None] * CONFIG.num_layers
    prompt_B = PINNED_PROMPT_B if pin_prompt else PROMPT_B
    wanted_BTV, kept = parallel_logits(setup, params, scorers, TOKEN_BT, prompt_B)
    got_BTV = cached_logits(setup, params, scorers, TOKEN_BT, prompt_B)
    assert kept.all() == (name == "dense"), "nothing was evicted: the comparison would be empty"
    compared_BT = answers(prompt_B)
    assert_close(np.asarray(got_BTV)[compared_BT], np.asarray(wanted_BTV)[compared_BT], 2e-5)
