"""Every eviction policy behind one interface, one short file each.

A policy is a record of pure functions (`Policy`): it cuts a prompt, takes over what some policy kept of one, and steps.
So the prompt and the steps may belong to two of them (`compose`, "snapkv+h2o"). Every module here is a policy, named
like the file: it defines `make(settings) -> Policy` under the docstring of its paper, and nothing else needs editing.
What they share is in `machinery`.
"""

from kvpop_jax.policies.machinery.base import (
    Kept,
    NewToken,
    Policy,
    Prompt,
    read_prompt,
    uniform_budgets,
)
from kvpop_jax.policies.machinery.compose import compose
from kvpop_jax.policies.machinery.expiry_form import expiry_policy
from kvpop_jax.policies.machinery.registry import check, make, names
from kvpop_jax.policies.machinery.settings import MethodSettings, PolicySettings

__all__ = [
    "Kept",
    "MethodSettings",
    "NewToken",
    "Policy",
    "PolicySettings",
    "Prompt",
    "check",
    "compose",
    "expiry_policy",
    "make",
    "names",
    "read_prompt",
    "uniform_budgets",
]
