"""What the bounded cache must reproduce: one pass over whole rows, under the mask of static priorities."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from inference.tiny_model import CONFIG, tiny_model

from kvpop_jax.cache import CachePlan
from kvpop_jax.eviction import expiry_from_priority, token_layout
from kvpop_jax.models import apply_layers, unembed
from kvpop_jax.policies import Policy, Prompt
from pallas_kernels import masked_attention


def parallel_logits(
    policies: list[Policy],
    plans: list[CachePlan],
    scorers: list,
    token_BT: np.ndarray,
    seed_B: np.ndarray,
    pinned_prompt_B: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Logits of every token, and the largest number of keys that any query of each layer sees.

    Args:
        policies, plans, scorers: one per layer.
        pinned_prompt_B: length of the prompt that each row pins, 0 for none.
    """
    B, T = token_BT.shape
    index_BT = np.broadcast_to(np.arange(T), (B, T))
    segment_BT = np.ones_like(token_BT)

    def attend(layer, inputs):
        plan = plans[layer]
        layout = _layout(segment_BT, plan.sinks, plan.pool, index_BT < pinned_prompt_B[:, None])
        tensors = inputs.q_BTHD, inputs.k_BTKD, inputs.v_BTKD
        prompt = Prompt(jnp.asarray(token_BT), inputs.hidden_BTE, *tensors, layout, jnp.asarray(seed_B), layer)
        priority_BKT = _priorities(policies[layer], scorers[layer], prompt)
        expiry_BKT = _expiry(priority_BKT, layout, plan.window)
        o_BTHD, _lse = _attention(*tensors, expiry_BKT, segment_BT)
        seen_BKTS = (np.arange(T) <= np.arange(T)[:, None]) & (np.arange(T)[:, None] < expiry_BKT[:, :, None])
        return o_BTHD, seen_BKTS.sum(-1).max()

    hidden_BTE, most_seen = apply_layers(CONFIG, tiny_model().params, jnp.asarray(token_BT), index_BT, attend)
    return np.asarray(unembed(CONFIG, tiny_model().params, hidden_BTE)), np.asarray(most_seen)


# Compiled apart, so that all policies and layers share what they can; compiling is all that these tests cost.
_layout = jax.jit(lambda segment_BT, sinks, pool, prompt_BT: token_layout(
    segment_BT, sinks=sinks, pool=pool, prompt_BS=prompt_BT
))  # fmt: skip
_expiry = jax.jit(expiry_from_priority, static_argnums=2)
_attention = jax.jit(masked_attention)


@partial(jax.jit, static_argnums=0)
def _priorities(policy, scorer, prompt):
    return policy.priorities(scorer, prompt)
