"""Every eviction policy behind one interface, one short file each.

A policy is a record of pure functions (`base.Policy`). A file of this folder that defines `make(settings) -> Policy`
under the docstring of its paper is a policy, named like the file; nothing else needs editing. Policies whose priorities
never change, and so have an expiry form, are two scoring functions given to `expiry_form.expiry_policy`.
"""

from kvpop_jax.policies.base import NewToken, Policy, PolicySettings, Prompt, model_dims
from kvpop_jax.policies.expiry_form import expiry_policy
from kvpop_jax.policies.registry import make, names

__all__ = ["NewToken", "Policy", "PolicySettings", "Prompt", "expiry_policy", "make", "model_dims", "names"]
