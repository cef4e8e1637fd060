"""Two policies as one: the prompt is cut by the first, the steps belong to the second."""

from dataclasses import replace
from typing import Any

from jaxtyping import Array, Float

from kvpop_jax.cache import CachePlan, LayerCache
from kvpop_jax.errors import UserError
from kvpop_jax.models import ModelConfig
from kvpop_jax.policies.machinery.base import Kept, NewToken, Policy, Prompt, uniform_budgets


def compose(prefill: Policy, decode: Policy, prefill_budget: int | None = None) -> Policy:
    """The policy "a+b": `prefill` keeps of a prompt what it will, and `decode` takes that over.

    Its parameters, where either part has any, are the pair of theirs. If `prefill` is dense, the whole prompt is kept
    until `decode` cuts it, once, before the first step.

    Args:
        prefill, decode: any two policies; of a prefill-only one the default decode policy is dropped. Budgets of layers
            are spread by `prefill` if it spreads them, else by `decode`.
        prefill_budget: entries per KV head that `prefill` gets in every layer; None for the budget of the layer.

    Raises:
        UserError: when planned: the prefill budget is larger than the budget.
    """
    name = f"{prefill.name}+{decode.name}"
    spreads = prefill.layer_budgets is not uniform_budgets

    def plan(budget: int, config: ModelConfig, entry_bytes: int) -> CachePlan:
        first = budget if prefill_budget is None else prefill_budget
        if first > budget:
            raise UserError(f"policy {name}: the prefill budget {first} is larger than the decode budget {budget}")
        cut = prefill.plan(first, config, entry_bytes)
        return replace(decode.plan(budget, config, entry_bytes), prompt=cut.for_prompt)

    def cut_prompt(params: Any, prompt: Prompt, plan: CachePlan) -> tuple[Float[Array, "B S H D"], Kept]:
        return prefill.prefill(_part(params, 0), prompt, plan)

    def take_over(params: Any, prompt: Prompt, kept: Kept, plan: CachePlan) -> LayerCache:
        return decode.take_over(_part(params, 1), prompt, kept, plan)

    def step(
        params: Any, cache: LayerCache, new: NewToken, plan: CachePlan
    ) -> tuple[Float[Array, "B H D"], LayerCache]:
        return decode.step(_part(params, 1), cache, new, plan)

    return Policy(
        name=name,
        decode=decode.decode,
        signals=prefill.signals | decode.signals,
        prefill_mode=prefill.prefill_mode,
        plan=plan,
        prefill=cut_prompt,
        take_over=take_over,
        step=step,
        priorities=None,
        rewrites=decode.rewrites,
        shrinks=decode.shrinks,
        layer_budgets=prefill.layer_budgets if spreads else decode.layer_budgets,
    )


def _part(params, index):
    return None if params is None else params[index]
