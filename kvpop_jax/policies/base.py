"""What a policy is: the sizes it asks for, what it does with a prompt, and what it does at every step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from kvpop_jax.cache import CachePlan, LayerCache
from kvpop_jax.eviction import TokenLayout
from kvpop_jax.models import ModelConfig
from kvpop_jax.scorers import Scorer, ScorerDims


@dataclass(frozen=True)
class PolicySettings:
    """What a policy is made from; each takes what it needs.

    Attributes:
        sinks: first tokens that never leave, where the policy keeps sinks.
        window: most recent tokens that never leave, the query included, where the policy has a window.
        scorer: of the learned policies.
    """

    sinks: int = 4
    window: int = 256
    scorer: Scorer | None = None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["token_BS", "hidden_BSE", "q_BSHD", "k_BSKD", "v_BSKD", "layout", "seed_B", "layer"],
    meta_fields=[],
)
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
    """

    token_BS: Int[Array, "B S"]
    hidden_BSE: Float[Array, "B S E"]
    q_BSHD: Float[Array, "B S H D"]
    k_BSKD: Float[Array, "B S K D"]
    v_BSKD: Float[Array, "B S K D"]
    layout: TokenLayout
    seed_B: Int[Array, "B"]
    layer: int | Int[Array, ""]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["token_B", "position_B", "pinned_B", "seed_B", "hidden_BE", "q_BHD", "k_BKD", "v_BKD", "layer"],
    meta_fields=[],
)
@dataclass(frozen=True)
class NewToken:
    """A layer's view of one decode step: the token that arrives. `pinned_B` tokens of each row never leave."""

    token_B: Int[Array, "B"]
    position_B: Int[Array, "B"]
    pinned_B: Int[Array, "B"]
    seed_B: Int[Array, "B"]
    hidden_BE: Float[Array, "B E"]
    q_BHD: Float[Array, "B H D"]
    k_BKD: Float[Array, "B K D"]
    v_BKD: Float[Array, "B K D"]
    layer: int | Int[Array, ""]


@dataclass(frozen=True)
class Policy:
    """An eviction policy as pure functions, of one layer each.

    Attributes:
        name: as in the registry.
        signals: what it reads beside keys and values: "hidden", "attention", "tokens".
        prefill_mode: "expiry" (any chunking of the prompt gives one result) or "one_shot" (evicts after the prompt's
            attention); recorded with every result.
        plan: (budget, model, bytes of a key and a value) -> sizes of the cache; refuses a budget that leaves no pool.
        prefill: (parameters, prompt, plan) -> attention output, cache.
        step: (parameters, cache, new token, plan) -> attention output, cache.
        priorities: (parameters, prompt) -> static priority of every token [B, K, S]: the parallel form that training
            uses. None for policies that have no such form.
    """

    name: str
    signals: frozenset[str]
    prefill_mode: str
    plan: Callable[[int, ModelConfig, int], CachePlan]
    prefill: Callable[[Any, Prompt, CachePlan], tuple[Float[Array, "B S H D"], LayerCache]]
    step: Callable[[Any, LayerCache, NewToken, CachePlan], tuple[Float[Array, "B H D"], LayerCache]]
    priorities: Callable[[Any, Prompt], Float[Array, "B K S"]] | None


def model_dims(config: ModelConfig) -> ScorerDims:
    """What a scorer must know of a model."""
    return ScorerDims(config.hidden_size, config.num_kv_heads, config.head_dim)
