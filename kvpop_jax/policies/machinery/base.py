"""What a policy is: the sizes it asks for, what it keeps of a prompt and how it goes on, and every step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from kvpop_jax.cache import CachePlan, LayerCache
from kvpop_jax.eviction import TokenLayout
from kvpop_jax.models import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prompt:
    """A layer's view of whole sequences, right-padded: a prompt to prefill, or a row to train on.

    Attributes:
        token_BS: token ids.
        hidden_BSE: the layer's input after its norm.
        q_BSHD, k_BSKD, v_BSKD: after rotary embedding.
        layout: documents, pinned tokens, pool sizes.
        seed_B: one seed per row, for policies that draw.
        layer: index of the layer, an array where layers are scanned.
        frequency_D2: radians per position of each rotary pair, for policies that turn keys or queries back.
    """

    token_BS: Int[Array, "B S"]
    hidden_BSE: Float[Array, "B S E"]
    q_BSHD: Float[Array, "B S H D"]
    k_BSKD: Float[Array, "B S K D"]
    v_BSKD: Float[Array, "B S K D"]
    layout: TokenLayout
    seed_B: Int[Array, "B"]
    layer: int | Int[Array, ""]
    frequency_D2: Float[Array, "D2"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """What survives a prompt.

    Attributes:
        alive_BKS: the tokens that stay, at most as many per KV head as the plan has slots.
        k_BSKD, v_BSKD: the prompt's own, or with what was merged into them.
    """

    alive_BKS: Bool[Array, "B K S"]
    k_BSKD: Float[Array, "B S K D"]
    v_BSKD: Float[Array, "B S K D"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NewToken:
    """A layer's view of one decode step: the token that arrives.

    Attributes:
        token_B, position_B: which, and where.
        pinned_B: the first tokens of each row that never leave.
        own_B: the rows that the step is for. What becomes of the others is dropped; their caches keep the tokens that
            they have, so that these can be counted.
        seed_B: one seed per row, for policies that draw.
        hidden_BE, q_BHD, k_BKD, v_BKD, layer, frequency_D2: as in `Prompt`.
    """

    token_B: Int[Array, "B"]
    position_B: Int[Array, "B"]
    pinned_B: Int[Array, "B"]
    own_B: Bool[Array, "B"]
    seed_B: Int[Array, "B"]
    hidden_BE: Float[Array, "B E"]
    q_BHD: Float[Array, "B H D"]
    k_BKD: Float[Array, "B K D"]
    v_BKD: Float[Array, "B K D"]
    layer: int | Int[Array, ""]
    frequency_D2: Float[Array, "D2"]


def uniform_budgets(budget: int, num_layers: int) -> tuple[int, ...]:
    """The same budget for every layer."""
    return (budget,) * num_layers


@dataclass(frozen=True)
class Policy:
    """An eviction policy as pure functions, of one layer each.

    Attributes:
        name: as in the registry.
        decode: the policy whose rule the steps follow: itself, or for a prefill-only method the one that keeps it
            bounded; recorded with every result.
        signals: what it reads beside keys and values: "hidden", "attention" (queries), "tokens", "seed". Nothing else
            of these is looked at, so nothing else is computed. Without "seed" equal prompts leave equal caches, and one
            prefill serves all completions of a prompt.
        prefill_mode: "expiry" (any chunking of the prompt gives one result) or "one_shot" (evicts after the prompt's
            attention); recorded with every result.
        plan: (budget, model, bytes of a key and a value) -> sizes of the cache; refuses a budget that leaves no pool.
        prefill: (parameters, prompt, `plan.for_prompt`) -> attention output, what survives the prompt.
        take_over: (parameters, prompt, what was kept of it, plan) -> the cache that `step` goes on from: priorities and
            state of what was kept, by whatever policy; of more than the budget, the best by this policy's own rule.
        step: (parameters, cache, new token, plan) -> attention output, cache.
        priorities: (parameters, prompt) -> static priority of every token [B, K, S]: the parallel form that training
            uses. None for policies that have no such form.
        rewrites: steps change rows that are cached already, or turn all of them; quantised ones would be widened and
            rounded again at every step, so they are refused.
        shrinks: a step may leave a head fewer tokens than it had, so what is live must be counted at every step.
        layer_budgets: (average budget, layers) -> budget of every layer; their sum is exactly layers * budget.
    """

    name: str
    decode: str
    signals: frozenset[str]
    prefill_mode: str
    plan: Callable[[int, ModelConfig, int], CachePlan]
    prefill: Callable[[Any, Prompt, CachePlan], tuple[Float[Array, "B S H D"], Kept]]
    take_over: Callable[[Any, Prompt, Kept, CachePlan], LayerCache]
    step: Callable[[Any, LayerCache, NewToken, CachePlan], tuple[Float[Array, "B H D"], LayerCache]]
    priorities: Callable[[Any, Prompt], Float[Array, "B K S"]] | None
    rewrites: bool = False
    shrinks: bool = False
    layer_budgets: Callable[[int, int], tuple[int, ...]] = uniform_budgets


def read_prompt(
    policy: Policy, params: Any, prompt_under: Callable[[CachePlan], Prompt], plan: CachePlan
) -> tuple[Float[Array, "B S H D"], LayerCache]:
    """One layer's prompt from attention to the cache that steps go on from.

    Where both parts need the same scores of the prompt, both compute them: in one compiled program XLA does it once.

    Args:
        policy, params: of the layer.
        prompt_under: the prompt, laid out with the sinks and pool of a plan; those of the two parts may differ.
        plan: of the layer.
    """
    o_BSHD, kept = policy.prefill(params, prompt_under(plan.for_prompt), plan.for_prompt)
    return o_BSHD, policy.take_over(params, prompt_under(plan), kept, plan)
