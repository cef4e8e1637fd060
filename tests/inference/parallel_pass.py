"""What the bounded cache must reproduce: one pass over whole rows, under the mask of static priorities."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from inference.tiny_model import CONFIG, FREQUENCY_D2, tiny_model

from kvpop_jax.cache import CachePlan
from kvpop_jax.eviction import expiry_from_priority, token_layout
from kvpop_jax.models import apply_layers, unembed
from kvpop_jax.policies import Policy, Prompt
from pallas_kernels import NEVER, masked_attention


def parallel_logits(
    policies: list[Policy],
    plans: list[CachePlan],
    scorers: list,
    token_BT: np.ndarray,
    seed_B: np.ndarray,
    pinned_prompt_B: np.ndarray,
) -> tuple[np.ndarray, list[int]]:
    """Logits of every token, and the largest number of keys that any query of each layer sees.

    Args:
        policies, plans, scorers: one per layer.
        pinned_prompt_B: length of the prompt that each row pins, 0 for none.
    """
    B, T = token_BT.shape
    index_T = np.arange(T)
    prompt_BT = index_T < pinned_prompt_B[:, None]
    expiries = [np.full((B, CONFIG.num_kv_heads, T), NEVER, np.int32) for _ in plans]
    # What a layer reads depends on the evictions of the layers below it only: one more of them is right in every round.
    for layer, (policy, plan, scorer) in enumerate(zip(policies, plans, scorers, strict=True)):
        _, inputs = _masked_pass(tiny_model().params, token_BT, expiries)
        layout = _layout(np.ones_like(token_BT), plan.sinks, plan.pool, prompt_BT)
        seen = inputs[layer]
        tensors = seen.hidden_BTE, seen.q_BTHD, seen.k_BTKD, seen.v_BTKD
        prompt = Prompt(jnp.asarray(token_BT), *tensors, layout, jnp.asarray(seed_B), layer, FREQUENCY_D2)
        expiries[layer] = _expiry(_priorities(policy, scorer, prompt), layout, plan.window)
    logits_BTV, _ = _masked_pass(tiny_model().params, token_BT, expiries)
    visible = [(index_T <= index_T[:, None]) & (index_T[:, None] < x[:, :, None]) for x in map(np.asarray, expiries)]
    return np.asarray(logits_BTV), [int(x.sum(-1).max()) for x in visible]


# Compiled apart, so that all policies share what they can: compiling is all that these tests cost.
@jax.jit
def _masked_pass(params, token_BT, expiries):
    B, T = token_BT.shape
    segment_BT = jnp.ones_like(token_BT)

    def attend(layer, inputs):
        o_BTHD, _lse = masked_attention(inputs.q_BTHD, inputs.k_BTKD, inputs.v_BTKD, expiries[layer], segment_BT)
        return o_BTHD, inputs

    hidden_BTE, inputs = apply_layers(CONFIG, params, token_BT, jnp.broadcast_to(jnp.arange(T), (B, T)), attend)
    return unembed(CONFIG, params, hidden_BTE), inputs


@jax.jit
def _layout(segment_BT, sinks, pool, prompt_BT):
    return token_layout(segment_BT, sinks=sinks, pool=pool, prompt_BS=prompt_BT)


_expiry = jax.jit(expiry_from_priority, static_argnums=2)


@partial(jax.jit, static_argnums=0)
def _priorities(policy, scorer, prompt):
    return policy.priorities(scorer, prompt)
